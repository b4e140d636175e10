"""Two ranks of the CUDA executor on a CPU: threads of this process, with Triton's kernels interpreted.

Run in a process that interprets, see `tests/interpreted.py`. Sums are those of the host's ranks, in memory
that the threads share. The interpreter keeps the state of the launch it is in for the process, so that launches take
turns.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from triton.runtime import interpreter

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors import cuda_ranks, worker_processes
from chorus.core.executors.cuda import CudaExecutor
from chorus.core.executors.cuda_memory import OutOfDeviceMemory
from chorus.core.executors.cuda_rank import CudaTpWorker
from chorus.core.executors.cuda_rank_copies import RankCopies, RankTransfer, TpWorkerCopies
from chorus.core.executors.cuda_rank_memory import RankDevices
from chorus.core.executors.cuda_ranks import CudaRanksExecutor
from chorus.core.model.decoder import DecoderModel
from chorus.core.policies import Policies
from chorus.core.requests.pooling import from_bytes
from chorus.core.requests.types import FinishReason
from chorus.graphs.runner import StepMode
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.host.image import HostImage, LayerStream
from chorus.memory.host.images import ThreadReads
from chorus.memory.transfers.transfer import ExecutorLost
from chorus.ops.library import native_library
from chorus.ops.ranks.device_ranks import open_group
from chorus.ops.ranks.ranks import Ranks
from chorus.perf.inline_reads import InlineReads

from ...conftest import Subject
from ...graphs.late_device import LateDevice
from ..conftest import Driver, RecordingExecutor, ticking
from ..tiny_mixtures import make_mixture
from .family_drivers import EVERY
from .test_cuda_interpreted import RECIPES, SPEC, ask, check, make_config, merge, saved, tiny  # noqa: F401 - a fixture
from .test_cuda_speculation_interpreted import PartlyRight
from .thread_ranks import ThreadProcess

pytestmark = pytest.mark.skipif(not native_library.available(torch.float32), reason="ranks meet by the native library")


def late_device(index):
    return LateDevice()


def no_driver(device):
    return None


#: Values that ranks add up at once.
FLOATS = 1 << 13


class HostCollectives(Ranks):
    """Ranks of the host, in memory that the threads share."""

    memories: ClassVar[dict[str, mmap.mmap]] = {}

    def __init__(self, shard, store, seconds):
        with LOCK:
            memory = self.memories.setdefault(store, mmap.mmap(-1, Ranks.num_bytes(shard.size, FLOATS)))
        super().__init__(memory, shard.rank, shard.size, FLOATS, seconds)
        self.begin(1)  # steps of a device follow each other without a pause: all are one

    def close(self):
        """Its memory goes with the last reference to it."""


LOCK = threading.Lock()


def host_collectives(shard, device, store, seconds):
    return HostCollectives(shard, store, seconds)


DEVICES = RankDevices(late_device, no_driver, host_collectives)


@pytest.fixture(autouse=True)
def one_launch_at_a_time(monkeypatch):
    lock, launch = threading.Lock(), interpreter.GridExecutor.__call__

    def launched(self, *args, **kwargs):
        with lock:
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(worker_processes, "Popen", ThreadProcess)


def config_of(tiny: Subject, **config) -> EngineConfig:  # noqa: F811
    """Of two ranks; without streamed starts, as `choice.completed` has it."""
    return make_config(tiny, **{"tensor_parallel_size": 2, "max_load_stall_seconds": 0.0, **config})


@pytest.fixture
def drive(tiny):  # noqa: F811
    """`drive(adapters=[…], **config)`: an engine on two late devices with those adapters registered."""
    engines = []

    def make(adapters=tuple(RECIPES), reads=None, patience=60.0, it=tiny, policies=None, **config) -> Driver:
        settings = config_of(it, **config)
        executor = RecordingExecutor(CudaRanksExecutor(settings, DEVICES, patience))
        engine = Engine(settings, executor, ticking(), reads or InlineReads(), policies or Policies())
        engines.append(engine)
        for name in adapters:
            engine.store.register(name, it.adapters[name])
        return Driver(engine, executor)

    yield make
    for engine in engines:
        engine.close()


def test_mixed_ranks_and_the_base_model_share_steps(drive, tiny):  # noqa: F811
    """Chunked prompts, decode rows in larger buckets, adapters of one and of several parts; steps ahead of tokens."""
    driver = drive()
    check(driver, ask(driver, tiny, ("r17-all", 15, 4), (None, 5, 7), ("pattern", 3, 4), ("r5-o-down", 6, 2)))
    plans = driver.plans
    assert any(row.start and len(row.tokens) > 1 for plan in plans for row in plan.sequences), "no prompt was chunked"
    assert any(plan.bucket == 4 and len(plan.sequences) == 3 for plan in plans), "no padding"
    assert any(plan.bucket and plan.num_adapters > 1 for plan in plans)
    assert any(plan.sources is not None for plan in plans), "no step was ahead"


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gpt-oss", "qwen3.5-moe", *(["mixtral", "glm-4-moe", "granite-moe"] if EVERY else [])]
)
def test_ranks_have_columns_of_every_expert(drive, family):
    """Adapters on routers, shared experts and experts, next to the base model, in captured steps, too."""
    it = make_mixture(family)
    driver = drive(list(it.adapters), it=it, memory_bytes=8 << 20, block_tokens=8, max_lora_rank=8, patience=600.0)
    want = {}
    for index, (name, length, count) in enumerate(
        [("r2-experts", 13, 4), (None, 5, 3), ("r5-shared", 4, 4), ("r4-router", 6, 3)]
    ):
        prompt, want[name] = it.case(name, length, seed=index, count=count)
        driver.add(str(name), name, prompt, max_tokens=count)
    answers = driver.drain()
    assert {name: answers[str(name)].tokens for name in want} == want
    assert driver.executor.inner.first.captured


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["ahead", "lazy", "off"])
def test_pieces_of_mixed_steps_and_captured_steps(drive, tiny, setting):  # noqa: F811
    driver = drive(mixed_graph_tokens=12, graph_capture=setting, adapters=["r17-all", "r1-qv"], max_num_seqs=2)
    check(driver, ask(driver, tiny, ("r17-all", 14, 3), (None, 5, 4), ("r1-qv", 4, 3)))
    first = driver.executor.inner.first
    assert bool(first.captured) == (setting != "off")


@pytest.mark.slow
def test_drafts_are_rows_on_all_ranks(drive, tiny):  # noqa: F811
    """Greedy and drawn tokens of sequences with and without adapters are those without drafts."""
    requests = {
        "r0": ("r17-all", tiny.prompt("r17-all", 4, 8, seed=1), {}),
        "r1": (None, tiny.prompt(None, 6, 8, seed=2), {"temperature": 1.0, "logprobs": 1}),
    }
    found = {}
    for proposer in (None, PartlyRight(lambda request: found[None][request.id].tokens, 3)):
        driver = drive(
            ["r17-all"],
            policies=Policies(proposer=proposer),
            speculation="off" if proposer is None else "ngram",
            max_num_seqs=2,
            graph_capture="lazy",
        )
        for key, (name, prompt, more) in requests.items():
            driver.add(key, name, prompt, max_tokens=8, seed=4, **more)
        found[proposer] = driver.drain()
    assert {key: answer.tokens for key, answer in found[proposer].items()} == {
        key: answer.tokens for key, answer in found[None].items()
    }
    stats = driver.engine.stats()
    assert 2 < stats.num_accepted_tokens < stats.num_proposed_tokens
    assert any(plan.num_drafts and plan.bucket for plan in driver.plans)


@pytest.mark.slow
def test_draws_and_scores_are_those_of_one_rank(drive, tiny):  # noqa: F811
    """Sampling by seed, penalties, log-probabilities of answers and of prompts, next to a plain row, and ahead."""
    asked = [
        {"temperature": 0.8, "top_k": 5, "logprobs": 1},
        {"temperature": 1.2, "top_p": 0.8},
        {"repetition_penalty": 1.5, "temperature": 0.7, "logprobs": 1},
        {"prompt_logprobs": 1, "logprobs": 0},
        {},
    ]
    found, ahead = [], []
    for size in (1, 2):
        driver = drive(adapters=["r5-o-down"], max_num_seqs=3) if size == 2 else one_rank(tiny)
        for index, params in enumerate(asked):
            adapter = "r5-o-down" if index % 2 else None
            driver.add(str(index), adapter, [5, 6, 7 + index, 5, 9], **{"max_tokens": 5, "seed": index, **params})
        found.append(driver.drain())
        ahead.append([plan for plan in driver.plans if plan.sources is not None])
    for name, want in found[0].items():
        got = found[1][name]
        assert got.tokens == want.tokens
        for ours, theirs in ((got.logprobs, want.logprobs), (got.prompt_logprobs or (), want.prompt_logprobs or ())):
            assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=1e-4)
    assert any(row.looks_back for plan in ahead[1] for row in plan.sequences), "none was drawn behind host's tokens"


@pytest.mark.slow
def test_pooled_vectors_are_those_of_one_rank(drive, tiny):  # noqa: F811
    found = []
    for size in (1, 2):
        driver = drive(adapters=["r5-o-down"], max_num_seqs=3) if size == 2 else one_rank(tiny)
        for index, pooling in enumerate(("last", "mean", "cls")):
            adapter = "r5-o-down" if index else None
            driver.add(pooling, adapter, [5, 6, 7 + index] * 5, max_tokens=1, pooling=pooling)
        driver.add("text", "r5-o-down", [5, 6, 7, 8], max_tokens=4, prompt_logprobs=1)
        found.append(driver.drain())
    assert found[0]["text"].tokens == found[1]["text"].tokens
    for pooling in ("last", "mean", "cls"):
        one, two = (torch.tensor(from_bytes(answers[pooling].pooled)) for answers in found)
        torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-4)


def one_rank(tiny) -> Driver:  # noqa: F811
    settings = make_config(tiny, max_num_seqs=3)
    executor = RecordingExecutor(CudaExecutor(settings, LateDevice()))
    engine = Engine(settings, executor, ticking(), InlineReads())
    engine.store.register("r5-o-down", tiny.adapters["r5-o-down"])
    return Driver(engine, executor)


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_the_likeliest_token_is_of_all_ranks_shares(drive, monkeypatch, bad):
    """Of equal logits the first one's, and none where one is not a number, whichever rank has it."""
    score = DecoderModel.compute_logits

    def equal(self, x, batch, logits=None):
        found = score(self, x, batch, logits)
        found.fill_(1.0)
        if self.ranks.rank == bad:
            found[:, 1] = torch.nan
        return found

    monkeypatch.setattr(DecoderModel, "compute_logits", equal)
    driver = drive(adapters=[], max_num_seqs=1, graph_capture="off")
    answer = driver.run("a", None, [5, 6, 7], max_tokens=2)
    if bad is None:
        assert answer.tokens == [0, 0]
    else:
        assert "not finite" in answer.error


