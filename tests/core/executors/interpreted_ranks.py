"""Two ranks of the CUDA executor on a CPU: threads of this process, with Triton's kernels interpreted.

Run by `test_cuda_ranks.py` in a process that interprets. Sums are those of the host's ranks, in memory that the threads
share. The interpreter keeps the state of the launch it is in for the process, so that launches take turns.
"""

from __future__ import annotations

import threading

import pytest
from triton.runtime import interpreter

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors import followers
from chorus.core.executors.cuda_rank_memory import RankDevices
from chorus.core.executors.cuda_ranks import CudaRanksExecutor
from chorus.graphs.runner import StepMode
from chorus.memory.host.images import InlineReads, ThreadReads

from ...conftest import Subject
from ...graphs.late_device import LateDevice
from ..conftest import Driver, RecordingExecutor, ticking
from .interpreted_cuda import RECIPES, ask, check, make_config, merge, tiny  # noqa: F401 - a fixture
from .thread_ranks import ThreadProcess


def late_device(index):
    return LateDevice()


def no_driver(device):
    return None


def host_sums(ranks, device, store, seconds):
    return ranks


DEVICES = RankDevices(late_device, no_driver, host_sums)


@pytest.fixture(autouse=True)
def one_launch_at_a_time(monkeypatch):
    lock, launch = threading.Lock(), interpreter.GridExecutor.__call__

    def launched(self, *args, **kwargs):
        with lock:
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(followers, "Popen", ThreadProcess)


def config_of(tiny: Subject, **config) -> EngineConfig:  # noqa: F811
    """Of two ranks; without streamed starts, as `choice.completed` has it."""
    return make_config(tiny, **{"tensor_parallel_size": 2, "max_load_stall_seconds": 0.0, **config})


@pytest.fixture
def drive(tiny):  # noqa: F811
    """`drive(adapters=[…], **config)`: an engine on two late devices with those adapters registered."""
    engines = []

    def make(adapters=tuple(RECIPES), reads=None, patience=60.0, **config) -> Driver:
        settings = config_of(tiny, **config)
        executor = RecordingExecutor(CudaRanksExecutor(settings, DEVICES, patience))
        engine = Engine(settings, executor, ticking(), reads or InlineReads())
        engines.append(engine)
        for name in adapters:
            engine.store.register(name, tiny.adapters[name])
        return Driver(engine, executor)

    yield make
    for engine in engines:
        engine.close()


def test_mixed_ranks_and_the_base_model_share_steps(drive, tiny):  # noqa: F811
    """Chunked prompts, decode rows in larger buckets, adapters of one and of several parts; steps ahead of tokens."""
    driver = drive()
    check(driver, ask(driver, tiny, ("r17-all", 15, 4), (None, 5, 7), ("pattern", 3, 4), ("r5-o-down", 6, 2)))
    plans = driver.plans
    assert any(row.start and len(row.tokens) > 1 for plan in plans for row in plan.rows), "no prompt was chunked"
    assert any(plan.bucket == 4 and len(plan.rows) == 3 for plan in plans), "no padding"
    assert any(plan.bucket and plan.num_adapters > 1 for plan in plans)
    assert any(plan.sources is not None for plan in plans), "no step was ahead"
