"""A preempted request goes on exactly where it was, whether its KV was kept in host memory or is computed again."""

from __future__ import annotations

import random

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.swaps import PageSwaps
from chorus.core.requests.request import RequestState
from chorus.core.scheduling.request_memory import swaps
from chorus.memory.files.identity import with_content
from chorus.memory.pages.arena import Arena
from chorus.memory.pages.eviction import RestoreCosts
from chorus.memory.pages.layout import PageLayout
from chorus.memory.transfers.dma import open_dma
from chorus.perf.inline_reads import InlineReads

from .conftest import exported, ticking
from .test_parity import FEW, add_all, check, make_cases, make_families

pytestmark = pytest.mark.wide

SETTINGS = ["recompute", "swap", "auto"]


class LateSwaps:
    """Copies of a CPU executor's pages that are made when `end` is called: at random, or by `wait`; some fail.

    Until then, the destination pages are wrong, and host memory holds nothing yet.
    """

    class Copy:
        def __init__(self, make):
            self.state = "coming"
            self.cancelled = False
            self.make = make

        def end(self, state="done"):
            if state == "done" and not self.cancelled:
                self.make()
            self.state = state

        def is_done(self):
            return self.state == "done" and not self.cancelled

        def has_failed(self):
            return self.cancelled or self.state == "failed"

        def cancel(self):
            self.cancelled = True

        def is_quiet(self):
            return self.state != "coming"

    def __init__(self, swaps, failing=0.0):
        self.page_seconds = swaps.page_seconds
        self.copies = []
        self._swaps = swaps
        self._random = random.Random(4)
        self._failing = failing

    def copy_out(self, pages):
        image = self._wrong(pages)
        return image, self._begin(lambda: self._fill(image, pages))

    def copy_in(self, image, skip, pages):
        self._swaps.copy_in(self._wrong(pages), 0, pages)
        return self._begin(lambda: self._swaps.copy_in(image, skip, pages))

    def _wrong(self, pages):
        """An image of as many pages, of every rank's arena, that holds nothing."""
        image = self._swaps.copy_out(pages)[0]
        for share in shares(image):
            share.fill_(torch.nan)
        return image

    def _fill(self, image, pages):
        for share, found in zip(shares(image), shares(self._swaps.copy_out(pages)[0]), strict=True):
            share.copy_(found)

    def wait(self, timeout):
        self.end_one()

    def end_one(self):
        if coming := [copy for copy in self.copies if copy.state == "coming"]:
            self._random.choice(coming).end("failed" if self._random.random() < self._failing else "done")

    def _begin(self, make):
        self.copies.append(self.Copy(make))
        return self.copies[-1]


def shares(image):
    return [image] if isinstance(image, torch.Tensor) else image


def begun(it, driver):
    """Return a request that has given a few of its twelve tokens, and its prompt."""
    prompt = it.prompt("r1-all", 30, 12, seed=3)
    request = driver.add("a", "r1-all", prompt, max_tokens=12)
    for _ in range(4):
        driver.step()
    return request, prompt


