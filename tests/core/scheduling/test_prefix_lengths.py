"""How much of a cached prefix a request begins with: images, windows, checkpoints and tiers each have a say."""

from __future__ import annotations

import pytest

from chorus.core.requests.blocks import Blocks
from chorus.core.requests.media import MediaItem
from chorus.core.requests.request import Request

from ...simulation.checked_engine import CheckedEngine
from ...simulation.faults import windows_of_a_longer_prefix
from ...simulation.made_up_images import Prompt
from ...simulation.made_up_model import VOCAB

BLOCK = 4
BEGINNING = [3, 4, 5, 6, 7, 8, 9, 10]
IMAGE = Prompt([*BEGINNING, *[VOCAB] * 6], (MediaItem(b"", "a", ((8, 6),)),))
"""It ends within its last block of KV."""


def engine_with(**config) -> CheckedEngine:
    return CheckedEngine(block_tokens=BLOCK, prefix_cache=True, image_blocks=Blocks.IMAGES, **config)


def asked(checked: CheckedEngine, name: str, prompt: Prompt, **params) -> Request:
    """A request that has been answered, which is checked."""
    request = checked.add(name, prompt=prompt.tokens, media=prompt.media, **params)
    checked.drain()
    return request


def lose_windows(checked: CheckedEngine, *depths: int) -> None:
    """Evict the pages in windows of cached blocks; blocks are counted from 1."""
    prefix = checked.engine.prefix
    blocks = [block for block in set(prefix.by_page.values()) if block.depth in depths]
    for block in blocks:
        prefix.evict_page(block.pages[1])
    assert blocks


@pytest.mark.parametrize(("lost", "cached"), [((), 8), ((2,), 4), ((1, 2), 0)])
def test_a_prefix_cut_at_an_image_has_the_pages_of_its_windows(lost, cached):
    """What would be cached ends within the image; before it, the pages that the next token sees may be gone."""
    checked = engine_with(windows=(None, 5), host_prefix_cache="off")
    asked(checked, "first", IMAGE.then([20, 21, 22, 23, 24]))
    if lost:
        lose_windows(checked, *lost)
    other = asked(checked, "other", IMAGE.then([30, 31, 32]))
    assert other.num_cached_tokens == cached


def test_a_prefix_with_the_pages_of_longer_windows_is_found(monkeypatch):
    """By its KV, which is not its own: the check of the test above would see it without the number, too."""
    windows_of_a_longer_prefix(monkeypatch)
    checked = engine_with(windows=(None, 5), host_prefix_cache="off")
    asked(checked, "first", IMAGE.then([20, 21, 22, 23, 24]))
    lose_windows(checked, 2)
    with pytest.raises(AssertionError, match="KV of other is not its own"):
        asked(checked, "other", IMAGE.then([30, 31, 32]))


def test_what_comes_after_blocks_that_lost_their_windows_is_cached():
    """A prompt that computes known blocks again, and goes on otherwise, is found at its next turn."""
    checked = engine_with(windows=(None, 5), host_prefix_cache="off")
    asked(checked, "first", Prompt([*range(3, 15), 20, 21, 22, 23, 24]))
    lose_windows(checked, 1, 2, 3)
    other = asked(checked, "other", (prompt := Prompt([*range(3, 15), 30, 31, 32, 33, 34])))
    again = asked(checked, "again", prompt.then([35, 36]))
    assert (other.num_cached_tokens, again.num_cached_tokens) == (0, 16)


def test_what_need_not_be_copied_is_cut_at_an_image_too():
    """The blocks of the image's end are in host memory alone, and it takes longer to copy than to compute them."""
    checked = engine_with(preemption="swap", host_prefix_cache="on")
    asked(checked, "first", IMAGE.then([20, 21, 22, 23, 24]))
    engine = checked.engine
    last = max(engine.prefix.by_page.values(), key=lambda block: block.depth)
    while last.depth > 3:
        engine.prefix.evict_page(last.pages[0])
        last = last.parent
    engine.costs.host_prefix_page, engine.costs.prefix_page = 1.0, 1e-9
    other = asked(checked, "other", IMAGE.then([20, 21, 30, 31]))
    assert other.num_cached_tokens == 8 and engine.memory.copies.num_recomputed_tokens == 8


@pytest.mark.parametrize("windows", [(None,), (None, 5)])
def test_a_prefix_that_cannot_be_copied_leaves_an_image_whole(windows, monkeypatch):
    """A chunk was measured for the tokens after the prefix; without it, the image would be cut."""
    checked = engine_with(preemption="swap", host_prefix_cache="on", windows=windows, max_num_batched_tokens=13)
    prompt = IMAGE.then([20, 21])
    asked(checked, "first", prompt.then([22]))
    engine = checked.engine
    engine.reclaimer.reclaim_all()
    engine.costs.host_prefix_page, engine.costs.prefix_page = 0.0, 1.0

    def refuse(*_):
        raise OSError("no copy")

    monkeypatch.setattr(checked.executor.swaps, "copy_in", refuse)
    again = asked(checked, "again", prompt.then(range(30, 42)))
    assert again.num_cached_tokens == 0 and engine.stats().num_host_hit_tokens == 0


def test_kv_that_cannot_be_copied_back_leaves_an_image_whole(monkeypatch):
    """A preempted request goes on after its image; if its KV is lost, it begins before it."""
    checked = CheckedEngine(
        block_tokens=BLOCK, image_blocks=Blocks.IMAGES, preemption="swap", max_num_batched_tokens=13
    )
    request = checked.add("swapped", prompt=IMAGE.then(range(20, 40)).tokens, media=IMAGE.media)
    while request.num_computed_tokens < 14:
        checked.step()
    checked.engine.scheduler.lifecycle.preempt(request)
    assert request.kv_image is not None

    def refuse(*_):
        raise OSError("no copy")

    monkeypatch.setattr(checked.executor.swaps, "copy_in", refuse)
    checked.drain()
    assert checked.engine.stats().num_swaps_dropped == 1


def test_a_preempted_request_keeps_what_it_could_not_begin_with():
    """Another request uses its first blocks, whose pages in windows are gone: its own copy has those blocks, too."""
    checked = engine_with(windows=(None, 5), preemption="swap", host_prefix_cache="off")
    prompt = IMAGE.then([20, 21, 22, 23, 24, 25, 26, 27, 28])
    one = checked.add("one", prompt=prompt.tokens, media=prompt.media, max_tokens=9)
    while one.num_output_tokens < 2:
        checked.step()
    other = checked.add("other", prompt=prompt.tokens, media=prompt.media, max_tokens=9)
    while other.num_output_tokens < 4:
        checked.step()
    lose_windows(checked, 2, 3, 4, 5)
    checked.engine.scheduler.lifecycle.preempt(other)
    image = other.kv_image
    assert image is not None and image.blocks.start == 1
    checked.drain()
    assert checked.engine.stats().num_swaps_dropped == 0
