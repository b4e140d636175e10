"""Prompts that offload workers begin on the CUDA executor: kernels interpreted, streams of a driver that a test runs.

Run in a process that interprets, see `tests/interpreted.py`. Compute is done as it is launched, as the interpreter
does, and so are offloaded computations; the adapters' copies end when the test says, or when compute waits for them.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from chorus.core.cold_start import ColdStart
from chorus.core.engine import Engine
from chorus.core.executors.cuda import CudaExecutor
from chorus.core.executors.lora_offload import OffloadProfile
from chorus.core.requests.types import StepPlan
from chorus.memory.transfers.cuda_copies import CudaCopies
from chorus.ops.library import native_library
from chorus.perf.inline_reads import InlineReads

from ...graphs.late_device import LateDevice
from ...memory.fake_cuda import FakeDriver
from ..conftest import Driver, RecordingExecutor, ticking
from .test_cuda_interpreted import RECIPES, SPEC, ask, check, make_config, tiny  # noqa: F401 - a fixture

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not native_library.available(torch.float32), reason="assistants run the native library"),
]

_MOST_SECONDS = 60.0


class PromptDriver(FakeDriver):
    """Its compute stream runs everything at once, and waits for processes as long as a device would. When it waits for
    a copy to the device, time advances until the copy is done. `on_handover` is called with the number of words that it
    has written so far.
    """

    def __init__(self):
        super().__init__()
        self.num_words = 0
        self.on_word = lambda number: None

    def memcpy_async(self, target, source, num_bytes, to_device, stream):
        super().memcpy_async(target, source, num_bytes, to_device, stream)
        if stream == self.compute:
            self.queues[stream][-1].source_then = None  # products change until it is copied
        self._settle()

    def write_value(self, stream, address, value):
        assert any(begin <= address < begin + length for begin, length in self.pinned.items())
        super().write_value(stream, address, value)
        self._settle()
        self.num_words += 1
        self.on_word(self.num_words)

    def wait_value(self, stream, address, value):
        super().wait_value(stream, address, value)
        self._settle()

    def wait_event(self, stream, event):
        super().wait_event(stream, event)
        self._settle()

    def record(self, event, stream):
        super().record(event, stream)
        self._settle()

    def copy_all(self):
        """All that was given to other streams is done."""
        for stream in self.queues:
            if stream != self.compute:
                self.run(stream, 1000)

    def _settle(self):
        queue, last = self.queues[self.compute], time.monotonic() + _MOST_SECONDS
        while queue:
            if self.run(self.compute, 1):
                continue
            if queue[0][0] == "wait":
                assert any(self.run(stream, 1) for stream in self.queues if stream != self.compute)
            else:
                assert time.monotonic() < last, "the device waits for ever"
                time.sleep(1e-4)


@pytest.fixture
def with_offload(tiny):  # noqa: F811
    """`with_offload(workers, cold_start, **config)`: an engine on a late device with offload workers always chosen. A
    driver copies its adapters, and does nothing else meanwhile.
    """
    made = []

    def make(workers=2, cold_start=ColdStart.OFFLOAD, adapters=tuple(RECIPES), **config):
        settings = make_config(
            tiny, **{"offload_workers": workers, "max_num_seqs": 2, "graph_capture": "off", **config}
        )
        inner = CudaExecutor(settings, LateDevice(), driver := PromptDriver())
        copies = CudaCopies(inner.arena.pages, driver, 0)
        inner.adapters.dma = replace(inner.adapters.dma, copies=copies)
        engine = Engine(settings, executor := RecordingExecutor(inner), ticking(), InlineReads())
        made.append((engine, driver, inner._offload._workers.address))  # noqa: SLF001
        for name in adapters:
            engine.store.register(name, tiny.adapters[name])
        inner._offload.cold_start = cold_start  # noqa: SLF001
        requests = Driver(engine, executor)
        requests.has_stalled_link = True
        return requests, driver, inner._offload  # noqa: SLF001

    yield make
    for engine, driver, address in made:
        engine.close()
        assert address not in driver.pinned, "what is handed over stays pinned"


@pytest.mark.parametrize(("workers", "padded"), [(1, 12), (2, 0)])
def test_no_layer_is_there_and_the_tokens_are_the_references(with_offload, tiny, workers, padded):  # noqa: F811
    """Prefill chunks of several adapters and of none, with decode rows; adapters of parts, of few modules, of all."""
    driver, _, offload = with_offload(workers, mixed_graph_tokens=padded, max_num_seqs=4)
    want = ask(driver, tiny, ("r17-all", 15, 3), (None, 5, 4))
    driver.step()
    assert set(offload.offloaded.layers) == {SPEC.layers}
    want |= ask(driver, tiny, ("pattern", 4, 2), ("r5-o-down", 3, 3), ("r1-qv", 6, 2))
    check(driver, want)
    assert offload.starts.num_offloaded == len(RECIPES)
    assert offload.starts.num_streamed == 0
    stats = driver.engine.stats()
    assert stats.num_offloaded_starts == len(RECIPES)
    assert stats.cold_start_regret >= 0


@pytest.mark.slow
@pytest.mark.parametrize("padded", [0, 12])
def test_sgmv_takes_over_in_mid_prefill(with_offload, tiny, padded):  # noqa: F811
    """The pages come while the first layer's first group is with the offload workers."""
    driver, cuda, offload = with_offload(mixed_graph_tokens=padded)
    want = ask(driver, tiny, ("r17-all", 9, 3), (None, 2, 3))
    before, groups = cuda.num_words, 4
    cuda.on_word = lambda number: cuda.copy_all() if number == before + 2 else None
    driver.step()
    assert set(offload.offloaded.layers) == {1}
    check(driver, want)
    assert cuda.num_words == before + 2 * groups