def slow_link(driver, failing=0.0):
    """Let an engine's copies end one after the other, a step or more apart."""
    executor = driver.executor
    late = LateSwaps(executor.swaps, failing)
    driver.engine.swapped.backend = late
    ends = random.Random(9)
    executor.before = lambda plan: late.end_one() if ends.random() < 0.4 else None
    return late


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
@pytest.mark.parametrize("preemption", SETTINGS)
def test_a_short_arena_changes_no_token(subject, drive, preemption, chunked, prefix_cache):
    it = subject("gqa")
    cases = make_cases(it, 24, seed=4, tokens=(24, 48))
    driver = drive(
        it,
        chunked_prefill=chunked,
        max_num_batched_tokens=64 if chunked else 512,
        num_pages=46,
        preemption=preemption,
        prefix_cache=prefix_cache,
    )
    add_all(driver, cases)
    check(driver, cases)
    stats = driver.engine.stats()
    assert stats.num_preemptions == sum(answer.num_preemptions for answer in driver.answers.values()) > 3
    assert (stats.num_swaps_out > 3) == (stats.num_swaps_in > 3) == (preemption != "recompute")
    assert stats.num_swapped == stats.swapped_bytes == 0
    if preemption != "recompute":
        assert stats.swapped_bytes_in <= stats.swapped_bytes_out


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("failing", [0.0, 0.3], ids=["sound", "failing"])
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cached", "uncached"])
def test_copies_that_go_on_beside_steps_change_no_token(subject, drive, prefix_cache, failing):
    it = subject("gqa")
    cases = make_cases(it, 24, seed=4, tokens=(24, 48))
    driver = drive(it, max_num_batched_tokens=64, num_pages=46, preemption="swap", prefix_cache=prefix_cache)
    late = slow_link(driver, failing)
    add_all(driver, cases)
    check(driver, cases)
    stats = driver.engine.stats()
    assert stats.num_swaps_out > 3
    assert stats.num_swaps_in > 1
    assert (stats.num_swaps_dropped > 0) or not failing
    assert {copy.state for copy in late.copies} == {"done", *(["failed"] if failing else [])}
    assert stats.num_swapped == stats.swapped_bytes == 0


@pytest.mark.usefixtures("crowded")
@pytest.mark.parametrize("preemption", SETTINGS)
@pytest.mark.parametrize("cache_pages", [0, 3, 1000])
def test_shared_beginnings(subject, drive, preemption, cache_pages):
    it = subject("gqa")
    cases = make_families(it, adapters=FEW, stems=(48, 90), seed=60, tokens=(24, 48))
    adapters = {name: it.adapters[name] for name in FEW if name}
    driver = drive(it, num_pages=30, max_num_batched_tokens=64, preemption=preemption, adapters=adapters)
    driver.engine.store.images.budget.capacity_bytes = cache_pages * driver.engine.executor.layout.page_bytes
    add_all(driver, cases)
    check(driver, cases)
    stats = driver.engine.stats()
    assert stats.num_preemptions > 1
    assert stats.num_swaps_out == 0 or (preemption != "recompute" and cache_pages)


@pytest.mark.parametrize("at", range(1, 12))
def test_a_preemption_at_any_step_loses_nothing(subject, drive, at):
    """Sampled tokens, penalties, scored prompts and least lengths are those of a run without it."""
    it = subject("gqa")
    asked = [
        {"temperature": 0.9, "seed": 7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "max_tokens": 12},
        {"temperature": 0.7, "seed": 8, "min_tokens": 9, "ignore_eos": False, "max_tokens": 12, "logprobs": 2},
        {"prompt_logprobs": 1, "max_tokens": 8},
    ]
    rng = random.Random(at)
    prompts = [[rng.randrange(3, it.vocab_size) for _ in range(50)] for _ in asked]

    def run(preempt_at):
        driver = drive(it, max_num_batched_tokens=24, max_num_seqs=8, preemption="swap")
        requests = [
            driver.add(f"r{index}", name, prompt, **params)
            for index, (name, prompt, params) in enumerate(zip(FEW, prompts, asked, strict=False))
        ]
        for _ in range(preempt_at):
            driver.step()
        if preempt_at:
            for request in [each for each in requests if each.is_running]:
                driver.engine.scheduler.lifecycle.preempt(request)
                assert request.state is RequestState.SWAPPED
                computed = request.kv_image.num_tokens if request.kv_image is not None else 0
                assert bool(computed) == (request.kv_image is not None)
        answers = driver.drain()
        stats = driver.engine.stats()
        assert stats.num_swaps_in == stats.num_swaps_out - stats.num_swaps_dropped
        scored = answers["r2"].prompt_logprobs
        assert scored is not None
        tokens = {name: (answer.tokens, answer.finish_reason) for name, answer in answers.items()}
        return tokens, [len(answer.logprobs) for answer in answers.values()], [each.token_id for each in scored]

    assert run(at) == run(0)


