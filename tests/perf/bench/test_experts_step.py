"""The benchmark of a mixture's step counts the bytes of the experts that it reads, and judges by its bars."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from chorus.core.model.moe import experts as mixture
from chorus.core.model.moe.mixture_lora import MixtureLora
from chorus.memory.pages.projections import Role
from chorus.ops.library import native_library
from chorus.ops.moe.expert_gemms import Matrix
from chorus.perf.bench import experts_step
from chorus.perf.bench.experts_step import Adapters, Layers, Shape, main

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

    monkeypatch.setenv(native_library.ISA, "none")  # so that each product is a call
    monkeypatch.setattr(mixture, "multiply_each", counted)
    clock = iter(range(100))
    monkeypatch.setattr(experts_step, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    layers = Layers(SMALL, 2)
    assert layers.rate(rows) == seen[0] * SMALL.expert_bytes
    assert seen == [seen[0]] * 2, "gate and up, and down"
    assert seen[0] == 2 if rows == 1 else 2 < seen[0] <= 6


def test_each_row_has_an_adapter_of_its_own_on_router_and_experts(monkeypatch):
    monkeypatch.setenv(native_library.ISA, "none")  # so that each product's adapters are a call
    adapters, layers, seen = Adapters(SMALL, 2, 3, rank=2), Layers(SMALL, 2), []
    of_experts = MixtureLora.add_of_experts

    def noted(lora, group, y, x, going):
        before = y.clone()
        of_experts(lora, group, y, x, going)
        tokens = [token for _, each in going for token in each]
        seen.extend((group, token) for token, changed in zip(tokens, (y != before).any(1), strict=True) if changed)

    monkeypatch.setattr(MixtureLora, "add_of_experts", noted)
    assert layers.rate(3, adapters) > 0
    assert {token for _, token in seen} == {0, 1, 2}
    assert len(seen) == 2 * 3 * SMALL.per_token, "gate and up, and down, of each expert that a row goes to"
    logits = torch.zeros(3, SMALL.count)
    adapters.of(1).add(Role.ROUTER, logits, torch.ones(3, SMALL.hidden))
    assert len({tuple(row) for row in logits.tolist()}) == 3, "equal rows have other adapters"
    assert logits.any(1).all()


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_experts_are_packed_for_the_kernels_that_are_asked_for(monkeypatch, kernels):
    packed, pack = [], experts_step.PACKS[kernels]
    monkeypatch.setitem(experts_step.PACKS, kernels, lambda weight: packed.append(1) or pack(weight))
    main([*FLAGS, "--kernels", kernels, "--rows", "3"])
    assert len(packed) == 2 * 2 * SMALL.count


@pytest.mark.parametrize(("rate", "code"), [(1.0, 0), (1e15, 1)])
def test_the_share_of_the_memorys_rate_is_judged(monkeypatch, capsys, rate, code):
    monkeypatch.setattr(experts_step, "read_rate", lambda *_: rate)
    assert main([*FLAGS, "--rank", "0"]) == code
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["met"] is (code == 0)
    assert set(result["shares"]) == {"1", "8"}
    assert result["with adapters"] == {}
    main(FLAGS)
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])["with adapters"]) == {"1", "8"}


@pytest.mark.skipif(not native_library.available(torch.float32), reason="the native library is not built")
def test_the_limit_is_measured(capsys):
    main([*FLAGS, "--rows", "3"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["shares"]["3"] > 0