def load_and_merge(driver: Driver, name: str) -> None:
    driver.run("load", name, [3], max_tokens=1)
    while driver.engine.store.get(name).transfer is not None:  # another rank's copy may end later than this one's
        driver.step()
    merge(driver, name)


@pytest.mark.slow
def test_merged_steps_beside_others(drive, tiny):  # noqa: F811
    """Made by both ranks, captured when a step needs it, and switched back."""
    driver = drive(adapters=["r5-o-down", "r1-qv"], max_num_seqs=2, graph_capture="ahead")
    load_and_merge(driver, "r5-o-down")
    driver.plans.clear()
    check(driver, ask(driver, tiny, ("r5-o-down", 13, 2), (None, 2, 3), ("r1-qv", 2, 2)))
    assert {plan.mode for plan in driver.plans} == {StepMode.MERGED}
    driver.engine.unmerge()
    check(driver, ask(driver, tiny, ("r5-o-down", 3, 2)))


@pytest.mark.slow
@pytest.mark.usefixtures("crowded")
def test_swapped_requests_come_back(drive, tiny):  # noqa: F811
    """KV of all ranks goes to host memory and returns; an adapter's pages are taken and filled again."""
    driver = drive(adapters=["r1-qv"], num_pages=22, memory_bytes=None, preemption="swap", prefix_cache=False)
    check(driver, ask(driver, tiny, (None, 9, 16), ("r1-qv", 9, 16), (None, 10, 16), ("r1-qv", 11, 16)))
    assert driver.engine.stats().num_swaps_in > 0
    driver.engine.reclaimer.reclaim_all()
    check(driver, ask(driver, tiny, ("r1-qv", 4, 2)))


