"""KV events describe the content of the prefix cache."""

from __future__ import annotations

import pytest

from chorus.core.kv_events import KvEvents, Stored
from chorus.memory.files.identity import with_content
from chorus.memory.pages.block import Medium

pytestmark = pytest.mark.wide

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20] * 7


@pytest.fixture
def gqa(subject):
    return subject("gqa")


class Mirror:
    """Follows events: a block's tokens from the prompt's beginning, and its adapter, by its number and place."""

    def __init__(self, events):
        self.events = events
        self.blocks = {}

    def follow(self):
        events, lost = self.events.drain()
        for event in events:
            if isinstance(event, Stored):
                assert event.adapter is None or event.content_hash is not None
                before = () if event.parent is None else self._tokens(event.parent)
                assert (event.number, event.medium) not in self.blocks
                self.blocks[event.number, event.medium] = (event.adapter, before + event.tokens)
            else:
                del self.blocks[event]
        return lost

    def _tokens(self, number):
        return next(tokens for (other, _), (_, tokens) in self.blocks.items() if other == number)


def cached(engine):
    """The content of the prefix cache, in the terms of `Mirror`."""
    names = {adapter.version: adapter.name for adapter in engine.store.versions()}
    found = {}
    for root in engine.prefix.roots():
        lines = {root: ()}
        for block in blocks_after(root):
            lines[block] = lines[block.parent] + block.tokens
            content = (names.get(root.version), lines[block])
            found.update(
                {
                    (block.number, place): content
                    for place, is_there in places_of(block, engine.executor.layout).items()
                    if is_there
                }
            )
    return found


def places_of(block, layout):
    """Whether a block is in each place."""
    windowed = [group for group, window in enumerate(layout.group_windows) if window]
    return {Medium.POOL: block.is_resident, Medium.HOST: block.has_images(windowed)}


def blocks_after(block):
    """All descendants, each after its parent."""
    for child in block.children.values():
        yield child
        yield from blocks_after(child)


def know_contents(engine):
    """Give the engine its adapters' content hashes, which the server computes in the background."""
    for adapter in engine.store.versions():
        engine.store.note(adapter, with_content(adapter.manifest))


def test_without_a_listener_nothing_is_recorded(gqa, drive):
    driver = drive(gqa)
    driver.run("a", "r2-qv", PROMPT, max_tokens=4)
    assert driver.engine.prefix.listener is None and driver.engine.stats().num_kv_events == 0


def test_events_tell_what_the_prefix_cache_holds(gqa, drive):
    few = {name: gqa.adapters[name] for name in ("r2-qv", "r1-all")}
    driver = drive(gqa, num_pages=12, adapters=few)
    know_contents(driver.engine)
    mirror = Mirror(driver.engine.record_kv_events())
    for number, (adapter, tail) in enumerate([(None, []), ("r2-qv", []), (None, [7] * 9), ("r1-all", []), (None, [8])]):
        driver.run(str(number), adapter, PROMPT + tail, max_tokens=6)
        assert not mirror.follow()
        assert mirror.blocks == cached(driver.engine) != {}
    engine = driver.engine
    assert engine.stats().num_kv_events > len(mirror.blocks), "some were evicted"
    engine.store.register("r1-all", gqa.adapters["r1-all"])  # a new version: the old one's blocks go
    assert not mirror.follow()
    assert mirror.blocks == cached(engine) and "r1-all" not in {name for name, _ in mirror.blocks.values()}
    know_contents(engine)
    driver.run("last", "r1-all", PROMPT, max_tokens=2)
    engine.reset_prefix_cache()
    mirror.follow()
    assert mirror.blocks == cached(engine) == {}


@pytest.mark.parametrize("family", ["mistral-window", "ministral"])
def test_events_name_blocks_whose_pages_in_windows_are_evicted(tiny, drive, family):
    """They named a block by its first page, which another block may have by the time that the event is read."""
    driver = drive(tiny(family), adapters={}, num_pages=36, block_tokens=8, max_num_batched_tokens=24, max_num_seqs=2)
    engine = driver.engine
    mirror = Mirror(engine.record_kv_events())
    for number in range(12):
        driver.run(str(number), None, [*PROMPT[number % 5 :], number], max_tokens=6)
        if number % 3 == 2:
            assert not mirror.follow()
            assert mirror.blocks == cached(engine) != {}
    assert engine.stats().num_kv_events > len(mirror.blocks), "some were evicted"
    (root,) = engine.prefix.roots()
    assert not all(all(block.pages) for block in blocks_after(root)), "and some pages of others"
    engine.reset_prefix_cache()
    assert not mirror.follow()
    assert mirror.blocks == cached(engine) == {}


def test_a_publisher_that_lags_is_told_of_the_loss_and_the_engine_never_waits(gqa, drive):
    driver = drive(gqa)
    engine = driver.engine
    know_contents(engine)
    events = engine.prefix.listener = engine.kv_events = KvEvents(engine.store, most=3)
    driver.run("a", None, PROMPT, max_tokens=2)
    first, lost = events.drain()
    assert len(first) == 3 and lost
    assert [event.parent for event in first] == [None, *(event.number for event in first[:-1])], "a gapless beginning"
    dropped = engine.stats().num_dropped_kv_events
    assert dropped > 0 and engine.stats().num_kv_events == 3
    assert events.drain() == ([], False)
    driver.run("b", "r2-qv", PROMPT, max_tokens=2)
    again, lost = events.drain()
    assert len(again) == 3 and lost and again[0].adapter == "r2-qv", "it is recorded anew once all was taken"


def test_blocks_of_an_adapter_are_told_of_once_its_content_is_known(gqa, drive):
    """They were told of by the adapter's name and number, which on another server are those of other weights."""
    driver = drive(gqa)
    engine, mirror = driver.engine, Mirror(driver.engine.record_kv_events())
    driver.run("a", "r2-qv", PROMPT, max_tokens=2)
    driver.run("base", None, PROMPT, max_tokens=2)
    assert not mirror.follow()
    held = {number: line for number, line in cached(engine).items() if line[0] is not None}
    assert held and mirror.blocks.keys() == cached(engine).keys() - held.keys(), "the base model's have no secret"
    know_contents(engine)
    driver.run("longer", "r2-qv", PROMPT + [7] * 9, max_tokens=2)
    assert not mirror.follow()
    assert mirror.blocks == cached(engine), "parents come before the blocks that follow them"


def test_a_held_block_that_is_forgotten_is_never_told_of(gqa, drive):
    driver = drive(gqa)
    engine, mirror = driver.engine, Mirror(driver.engine.record_kv_events())
    driver.run("a", "r2-qv", PROMPT, max_tokens=2)
    assert not mirror.follow() and mirror.blocks == {}
    engine.reset_prefix_cache()
    driver.run("again", "r2-qv", PROMPT, max_tokens=2)
    engine.reset_prefix_cache()
    know_contents(engine)
    assert not mirror.follow() and mirror.blocks == cached(engine) == {}
    driver.run("after", "r2-qv", PROMPT, max_tokens=2)
    assert not mirror.follow() and mirror.blocks == cached(engine) != {}


def test_what_is_held_is_dropped_with_what_was_lost(gqa, drive):
    """A block's removal may be among the lost events."""
    driver = drive(gqa)
    engine = driver.engine
    events = engine.prefix.listener = engine.kv_events = KvEvents(engine.store, most=3)
    driver.run("a", "r2-qv", PROMPT, max_tokens=2)
    assert events.drain() == ([], True)
    know_contents(engine)
    assert events.drain() == ([], False)