def test_a_restored_request_computes_only_what_is_missing(subject, drive):
    it = subject("gqa")
    driver = drive(it, preemption="swap", prefix_cache=False)
    request = driver.add("a", None, [5] * 40, max_tokens=10)
    for _ in range(3):
        driver.step()
    computed = request.num_computed_tokens
    driver.engine.scheduler.lifecycle.preempt(request)
    assert driver.engine.stats().swapped_bytes == -(-computed // driver.engine.block_tokens) * (
        driver.executor.layout.page_bytes
    )
    driver.engine.reclaimer.reclaim_all()
    driver.step()
    assert [(row.start, len(row.tokens)) for row in driver.plans[-1].sequences] == [(computed, 1)]
    driver.drain()


def test_blocks_that_others_use_are_not_copied(subject, drive):
    it = subject("gqa")
    driver = drive(it, preemption="swap")
    block = driver.engine.block_tokens
    stem = [7] * (2 * block)
    one = driver.add("a", None, [*stem, 9, 9, 9], max_tokens=20)
    driver.step()
    two = driver.add("b", None, [*stem, 8, 8], max_tokens=20)
    driver.step()
    assert two.num_known_blocks == 2
    driver.engine.scheduler.lifecycle.preempt(two)
    assert two.kv_image.blocks == range(2, 3)
    driver.engine.scheduler.lifecycle.preempt(one)
    assert one.kv_image.blocks.start == 0, "nobody else holds them now"
    answers = driver.drain()
    alone = drive(it, preemption="recompute", prefix_cache=False)
    assert alone.run("b", None, [*stem, 8, 8], max_tokens=20).tokens == answers["b"].tokens
    assert alone.run("a", None, [*stem, 9, 9, 9], max_tokens=20).tokens == answers["a"].tokens


def test_an_aborted_request_leaves_nothing_on_the_host(subject, drive):
    it = subject("gqa")
    driver = drive(it, preemption="swap")
    request = driver.add("a", "r1-all", [5] * 40, max_tokens=10)
    driver.step()
    driver.engine.scheduler.lifecycle.preempt(request)
    assert driver.engine.stats().num_swapped == 1
    driver.engine.store.unregister("r1-all")
    driver.engine.abort("a")
    driver.engine.check_integrity()
    stats = driver.engine.stats()
    assert (stats.num_swapped, stats.swapped_bytes, stats.num_swaps_dropped) == (0, 0, 0)


def test_aborts_while_copies_are_under_way(subject, drive):
    it = subject("gqa")
    driver = drive(it, preemption="swap", prefix_cache=False)
    late = slow_link(driver)
    late.end_one = lambda: None
    leaving = driver.add("leaving", "r1-all", [5] * 40, max_tokens=10)
    coming = driver.add("coming", None, [6] * 40, max_tokens=10)
    driver.step()
    driver.engine.scheduler.lifecycle.preempt(coming)
    late.copies[0].end()
    driver.step()
    assert coming.restoring is not None
    driver.engine.scheduler.lifecycle.preempt(leaving)
    driver.engine.store.unregister("r1-all")
    pages = driver.engine.stats().num_kv_pages
    for name in ("leaving", "coming"):
        driver.engine.abort(name)
        driver.engine.check_integrity()
    stats = driver.engine.stats()
    assert (stats.num_kv_pages, stats.num_swapped) == (pages, 2), "they are still copied"
    driver.step()
    assert driver.engine.stats().num_kv_pages == pages
    for copy in late.copies[1:]:
        copy.end()
    driver.step()
    stats = driver.engine.stats()
    assert (stats.num_kv_pages, stats.num_swapped, stats.swapped_bytes, stats.num_swaps_dropped) == (0, 0, 0, 0)


