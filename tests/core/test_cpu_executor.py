"""The CPU executor by itself."""

from __future__ import annotations

import gc
import weakref

from chorus.core.config import EngineConfig
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.requests.sampling_params import SamplingParams
from chorus.core.requests.types import BASE_SLOT, ScheduledRow, StepPlan


def test_a_closed_executor_frees_its_arena_at_once(subject, kernels):
    """By reference counts alone: the next engine may need the memory before the collector runs."""
    model = subject("wide_heads")
    settings = EngineConfig(model=model.model, dtype="float32", memory_bytes=8 << 20, cpu_kernels=kernels, threads=1)
    executor = CpuExecutor(settings)
    row = ScheduledRow("one", BASE_SLOT, [3], 0, [1], SamplingParams(temperature=0.0), 0, True, [3], 1)
    assert executor.execute(StepPlan(1, [row], [], bucket=1)).tokens.keys() == {"one"}
    arena = weakref.ref(executor._arena.pages)
    gc.collect()
    gc.disable()
    try:
        executor.close()
        del executor
        assert arena() is None
    finally:
        gc.enable()