@pytest.fixture(scope="session")
def four(tmp_path_factory) -> Subject:
    """A model that four ranks may have: two of them have a copy of a K/V head each."""
    return saved(tmp_path_factory.mktemp("four"), replace(SPEC, layers=1, heads=4, kv_heads=2))


@pytest.mark.slow
@pytest.mark.usefixtures("crowded")
def test_four_ranks_swap_go_ahead_and_merge(drive, four):
    """While a request is aborted; then mixed steps with one adapter in the weights."""
    driver = drive(
        adapters=["r1-qv", "r5-o-down"],
        it=four,
        tensor_parallel_size=4,
        num_pages=22,
        memory_bytes=None,
        preemption="swap",
        prefix_cache=False,
        mixed_graph_tokens=12,
        graph_capture="lazy",
    )
    want = ask(driver, four, (None, 9, 16), ("r1-qv", 9, 16), (None, 10, 16), ("r1-qv", 11, 16))
    driver.add("aborted", "r5-o-down", [3, 4, 5], max_tokens=20)
    while not driver.answers["aborted"].tokens:
        driver.step()
    driver.engine.abort("aborted")
    check(driver, want)
    stats = driver.engine.stats()
    assert min(stats.num_swaps_in, stats.num_async_steps) > 0
    driver.engine.reclaimer.reclaim_all()
    load_and_merge(driver, "r1-qv")
    driver.plans.clear()
    check(driver, ask(driver, four, ("r1-qv", 7, 2), (None, 2, 3)))
    assert {plan.mode for plan in driver.plans} == {StepMode.MERGED}


