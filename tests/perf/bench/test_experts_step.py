"""The benchmark of a mixture's step counts the bytes of the experts that it reads, and judges by its bars."""

from __future__ import annotations

import json

import pytest
import torch

from chorus.core.model import experts as mixture
from chorus.ops import native_library
from chorus.perf.bench import experts_step
from chorus.perf.bench.experts_step import Layers, Shape, main

SMALL = Shape(hidden=32, size=16, count=6, per_token=2)

FLAGS = ["--layers", "2", "--experts", "6", "--hidden", "32", "--size", "16", "--per-token", "2", "--rounds", "2"]
FLAGS += ["--threads", "1", "--memory", str(1 << 20)]


@pytest.mark.parametrize("rows", [1, 8])
def test_bytes_are_those_of_the_experts_that_are_read(monkeypatch, rows):
    assert SMALL.expert_bytes == (2 * 16 * 32 + 32 * 16) * 2
    seen, expert = [], mixture._expert  # noqa: SLF001
    monkeypatch.setattr(mixture, "_expert", lambda *inputs: seen.append(1) or expert(*inputs))
    clock = iter(range(100))
    monkeypatch.setattr(experts_step.time, "perf_counter", lambda: next(clock))
    assert Layers(SMALL, 2).rate(rows) == len(seen) * SMALL.expert_bytes
    assert len(seen) == 2 if rows == 1 else 2 < len(seen) <= 6


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