@pytest.mark.slow
def test_a_step_that_lends_is_none_of_captured_pieces(with_offload, tiny, monkeypatch):  # noqa: F811
    """The next one of the same bucket, with its adapter there, is."""
    driver, cuda, offload = with_offload(1, mixed_graph_tokens=12, adapters=["r17-all"], graph_capture="lazy")
    steps, replayed = driver.executor.inner.steps, []
    replay = steps.mixed.graphs.replay
    monkeypatch.setattr(steps.mixed.graphs, "replay", lambda *key: (replayed.append(key), replay(*key)))
    check(driver, ask(driver, tiny, ("r17-all", 9, 1)))
    assert not replayed
    cuda.copy_all()
    check(driver, ask(driver, tiny, ("r17-all", 9, 1)))
    assert len(replayed) == 1
    assert offload.starts.num_offloaded == 1


@pytest.mark.slow
def test_offloads_where_the_products_way_back_is_shorter_than_the_adapters(with_offload, tiny):  # noqa: F811
    """Of 9 tokens: not for rank 1 on two projections, but for rank 17 on all; over a link of which nothing comes."""
    driver, cuda, offload = with_offload(1, cold_start=None, adapters=["r1-qv", "r17-all"])
    offload.profile, offload._per_elem = OffloadProfile(0.0, 0.0), 1e-3  # noqa: SLF001
    before = cuda.num_words
    check(driver, ask(driver, tiny, ("r1-qv", 9, 1)))
    assert cuda.num_words == before
    assert (offload.starts.num_offloaded, offload.starts.num_streamed) == (0, 1)
    offload._per_elem = 1e-3  # noqa: SLF001
    check(driver, ask(driver, tiny, ("r17-all", 9, 2)))
    assert cuda.num_words > before
    assert (offload.starts.num_offloaded, offload.starts.num_streamed) == (1, 1)


@pytest.mark.slow
def test_a_step_that_fails_is_launched_again(with_offload, tiny, monkeypatch):  # noqa: F811
    driver, _, offload = with_offload(1, adapters=["r17-all"])
    want = ask(driver, tiny, ("r17-all", 9, 2))
    decoder, errors = driver.executor.inner.steps.decoder, [RuntimeError("for once")]
    score = decoder.compute_logits

    def fail_once(*args):
        if errors:
            raise errors.pop()
        return score(*args)

    monkeypatch.setattr(decoder, "compute_logits", fail_once)
    check(driver, want)
    assert not errors
    assert offload.starts.num_offloaded == 1
    assert set(offload.offloaded.layers) == {SPEC.layers}


@pytest.mark.slow
def test_what_is_handed_over_is_pinned(with_offload):
    _, cuda, offload = with_offload(1, adapters=[])
    assert cuda.pinned[offload._workers.address] == len(offload._workers.memory)  # noqa: SLF001


@pytest.mark.slow
def test_a_step_behind_one_that_is_under_way_is_not_timed_and_nor_is_that_one(with_offload):
    """Else a token of a prompt would seem to take as long as both, and offload workers to pay where they don't."""
    _, _, offload = with_offload(1, adapters=[])
    first, behind, alone = (StepPlan(index, [], []) for index in range(3))
    for plan in (first, behind, alone):
        plan.num_tokens = 4
    before = offload._per_token = -1.0  # noqa: SLF001
    for plan in (first, behind):
        offload.launch(lambda: None, plan)
    offload.end(first)
    offload.end(behind)
    assert offload._per_token == before  # noqa: SLF001
    offload.launch(lambda: None, alone)
    offload.end(alone)
    assert offload._per_token > 0  # noqa: SLF001