@pytest.mark.slow
def test_adapters_are_read_while_others_run(drive, tiny):  # noqa: F811
    driver = drive(adapters=["r1-qv", "r5-o-down"], reads=(reads := ThreadReads()), max_num_seqs=2)
    check(driver, ask(driver, tiny, ("r1-qv", 4, 2), (None, 3, 3), ("r5-o-down", 5, 2)))
    assert driver.engine.stats().num_adapter_loads >= 2
    reads.shutdown()


@pytest.mark.slow
def test_an_adapter_that_is_still_being_read_is_void_on_all_ranks(drive, tiny):  # noqa: F811
    """Were a step to come to it, both ranks would leave it out, and launch the same."""
    driver = drive(adapters=["r1-qv"], max_num_seqs=2)
    check(driver, ask(driver, tiny, ("r1-qv", 3, 2), (None, 2, 3)))
    inner = driver.executor.inner
    plan = next(plan for plan in driver.plans if plan.bucket and len(plan.sequences) == 2)
    adapter = plan.adapters[0]
    adapter.transfer = RankTransfer(None, None, LayerStream(), 2)
    result = inner.execute(plan)
    voids = {row.request_id for row in plan.sequences if row.lora_index >= 0}
    assert result.unready == voids
    adapter.transfer = None
    assert not inner.execute(plan).unready


@pytest.mark.slow
def test_the_time_of_a_page_is_of_copies_on_all_ranks(drive, monkeypatch):
    """From memory that all see, which is pinned; a rank's own measure is of memory that is not."""
    numbers, take = [], RankCopies.take
    monkeypatch.setattr(RankCopies, "take", lambda *args: (numbers.append(take(*args)), numbers[-1])[1])
    driver = drive(adapters=[], graph_capture="off")
    assert numbers
    assert driver.executor.swaps.page_seconds > 0


@pytest.mark.slow
def test_saved_pages_of_an_adapter_are_those_of_all_ranks(drive, tiny):  # noqa: F811
    driver = drive(adapters=["r17-all"], max_num_seqs=1)
    check(driver, ask(driver, tiny, ("r17-all", 3, 2)))
    adapter, backend = driver.engine.store.get("r17-all"), driver.executor.adapters
    image, read = backend.save(adapter.layout, adapter.pages), HostImage()
    backend.read(adapter.manifest, adapter.layout, read)
    for kept, share in zip(image.data, read.data, strict=True):
        count = adapter.layout.num_elems
        assert torch.equal(kept.view(-1)[:count], share.view(-1)[:count])
    assert not torch.equal(image.data[0], image.data[1])


@pytest.mark.slow
def test_refuses_adapters_that_the_tables_do_not_hold(drive, tiny):  # noqa: F811
    driver = drive(adapters=[], max_lora_rank=16)
    with pytest.raises(AdapterFormatError, match="has rank 17, above max_lora_rank 16; raise max_lora_rank"):
        driver.engine.store.register("a", tiny.adapters["r17-all"])