def test_one_that_is_preempted_while_its_kv_comes_back_has_it_still(subject, drive):
    it = subject("gqa")
    driver = drive(it, preemption="swap", prefix_cache=False)
    late = slow_link(driver)
    request, prompt = begun(it, driver)
    driver.engine.scheduler.lifecycle.preempt(request)
    late.copies[0].end()
    driver.engine.begin_step()
    assert request.restoring is not None
    driver.engine.scheduler.lifecycle.preempt(request)
    assert driver.engine.stats().num_kv_pages > 0, "something is still written to its pages"
    assert driver.drain()["a"].tokens == it.greedy("r1-all", prompt, 12)
    stats = driver.engine.stats()
    assert (stats.num_swaps_out, stats.num_swaps_in, stats.num_swaps_dropped) == (1, 2, 0)


@pytest.mark.parametrize("way", ["copy_out", "copy_in"])
def test_a_copy_that_is_refused_costs_time_only(subject, drive, monkeypatch, way):
    def refuse(*args):
        raise RuntimeError("the driver refuses")

    it = subject("gqa")
    driver = drive(it, preemption="swap")
    request, prompt = begun(it, driver)
    monkeypatch.setattr(driver.executor.swaps, way, refuse)
    driver.engine.scheduler.lifecycle.preempt(request)
    assert driver.drain()["a"].tokens == it.greedy("r1-all", prompt, 12)
    stats = driver.engine.stats()
    assert (stats.num_swapped, stats.swapped_bytes, stats.num_swaps_in) == (0, 0, 0)
    assert (stats.num_swaps_out, stats.num_swaps_dropped) == ((1, 1) if way == "copy_in" else (0, 0))


@pytest.mark.parametrize(("family", "prefix_cache"), [("mistral-window", False), ("qwen3.5", True)])
def test_a_copy_back_that_is_refused_leaves_pages_and_states_as_before(tiny, drive, monkeypatch, family, prefix_cache):
    """The request begins again, with a page wherever it writes; or at a checkpoint, whose state it reads."""

    def refuse(*args):
        raise RuntimeError("the driver refuses")

    it = tiny(family)
    config = {"preemption": "swap", "max_model_len": 128, "max_num_batched_tokens": 32, "block_tokens": 8}
    driver = drive(it, prefix_cache=prefix_cache, **config)
    prompt, want = it.case(None, 60, seed=3, count=12)
    request = driver.add("a", None, prompt, max_tokens=12)
    while request.num_output_tokens < 6:
        driver.step()
    monkeypatch.setattr(driver.executor.swaps, "copy_in", refuse)
    driver.engine.scheduler.lifecycle.preempt(request)
    assert driver.drain()["a"].tokens == want
    stats = driver.engine.stats()
    assert (stats.num_swaps_out, stats.num_swaps_dropped, stats.num_swaps_in) == (1, 1, 0)
    assert (request.began_at > 0) == prefix_cache


def test_an_exported_request_goes_on_elsewhere_while_its_kv_is_on_the_host(subject, drive):
    it = subject("gqa")
    here, there = drive(it, preemption="swap"), drive(it, preemption="swap")
    request, prompt = begun(it, here)
    here.engine.scheduler.lifecycle.preempt(request)
    for driver in (here, there):
        adapter = driver.engine.store.get("r1-all")
        driver.engine.store.note(adapter, with_content(adapter.manifest))
    moved = there.engine.resume(exported(here.engine, "a"))
    there.answers["a"] = type(here.answers["a"])()
    here.engine.abort("a")
    here.engine.check_integrity()
    assert moved.kv_image is None
    got = here.answers["a"].tokens + there.drain()["a"].tokens
    assert got == it.greedy("r1-all", prompt, 12)


