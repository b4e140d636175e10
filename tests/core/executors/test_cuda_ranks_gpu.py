"""Two ranks on two GPUs: one rank's tokens in float32, captured and eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.choice import completed, open_executor
from chorus.memory.transfers.transfer import ExecutorLost
from chorus.perf.bench.models.random_model import RandomModel, adapters, checkpoint
from chorus.perf.bench.models.sizes import Geometry
from chorus.perf.inline_reads import InlineReads

from ..conftest import Answer, Driver, RecordingExecutor, ticking

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")

GEOMETRY = Geometry(hidden=256, ffn=512, layers=3, heads=4, kv_heads=2, vocab=512, positions=256)
RANKS = (8, 33)


@pytest.fixture
def drive(tmp_path) -> Iterator[Callable[..., Driver]]:
    """`drive(size, **config)`: a float32 engine on so many GPUs with an adapter of each rank."""
    random = RandomModel(GEOMETRY, ranks=RANKS, dtype="float32", seed=11)
    model, paths = checkpoint(random, tmp_path), adapters(random, tmp_path)
    engines: list[Engine] = []

    def make(size: int, **config) -> Driver:
        settings = completed(
            EngineConfig(
                model=model,
                **{
                    "device": "cuda",
                    "num_pages": 512,
                    "max_num_seqs": 8,
                    "max_num_batched_tokens": 64,
                    "tensor_parallel_size": size,
                    **config,
                },
            )
        )
        executor = RecordingExecutor(open_executor(settings))
        engines.append(Engine(settings, executor, ticking(), InlineReads()))
        for name, path in paths.items():
            engines[-1].store.register(name, path)
        return Driver(engines[-1], executor)

    yield make
    for engine in engines:
        engine.close()


def answers(driver: Driver, names: list[str | None]) -> dict[str, Answer]:
    for index in range(9):
        prompt = [3 + (7 * index + 11 * at) % 500 for at in range(5 + 9 * index)]
        sampling = {"temperature": 0.8, "seed": index, "logprobs": 1} if index % 3 == 2 else {}
        driver.add(str(index), names[index % len(names)], prompt, max_tokens=12, **sampling)
    return driver.drain()


@pytest.mark.parametrize("setting", ["ahead", "lazy", "off"])
def test_two_ranks_give_the_tokens_of_one(drive: Callable[..., Driver], tmp_path: Path, setting: str):
    one, two = drive(1), drive(2, graph_capture=setting)
    names = [None, *sorted(one.engine.store.names())]
    want, got = (answers(driver, names) for driver in (one, two))
    assert {name: answer.tokens for name, answer in got.items()} == {name: it.tokens for name, it in want.items()}
    assert any(plan.sources is not None for plan in two.plans), "no step was ahead"


def test_a_rank_that_is_killed_ends_the_engine(drive: Callable[..., Driver]):
    driver = drive(2)
    driver.add("a", None, [5, 6, 7], max_tokens=200)
    driver.step()
    driver.executor.inner._processes._processes[0].kill()  # noqa: SLF001 - as if the system did
    with pytest.raises(ExecutorLost):
        driver.drain()