@pytest.mark.slow
def test_ranks_have_as_many_pages_as_the_smallest_gpu(tiny, drive, monkeypatch):  # noqa: F811
    monkeypatch.setattr(sys.modules[__name__], "DEVICES", RankDevices(unequal_device, no_driver, host_collectives))
    driver = drive(adapters=[], memory_bytes=None, gpu_memory_utilization=0.5, graph_capture="off")
    inner = driver.executor.inner
    assert inner.num_pages == inner.first.num_pages == inner.first.arena.num_pages
    assert inner.num_pages == (2 << 20) // inner.first.layout.page_bytes


def unequal_device(index):
    return LateDevice((8 << 20) >> index)


# -- in processes


def gloo_collectives(shard, device, store, seconds):
    return open_group("gloo", shard.rank, shard.size, device, store, seconds)


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_ranks_are_processes_that_meet_by_torch_distributed(tiny, monkeypatch, again):  # noqa: F811
    """As on GPUs, except for the backend; a process may run a second group of ranks after the first."""
    monkeypatch.setattr(worker_processes, "Popen", subprocess.Popen)
    settings = config_of(tiny, max_num_seqs=2, max_num_batched_tokens=16)
    executor = RecordingExecutor(CudaRanksExecutor(settings, RankDevices(late_device, no_driver, gloo_collectives)))
    driver = Driver(engine := Engine(settings, executor, ticking(), InlineReads()), executor)
    for name in ("r5-o-down", "r1-qv"):
        engine.store.register(name, tiny.adapters[name])
    driver.add("drawn", None, [5, 6, 7], temperature=0.9, seed=3, max_tokens=3, prompt_logprobs=1)
    check(driver, ask(driver, tiny, ("r5-o-down", 14, 4), (None, 3, 5), ("r1-qv", 4, 2)))
    assert driver.answers["drawn"].finish_reason is FinishReason.LENGTH
    if again:
        os.kill(executor.inner.pids[0], signal.SIGKILL)
        with pytest.raises(ExecutorLost, match="rank 1 of 2 has ended"):
            driver.run("more", None, [5, 6, 7], max_tokens=30)
    engine.close()


# -- ranks that end, or never begin


@pytest.mark.slow
def test_a_step_that_fails_on_another_rank_ends_all(drive, tiny, monkeypatch):  # noqa: F811
    """The first one, which waits for its share, is released."""
    driver = drive(adapters=[], graph_capture="off")
    ask(driver, tiny, (None, 3, 2))
    monkeypatch.setattr(CudaExecutor, "follow", raising)
    with pytest.raises(ExecutorLost, match="rank 1 of 2: MemoryError: no room"):
        driver.engine.step()


def raising(*args):
    raise MemoryError("no room")


@pytest.mark.slow
def test_a_step_that_fails_on_the_first_rank_ends_all(drive, tiny, monkeypatch):  # noqa: F811
    driver = drive(adapters=[], graph_capture="off")
    ask(driver, tiny, (None, 3, 2))
    monkeypatch.setattr(CudaExecutor, "start", raising)
    with pytest.raises(ExecutorLost, match="the first rank could not compute its share of a step: no room"):
        driver.engine.step()


