from __future__ import annotations

import ctypes
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.memory import file_spans
from chorus.memory.file_spans import FileSpans

SIZE = 300_000


@pytest.fixture(scope="module")
def content():
    return os.urandom(SIZE)


@pytest.fixture(scope="module")
def path(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("spans") / "file"
    path.write_bytes(content)
    return path


@pytest.fixture(params=["queued", "direct", "plain"])
def fd(path, request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(file_spans, "_open_direct", lambda fd: None)
    if request.param == "direct":
        monkeypatch.setattr(file_spans, "_queue", lambda: None)
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def forget(fd):
    """Drop the file from the page cache, where that can be asked for."""
    if hasattr(os, "posix_fadvise"):
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


spans_of_a_file = st.lists(
    st.tuples(st.integers(0, SIZE - 1), st.integers(1, 100_000)).map(lambda it: (it[0], min(SIZE, sum(it)))),
    min_size=1,
    max_size=6,
)


def test_every_span_is_read_wherever_it_lies(fd, content):
    @given(st.lists(spans_of_a_file, max_size=9), st.booleans())
    def check(groups, cold):
        if cold:
            forget(fd)
        with FileSpans(fd) as reader:
            for spans, address in zip(groups, reader.read(groups), strict=True):
                for start, end in spans:
                    assert ctypes.string_at(address(start), end - start) == content[start:end]

    check()


def test_one_read_follows_another(fd, content):
    with FileSpans(fd) as reader:
        for start in (0, 250_000, 5):
            (address,) = reader.read([[(start, start + 1000)]])
            assert ctypes.string_at(address(start), 1000) == content[start : start + 1000]


def test_a_span_beyond_the_files_end_is_told(fd):
    with FileSpans(fd) as reader:
        beyond = [[(0, 10), (SIZE - 10, SIZE + 1)], [(SIZE + 100_000, SIZE + 100_001)], [(0, 10)]]
        assert [address is None for address in reader.read(beyond)] == [True, True, False]


def test_what_cannot_be_read_is_told(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)  # a directory
    with FileSpans(fd) as reader:
        assert list(reader.read([[(0, 10)]])) == [None]
    os.close(fd)


def test_only_what_was_read_has_an_address(fd):
    with FileSpans(fd) as reader:
        (address,) = reader.read([[(0, 10)]])
        with pytest.raises(KeyError):
            address(250_000)


def test_a_reader_that_is_left_early_leaves_nothing_under_way(fd, content):
    forget(fd)
    groups = [[(start, start + 30_000)] for start in range(0, 270_000, 30_000)]
    with FileSpans(fd) as reader:
        next(found := reader.read(groups))
        found.close()
        (address,) = reader.read([[(7, 1000)]])
        assert ctypes.string_at(address(7), 993) == content[7:1000]
