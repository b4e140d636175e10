from __future__ import annotations

import ctypes
import mmap
import os
import platform

import pytest

from chorus.memory.aio import AsyncReads

CONTENT = os.urandom(100_000)


@pytest.fixture
def queue():
    try:
        queue = AsyncReads(8)
    except OSError:
        pytest.skip("this system has no asynchronous reads")
    yield queue
    queue.close()


@pytest.fixture
def fd(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


class Target:
    def __init__(self, size):
        self._memory = mmap.mmap(-1, size)
        self._array = (ctypes.c_char * size).from_buffer(self._memory)
        self.address = ctypes.addressof(self._array)

    def bytes(self, count):
        return ctypes.string_at(self.address, count)


def test_reads_under_way_at_once_come_one_by_one(queue, fd):
    targets = {key: Target(8192) for key in range(5)}
    queue.begin(fd, [(key, target.address, 5000, key * 10_000) for key, target in targets.items()])
    assert queue.room == 3
    done = {}
    while len(done) < 5:
        done |= dict(queue.wait())
    assert done == dict.fromkeys(range(5), 5000)
    assert queue.room == 8
    for key, target in targets.items():
        assert target.bytes(5000) == CONTENT[key * 10_000 :][:5000]


def test_the_files_end_and_failures_are_told(queue, fd, tmp_path):
    target = Target(8192)
    queue.begin(fd, [(1, target.address, 8000, 95_000)])
    assert queue.wait() == [(1, 5000)]
    closed = os.open(tmp_path / "file", os.O_WRONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        queue.begin(closed, [(2, target.address, 8000, 0)])
    os.close(closed)
    assert queue.room == 8


def test_draining_waits_for_all(queue, fd):
    target = Target(50_000)
    queue.begin(fd, [(key, target.address + key * 10_000, 10_000, key * 10_000) for key in range(5)])
    queue.drain()
    assert queue.room == 8
    assert target.bytes(50_000) == CONTENT[:50_000]


def test_other_systems_are_told(monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(OSError, match="no asynchronous reads"):
        AsyncReads(8)
