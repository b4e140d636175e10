"""Blocks that wait to be written: from the root, and what does not fit loses its tail."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from chorus.memory.disk.folder import BlockFile, BlockFolder, SealedBlock
from chorus.memory.disk.writer import BlockWriter
from chorus.memory.host.budget import HostBudget
from chorus.memory.pages.block import Block, Root

PAGE_BYTES = 8


class LaterPool:
    """Runs calls when the test says so."""

    def __init__(self):
        self.calls = []

    def submit(self, function, /, *arguments):
        future = Future()
        self.calls.append((future, function, arguments))
        return future

    def wait(self, futures, timeout):
        self.run()

    def run(self):
        while self.calls:
            future, function, arguments = self.calls.pop(0)
            future.set_result(function(*arguments))

    def shutdown(self):
        self.calls.clear()


@pytest.fixture
def written(tmp_path):
    """Makes a writer whose queue has room for some blocks; it notes what it wrote."""

    def make(most_blocks=3):
        folder = BlockFolder(tmp_path / "kv", None, PAGE_BYTES)
        writer = BlockWriter(folder, memoryview, PAGE_BYTES, 8 * most_blocks * PAGE_BYTES)
        writer.pool = LaterPool()
        return writer, []

    return make


def path_of(count):
    """Blocks of a prompt, the first one first."""
    found, parent = [], Root(0, ("", ""))
    for number in range(count):
        parent = Block(parent, (number,), [1], number)
        found.append(parent)
    return found


def add(writer, order, block, *, is_kept=False, owner="base"):
    file = BlockFile(owner, "t", f"{owner}-{block.depth}")
    sealed = SealedBlock((0,), 0, 0, [bytes(PAGE_BYTES)])
    return writer.add(file, block, sealed, lambda: order.append(block.depth), is_kept=is_kept)


def test_what_waits_is_written_from_the_root(written):
    writer, order = written()
    for block in reversed(path_of(6)):
        assert add(writer, order, block)
        assert block.written == 1
    assert writer.num_bytes == 0, "host memory has the images"
    writer.pool.run()
    assert order == [1, 2, 3, 4, 5, 6]


def test_what_leaves_host_memory_and_does_not_fit_loses_its_tail(written):
    writer, order = written(most_blocks=3)
    blocks = path_of(6)
    for block in reversed(blocks):
        add(writer, order, block)
    for block in reversed(blocks):  # as they leave
        writer.leaves(block)
        writer.leaves(block)
        assert writer.num_bytes <= 3 * PAGE_BYTES
    assert [block.written for block in blocks] == [1, 1, 1, 0, 0, 0]
    writer.pool.run()
    assert order == [1, 2, 3]
    assert writer.num_bytes == writer.keeps() == 0


def test_a_deeper_block_takes_no_room_of_those_before_it(written):
    writer, order = written(most_blocks=2)
    blocks = path_of(3)
    assert [add(writer, order, block, is_kept=True) for block in blocks] == [True, True, False]
    writer.pool.run()
    assert order == [1, 2]


def test_what_may_still_be_kept_is_not_room_for_others(written):
    """A read had dropped all that host memory had, and then found that half of it was waiting to be written."""
    writer, order = written(most_blocks=2)
    budget = HostBudget(10 * PAGE_BYTES)

    class Images:
        num_bytes = 10 * PAGE_BYTES

        def is_loose(self, item):
            return True

        def drop(self, item):
            writer.leaves(item)
            self.num_bytes -= PAGE_BYTES

    images, blocks = Images(), path_of(10)
    budget.join(images)
    budget.join(writer, keeps=writer.keeps)
    for block in blocks:
        add(writer, order, block)
        budget.offer(images, block, PAGE_BYTES, 1, 1, depth=block.depth)
    assert budget.room() == 8 * PAGE_BYTES
    assert not budget.claim(9 * PAGE_BYTES) and images.num_bytes == 10 * PAGE_BYTES
    assert budget.claim(8 * PAGE_BYTES)
    assert writer.num_bytes == 2 * PAGE_BYTES and images.num_bytes == 0


def test_a_block_that_could_not_be_written_is_given_again(written, monkeypatch):
    writer, order = written()
    (block,) = path_of(1)
    monkeypatch.setattr(BlockFolder, "write", lambda *given: False)
    add(writer, order, block)
    writer.pool.run()
    assert block.written == 0 and order == []
    monkeypatch.undo()
    add(writer, order, block)
    writer.pool.run()
    assert block.written == 1 and order == [1]


def test_a_removed_adapter_s_blocks_are_not_written_and_removals_have_their_turn(written, monkeypatch):
    monkeypatch.setattr("chorus.memory.disk.writer.TURN_BLOCKS", 2)
    writer, order = written()
    mine, others = path_of(5), path_of(5)
    for block in mine:
        add(writer, order, block, owner="aa")
    for block in others:
        add(writer, order, block)
    removed = writer.remove_owner("aa")
    writer.pool.run()
    assert order == [1, 2, 3, 4, 5] and removed.result() == 0
    assert [block.written for block in mine] == [0] * 5
    for block in others:
        add(writer, order, block, owner="bb")
    later = writer.remove_owner("cc")
    _, turn, _ = writer.pool.calls[0]
    writer.pool.calls.pop(0)
    turn()
    future, removal, given = writer.pool.calls.pop(0)
    future.set_result(removal(*given))
    assert later.done() and len(order) == 7, "it did not wait for all that was to be written"


def test_images_of_what_is_not_written_are_let_go(written):
    writer, order = written()
    blocks = path_of(400)
    for block in blocks:
        add(writer, order, block)
        writer.leaves(block)
    entries = [*writer._queue, *writer._kept]  # noqa: SLF001
    assert len({id(entry) for *_, entry in entries if entry.sealed.pages}) == 3
    assert len(writer._queue) < 100  # noqa: SLF001
    assert writer.find(BlockFile("base", "t", "base-1")) is not None
    assert writer.find(BlockFile("base", "t", "base-9")) is None
    writer.forget_all()
    assert writer.num_bytes == writer.keeps() == 0
    writer.pool.run()
    assert order == []