def test_a_reload_does_not_touch_swapped_kv(subject, drive):
    it = subject("gqa")
    driver = drive(it, preemption="swap")
    request, prompt = begun(it, driver)
    driver.engine.scheduler.lifecycle.preempt(request)
    driver.engine.store.register("r1-all", it.adapters["r8-attention"])
    assert driver.drain()["a"].tokens == it.greedy("r1-all", prompt, 12)


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_making_room_for_a_request_keeps_the_kv_that_comes_back(tiny, drive, family):
    """An adapter that others wait for is evicted for it, and its new image takes the host memory that is left."""
    it = tiny(family)
    config = {"preemption": "swap", "prefix_cache": False, "max_model_len": 128, "block_tokens": 8}
    probe = drive(it, **config).engine
    pages = probe.executor.layout.pages_for_tokens
    adapter_pages, name = min((adapter.num_pages, name) for name, adapter in probe.store.registered())
    num_pages = 1 + pages(72, 72) + max(pages(24, 24), adapter_pages)
    driver = drive(it, num_pages=num_pages, adapters={name: it.adapters[name]}, **config)
    engine, store = driver.engine, driver.engine.store
    prompt, want = it.case(None, 60, seed=3, count=12)
    driver.add("beside", None, [5] * 10, max_tokens=14)
    request = driver.add("a", None, prompt, max_tokens=12)
    while request.num_output_tokens < 6:
        driver.step()
    engine.scheduler.lifecycle.preempt(request)
    adapter = store.get(name)
    store.hold(adapter)
    store.loads.fetch(adapter)
    store.prefetch(adapter)
    store.images.drop(adapter)
    store.images.budget.capacity_bytes = store.images.budget.num_bytes
    driver.step()
    assert request.is_running
    assert not adapter.pages
    assert engine.stats().num_swaps_dropped == 0
    assert driver.drain()["a"].tokens == want
    store.let_go(adapter)


def test_an_executor_that_can_not_swap(subject, drive):
    it = subject("gqa")
    driver = drive(it)
    driver.executor.swaps = None
    config = driver.engine.config
    with pytest.raises(ValueError, match=r"preemption is 'swap'.*set it to 'auto' or 'recompute'"):
        Engine(config.model_copy(update={"preemption": "swap"}), driver.executor, ticking(), InlineReads())
    engine = Engine(config.model_copy(update={"preemption": "auto"}), driver.executor, ticking(), InlineReads())
    assert engine.stats().num_swaps_out == 0


def test_auto_takes_what_costs_less():
    costs = RestoreCosts(prefix_page=1e-3, swapped_page=2e-3)
    assert [swaps(setting, costs) for setting in SETTINGS] == [False, True, False]
    costs.observe("prefix_page", 1.0)
    assert [swaps(setting, costs) for setting in SETTINGS] == [False, True, True]


def test_pages_go_out_and_come_back_on_a_cpu():
    layout = PageLayout(2, 2, 4, 4, 4)
    arena = Arena(layout, 8, torch.float32, "cpu")
    swap = PageSwaps(arena, open_dma(arena.pages, 0))
    assert swap.page_seconds > 0
    arena.pages.copy_(torch.arange(arena.pages.numel(), dtype=torch.float32).view_as(arena.pages))
    before = arena.pages.clone()
    image, transfer = swap.copy_out([5, 2, 7])
    assert transfer is None
    arena.pages[1:] = -1
    assert swap.copy_in(image, 1, [3, 4]) is None
    assert torch.equal(arena.pages[3:5], before[[2, 7]])
    assert (arena.pages[5:] == -1).all()


def test_a_step_that_swaps_waits_for_no_memory_to_be_pinned(monkeypatch):
    layout = PageLayout(2, 2, 4, 4, 4)
    arena = Arena(layout, 8, torch.float32, "cpu")
    swap = PageSwaps(arena, dma := open_dma(arena.pages, 0))
    monkeypatch.setattr(dma.buffers, "take_now", lambda shape, dtype: torch.zeros(shape, dtype=dtype))
    monkeypatch.setattr(dma.buffers, "take", None)
    image, _ = swap.copy_out([5, 2])
    assert image.shape == (2, layout.page_elems)


def test_config_says_what_may_be_chosen():
    assert EngineConfig.model_fields["preemption"].default in SETTINGS