@pytest.mark.slow
def test_a_rank_that_keeps_the_others_waiting_ends_all(drive, tiny, monkeypatch):  # noqa: F811
    driver = drive(adapters=[], graph_capture="off", patience=1.0)
    ask(driver, tiny, (None, 3, 2))
    released = threading.Event()
    monkeypatch.setattr(worker_processes, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(CudaExecutor, "follow", lambda self, *args: released.wait())
    with pytest.raises(ExecutorLost):
        driver.engine.step()
    released.set()


@pytest.mark.slow
def test_a_device_that_is_stuck_ends_all(drive, tiny, monkeypatch):  # noqa: F811
    """All ranks have launched a step, and its tokens don't come: the wait for them is ended from another thread."""
    driver = drive(adapters=[], graph_capture="off", patience=2.0)
    inner = driver.executor.inner
    ask(driver, tiny, (None, 3, 2))
    lost = threading.Event()
    lose = inner._rank_context.lose  # noqa: SLF001
    monkeypatch.setattr(inner._rank_context, "lose", lambda: (lose(), lost.set()))  # noqa: SLF001
    start = inner.first.start

    def stuck(plan):
        started = start(plan)
        result = started.result
        return SimpleNamespace(draw=started.sample, result=lambda: (lost.wait(60), result())[1])

    monkeypatch.setattr(inner.first, "start", stuck)
    with pytest.raises(ExecutorLost, match="kept the others waiting"):
        driver.engine.step()


@pytest.mark.slow
def test_a_rank_that_ends_while_idle_is_noticed(drive):
    driver, ended = drive(adapters=[], graph_capture="off"), threading.Event()
    driver.executor.inner.watch(lambda error: ended.set())
    driver.executor.inner._processes._processes[0].kill()  # noqa: SLF001 - as if the system did
    assert ended.wait(60)


@pytest.mark.slow
def test_a_rank_that_cannot_join_is_named_with_the_reason(tiny, monkeypatch):  # noqa: F811
    monkeypatch.setattr(CudaTpWorker, "__init__", raising)
    with pytest.raises(RuntimeError, match="rank 1 of 2 could not join: MemoryError: no room"):
        CudaRanksExecutor(config_of(tiny, graph_capture="off"), DEVICES)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["measure", "open"])
def test_a_rank_that_fails_while_others_wait_for_it_is_named(tiny, monkeypatch, phase):  # noqa: F811
    do = getattr(CudaExecutor, phase)

    def done(self, *args):
        return raising(self) if self.shard.rank else do(self, *args)

    monkeypatch.setattr(CudaExecutor, phase, done)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 of 2: MemoryError: no room"):
        CudaRanksExecutor(config_of(tiny, max_num_seqs=1), DEVICES)
    assert time.monotonic() - began < 50, "the first rank waited for a rank that had said why it failed"


NEVER = threading.Event()


def failing_collectives(shard, device, store, seconds):
    return raising() if shard.rank else NEVER.wait(600)


def ending_collectives(shard, device, store, seconds):
    return sys.exit(1) if shard.rank else NEVER.wait(600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("open_collectives", "why"),
    [
        (failing_collectives, "rank 1 of 2: MemoryError: no room"),
        (ending_collectives, r"rank 1 of 2 has ended \(exit status 1\)"),
    ],
)
def test_a_rank_that_does_not_come_to_the_meeting_is_named(tiny, open_collectives, why):  # noqa: F811
    """NCCL has no end to its wait for it."""
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=why):
        CudaRanksExecutor(config_of(tiny), RankDevices(late_device, no_driver, open_collectives))
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_rank_that_ends_while_pages_are_timed_is_named(tiny, monkeypatch):  # noqa: F811
    monkeypatch.setattr(TpWorkerCopies, "copy", lambda *args: sys.exit(3))
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 has ended \(exit status 1\)"):
        CudaRanksExecutor(config_of(tiny, max_num_seqs=1, graph_capture="off"), DEVICES)


@pytest.mark.slow
def test_ranks_that_do_not_add_up_are_not_started(tiny, monkeypatch):  # noqa: F811
    monkeypatch.setattr(HostCollectives, "add_up", lambda self, part: part)
    with pytest.raises(RuntimeError, match="the sum of 2 ranks' ones is 1"):
        CudaRanksExecutor(config_of(tiny), DEVICES)


@pytest.mark.slow
def test_ranks_that_never_meet_end_the_start(tiny, monkeypatch):  # noqa: F811
    monkeypatch.setattr(cuda_ranks, "_JOIN_SECONDS", 0.3)
    monkeypatch.setattr(worker_processes, "STOP_SECONDS", 0.5)
    come = threading.Event()
    monkeypatch.setattr(HostCollectives, "add_up", lambda self, part: come.wait(60))
    with pytest.raises(RuntimeError, match=r"could not compute a first sum within 0.3 s; set NCCL_DEBUG=INFO"):
        CudaRanksExecutor(config_of(tiny), DEVICES)
    come.set()


@pytest.mark.slow
def test_a_first_rank_that_does_not_fit_says_so(tiny):  # noqa: F811
    devices = RankDevices(small_first_device, no_driver, host_collectives)
    with pytest.raises(OutOfDeviceMemory, match="set a page pool of"):
        CudaRanksExecutor(config_of(tiny, graph_capture="off", num_pages=1 << 12), devices)


def small_first_device(index):
    return LateDevice((1 << 30) if index else (1 << 20))
