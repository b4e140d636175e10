"""Every family over every path of an engine: chunks of any size, cached prefixes, swaps, merged weights, ranks."""

from __future__ import annotations

import itertools
import os
import random

import pytest

from chorus.graphs.runner import StepMode

from .merging.test_merged import merge
from .tiny_families import ADAPTERS, FAMILIES

EVERY = os.environ.get("CHORUS_FAMILIES") == "every"
"""Every geometry with every size of chunks on both decoders, as `make families` asks, rather than a choice of them."""

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.native,
    pytest.mark.parametrize("kernels", ["native", "torch"] if EVERY else ["native"]),
    pytest.mark.wide,
]


def _window(name: str) -> int | None:
    return FAMILIES[name][1].get("sliding_window")


def _short() -> list[str]:
    """One geometry of each class of configurations, the last one with a window where there is one."""
    found: dict[str, str] = {}
    for name, (config_class, _, _) in FAMILIES.items():
        if config_class not in found or _window(name) or not _window(found[config_class]):
            found[config_class] = name
    return list(found.values())


GEOMETRIES = list(FAMILIES) if EVERY else _short()
"""Windows are shorter than most prompts."""

FEW = [name for name in GEOMETRIES if EVERY or _window(name) or name == GEOMETRIES[0]]
"""A geometry without windows, and those with: their pages are of several groups."""

WINDOWED = [name for name in GEOMETRIES if _window(name)]
CHUNKS = (
    list(itertools.product(GEOMETRIES, (1, 7, 64))) if EVERY else list(zip(GEOMETRIES, itertools.cycle((1, 7, 64))))
)


def answers(it, driver, count, seed, lengths=(5, 70), tokens=8, adapters=(None, *ADAPTERS)):
    """Add requests of these adapters, None for the base model; return the answers of transformers and peft."""
    rng, want = random.Random(seed), {}
    for index in range(count):
        adapter = adapters[index % len(adapters)]
        prompt, want[f"{seed}.{index}"] = it.case(adapter, rng.randint(*lengths), seed=index, count=tokens)
        driver.add(f"{seed}.{index}", adapter, prompt, max_tokens=tokens)
    return want


def told(driver, want):
    answered = driver.drain()
    assert not {name: answered[name].error for name in want if answered[name].error}
    return {name: answered[name].tokens for name in want}


def check_variety(it, num_prompts=4):
    """Answers of transformers and peft vary, and every adapter changes them: comparisons with them mean something."""
    cases = [it.case(None, 20, seed) for seed in range(99, 99 + num_prompts)]
    outputs = {None: tuple(tuple(base) for _, base in cases)}
    outputs |= {name: tuple(tuple(it.greedy(name, prompt, 8)[0]) for prompt, _ in cases) for name in ADAPTERS}
    assert len(set(outputs.values())) == 4
    assert len({token for base in outputs[None] for token in base}) >= 4


@pytest.mark.parametrize(("family", "chunk"), CHUNKS)
def test_chunks_of_any_size(tiny, drive, family, chunk):
    it = tiny(family)
    driver = drive(it, max_num_seqs=min(4, chunk), max_num_batched_tokens=chunk, block_tokens=8)
    want = answers(it, driver, 5, seed=1)
    assert told(driver, want) == want


@pytest.mark.parametrize("family", GEOMETRIES)
def test_prefixes_from_the_cache(tiny, drive, family):
    it = tiny(family)
    driver = drive(it, block_tokens=8, max_num_batched_tokens=40, max_num_seqs=8)
    for _ in range(2):
        want = answers(it, driver, 4, seed=2)
        assert told(driver, want) == want
        driver.answers.clear()
    assert driver.engine.stats().num_prefix_hit_tokens > 40


@pytest.mark.parametrize("family", FEW)
def test_preempted_requests_swap_and_go_on(tiny, drive_crowded, family):
    it = tiny(family)
    driver = drive_crowded(it)
    want = answers(it, driver, 12, seed=4, lengths=(5, 20), tokens=30)
    assert told(driver, want) == want
    assert driver.engine.stats().num_swaps_out > 0


@pytest.mark.parametrize("family", WINDOWED)
def test_eight_windows(tiny, drive, family):
    """Long prompts, in chunks and from the cache: pages leave as soon as no later token sees them."""
    it = tiny(family)
    driver = drive(it, block_tokens=8, max_num_batched_tokens=48, max_num_seqs=4)
    layout, scheduler, most = driver.engine.executor.layout, driver.engine.scheduler, 0
    assert layout.has_windows
    for _ in range(2):
        want = answers(it, driver, 4, seed=7, lengths=(8 * 24, 8 * 24 + 40), tokens=12)
        while scheduler.has_work():
            driver.step()
            for request in scheduler.running:
                held, chunk = len(request.block_table.held), request.room - request.num_computed_tokens + 1
                assert held <= layout.pages_for_tokens(request.room, chunk)
                most = max(most, held)
        assert told(driver, want) == want
        driver.answers.clear()
    assert most < layout.table_width(8 * 24)
    assert driver.engine.stats().num_prefix_hit_tokens > 8 * 24


@pytest.mark.parametrize("family", GEOMETRIES)
def test_merged_weights_beside_other_adapters(tiny, drive, family):
    it = tiny(family)
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24)
    merge(driver, "r3-all")
    want = answers(it, driver, 8, seed=5)
    assert told(driver, want) == want
    assert {plan.mode for plan in driver.plans} == {StepMode.MERGED}


@pytest.mark.parametrize("family", FEW)
def test_two_ranks(tiny, drive, family):
    it = tiny(family)
    driver = drive(it, tensor_parallel_size=2, max_num_seqs=8, max_num_batched_tokens=24)
    want = answers(it, driver, 6, seed=6)
    assert told(driver, want) == want
