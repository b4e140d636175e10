"""The sections that drive an engine, on the CUDA executor itself: its kernels interpreted, the device a CPU.

Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.executors import choice, cuda_gemm_backends
from chorus.core.executors.cuda import CudaExecutor
from chorus.perf.bench.options import Options
from chorus.perf.bench.sections import equality
from chorus.perf.bench.sections.registry import section
from chorus.perf.bench.subject import MAX_RANK, Subject

from ...graphs.host_device import HostDevice

RATE = {"bytes_per_s": 1e9}


@pytest.fixture
def context(tmp_path, monkeypatch):
    made: list[EngineConfig] = []

    def open_executor(config: EngineConfig) -> CudaExecutor:
        made.append(config)
        return CudaExecutor(config, HostDevice(8 << 30))

    monkeypatch.setattr(choice, "open_executor", open_executor)
    context = Options.parse(["--quick", "--device", "cpu", "--out", str(tmp_path)]).context()
    limits = {"copy": RATE, "read": RATE, "matmul": {"flops_per_s": 1e9}}
    context.store.write("limits", 0.0, {"commit": {}}, values=limits)
    yield context
    assert made
    assert all(config.max_lora_rank == MAX_RANK and config.load_format == "dummy" for config in made)


@pytest.mark.slow
def test_decode(context):
    rows = section("decode").run(context)["buckets"]
    assert all(row["base_device_ms"] > 0 and row["lora_device_ms"] > 0 for row in rows)


@pytest.mark.slow
def test_experts(context, monkeypatch):
    """Replays are of the steps' own graphs, also with adapters on experts, for whose projections those are captured."""
    inner, graphs = Subject.replay_seconds, []

    def replay_seconds(subject, *args, **kwargs):
        before = len(subject._graphs.report)  # noqa: SLF001
        seconds = inner(subject, *args, **kwargs)
        graphs.append((before, len(subject._graphs.report)))  # noqa: SLF001
        return seconds

    monkeypatch.setattr(Subject, "replay_seconds", replay_seconds)
    values = section("experts").run(context)
    assert "not_measured" not in values
    assert len(values["rows"]) == 5
    assert all(row["device_ms"] > 0 for row in values["rows"])
    assert [before for before, _ in graphs] == [after for _, after in graphs] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_merged(context, monkeypatch):
    # of each form of merged launches, for few rows and for all, so that nothing is left to be captured below
    monkeypatch.setattr(section("merged"), "MIXES", {"mixture": "mo", "others": "oo"})
    values = section("merged").run(context)
    assert [row["mix"] for row in values["rows"]] == ["mixture", "others"]
    assert all(row["base_over_merged"] > 0 for row in values["rows"])
    assert len(values["merges"]) == 2
    assert not any(merge["captured"] for merge in values["merges"]), "they are captured when they are replayed"


@pytest.mark.slow
def test_equality(context, monkeypatch):
    """One of its cases, unmerged and merged: the interpreter takes seconds for each."""
    monkeypatch.setitem(cuda_gemm_backends.TOLERANCE, torch.float32, 1e-4)  # as the interpreter multiplies
    monkeypatch.setattr(equality, "cases", lambda names, largest: [("mixed", [*names[::3], None])])
    values = equality.run(context)
    assert all(case["equal"] and case["pages"] for case in values["cases"])
    assert values["startup"]["graphs"] >= 6, "base and LoRA of buckets 1, 2 and 4"
    assert [*values["startup"]["ways"]["4"].values()] == ["expanded"] * 4 + ["small"]
