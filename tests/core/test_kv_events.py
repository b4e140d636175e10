"""KV events describe the content of the prefix cache."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from chorus.core.kv_events import Found, Gone, InFile, KvEvents, Stored
from chorus.memory.disk.tier import READERS
from chorus.memory.files.identity import with_content
from chorus.memory.pages.block import Medium

pytestmark = pytest.mark.wide

PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20] * 7


@pytest.fixture
def gqa(subject):
    return subject("gqa")


class Mirror:
    """Follows events: a block's tokens from the prompt's beginning, and its adapter, by its number and place; tokens
    of blocks in files by their keys, None while they are not known.
    """

    def __init__(self, events):
        self.events = events
        self.blocks = {}
        self.files = {}

    def follow(self):
        events, lost = self.events.drain()
        for event in events:
            if isinstance(event, Stored):
                assert event.adapter is None or event.content_hash is not None
                before = () if event.parent is None else self._tokens(event.parent)
                assert (event.number, event.medium) not in self.blocks
                self.blocks[event.number, event.medium] = (event.adapter, before + event.tokens)
            elif isinstance(event, InFile):
                self.files[event.key] = event.tokens
            elif isinstance(event, Found):
                self.files = dict.fromkeys(event.keys) | self.files
            elif isinstance(event, Gone):
                self.files.pop(event.key, None)
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


@pytest.fixture
def with_files(gqa, drive, tmp_path):
    """`with_files(**config)`: an engine over one folder, and the mirror of its events."""

    def make(**config):
        few = {name: gqa.adapters[name] for name in ("r2-qv", "r1-all")}
        files = {"kv_cache_dir": tmp_path / "kv", "kv_cache_disk_bytes": 1 << 24}
        driver = drive(gqa, adapters=few, **{"block_tokens": 4, "max_model_len": 128, **files, **config})
        know_contents(driver.engine)
        driver.engine.costs.host_prefix_page = driver.engine.costs.disk_prefix_page = 0.0
        driver.engine.disk.is_coming = lambda job: not job.has_ended  # however slow this machine is
        return driver, Mirror(driver.engine.record_kv_events())

    return make


def keys_in(engine):
    """Keys of the blocks in an engine's folder."""
    names = [path.name for path in Path(engine.disk.folder.root, "blocks").rglob("*") if path.is_file()]
    return {engine.disk.keys.key_of(name) for name in names}


def until(mirror, is_true):
    """Follow events, which come from other threads, until something is true."""
    end = time.monotonic() + 20
    while not is_true():
        assert not mirror.follow()
        assert time.monotonic() < end


def test_events_tell_which_blocks_are_in_files(with_files):
    driver, mirror = with_files()
    engine = driver.engine
    for adapter in (None, "r2-qv"):
        driver.run(f"of {adapter}", adapter, PROMPT, max_tokens=2)
    engine.reclaimer.reclaim_all()
    engine.disk.wait()
    assert not mirror.follow()
    assert mirror.files.keys() == keys_in(engine) and len(mirror.files) == 2 * (len(PROMPT) // 4)
    assert set(mirror.files.values()) == {tuple((PROMPT * 2)[at : at + 4]) for at in range(0, len(PROMPT) - 3, 4)}
    content = engine.store.get("r2-qv").manifest.content_hash
    engine.disk.writer.remove_owner(content).result()
    assert not mirror.follow()
    assert mirror.files.keys() == keys_in(engine) and len(mirror.files) == len(PROMPT) // 4
    engine.reset_prefix_cache(tiers=[Medium.DISK])
    engine.disk.wait()
    assert not mirror.follow() and mirror.files == {}


def test_a_folder_that_is_full_tells_what_leaves_it(with_files):
    driver, mirror = with_files()
    driver.engine.disk.folder.capacity_bytes = 1 << 17
    for number in range(6):
        driver.run(str(number), None, [*PROMPT[number:], number], max_tokens=2)
        driver.engine.reclaimer.reclaim_all()
        driver.engine.disk.wait()
    assert not mirror.follow() and driver.engine.disk.folder.num_evicted > 0
    assert mirror.files.keys() == keys_in(driver.engine) != set()


def test_an_engine_that_begins_with_files_tells_of_them(with_files):
    first, _ = with_files()
    first.run("a", "r2-qv", PROMPT, max_tokens=2)
    first.engine.disk.close(first.engine.host.copy_of)
    written = keys_in(first.engine)
    second, mirror = with_files()
    until(mirror, lambda: mirror.files.keys() == written)
    assert set(mirror.files.values()) == {None}
    second.run("b", "r2-qv", PROMPT, max_tokens=2)
    assert not mirror.follow()
    read = {key: tokens for key, tokens in mirror.files.items() if tokens is not None}
    assert len(read) == (len(PROMPT) - 1) // 4, "what is read is told of with its tokens"
    other, mirror = with_files(block_tokens=8)
    other.engine.disk.tell(mirror.events).result()
    assert not mirror.follow() and mirror.files == {}, "files of another identity are of no use to it"


def test_a_file_that_another_server_removed_is_noticed_when_it_is_looked_for(with_files):
    first, _ = with_files()
    first.run("a", None, PROMPT, max_tokens=2)
    first.engine.disk.close(first.engine.host.copy_of)
    second, mirror = with_files()
    until(mirror, lambda: len(mirror.files) > 0)
    folder = second.engine.disk.folder
    for path in [path for path in Path(folder.root, "blocks").rglob("*") if path.is_file()]:
        path.unlink()
    count = len(mirror.files)
    second.run("b", None, PROMPT, max_tokens=2)
    until(mirror, lambda: count - READERS <= len(mirror.files) < count)  # each thread has looked for one


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
