"""The benchmark of a mixture's step counts the bytes of the experts that it reads, and judges by its bars."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch

from chorus.core.model import experts as mixture
from chorus.ops import native_library
from chorus.ops.expert_products import Matrix
from chorus.perf.bench import experts_step
from chorus.perf.bench.experts_step import Layers, Shape, main

SMALL = Shape(hidden=32, size=16, count=6, per_token=2)

FLAGS = ["--layers", "2", "--experts", "6", "--hidden", "32", "--size", "16", "--per-token", "2", "--rounds", "2"]
FLAGS += ["--threads", "1", "--memory", str(1 << 20)]


@pytest.mark.parametrize("rows", [1, 8])
def test_bytes_are_those_of_the_experts_that_are_read(monkeypatch, rows):
    assert SMALL.expert_bytes == (2 * 16 * 32 + 32 * 16) * 2
    seen, multiply = [], mixture.multiply_each

    def counted(x: torch.Tensor, ends: Sequence[int], matrices: Sequence[Matrix], biases: None = None) -> torch.Tensor:
        if len(x) == rows * SMALL.per_token:  # the router has each row once
            seen.append(len(matrices))
        return multiply(x, ends, matrices, biases)

    monkeypatch.setattr(mixture, "multiply_each", counted)
    clock = iter(range(100))
    monkeypatch.setattr(experts_step.time, "perf_counter", lambda: next(clock))
    assert Layers(SMALL, 2).rate(rows) == seen[0] * SMALL.expert_bytes
    assert seen == [seen[0]] * 2, "gate and up, and down"
    assert seen[0] == 2 if rows == 1 else 2 < seen[0] <= 6


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_experts_are_packed_for_the_kernels_that_are_asked_for(monkeypatch, kernels):
    packed, pack = [], experts_step.PACKS[kernels]
    monkeypatch.setitem(experts_step.PACKS, kernels, lambda weight: packed.append(1) or pack(weight))
    main([*FLAGS, "--kernels", kernels, "--rows", "3"])
    assert len(packed) == 2 * 2 * SMALL.count


@pytest.mark.parametrize(("rate", "code"), [(1.0, 0), (1e15, 1)])
def test_the_share_of_the_memorys_rate_is_judged(monkeypatch, capsys, rate, code):
    monkeypatch.setattr(experts_step, "read_rate", lambda *_: rate)
    assert main(FLAGS) == code
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["met"] is (code == 0)
    assert set(result["shares"]) == {"1", "8"}


@pytest.mark.skipif(not native_library.available(torch.float32), reason="the native library is not built")
def test_the_limit_is_measured(capsys):
    main([*FLAGS, "--rows", "3"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["shares"]["3"] > 0
