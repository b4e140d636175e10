"""Groups of a file's rows come whole and in order, from the disk or from the page cache, however they are read."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chorus.ops.cpu.native_reader import FileRows, ReadJobs
from chorus.ops.library.native_descriptors import Element, ReadJob

pytestmark = pytest.mark.native

WIDTH = 1000  # of a job's A, `[1, WIDTH]`; its B is `[1, 1]`
MOST_QUEUED = 64  # spans of a group; more are read in the plain way
STARTS = list(range(0, 400_000, 4 * WIDTH + 4))


@pytest.fixture(scope="module")
def content():
    return torch.randn(len(STARTS) * (WIDTH + 1), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def path(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "file"
    path.write_bytes(content.numpy().tobytes())
    return path


@pytest.fixture
def fd(path):
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def forget(fd):
    """Drop the file from the page cache."""
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def opened(fd, groups, joined=False):
    """groups: of numbers of the file's pairs of tensors, in any order. joined: whether a group is one span."""
    jobs, spans, places = [], [], []
    for numbers in groups:
        wanted = sorted({(STARTS[number], STARTS[number] + 4 * WIDTH + 4) for number in numbers})
        begin = len(spans), len(jobs)
        spans += [(wanted[0][0], wanted[-1][1])] if joined and wanted else wanted
        jobs += [
            ReadJob(
                STARTS[number],
                STARTS[number] + 4 * WIDTH,
                Element.F32,
                Element.F32,
                1,
                WIDTH,
                1,
                (len(jobs) + index) * (WIDTH + 1),
                WIDTH + 1,
                0,
                WIDTH,
            )
            for index, number in enumerate(numbers)
        ]
        places.append((begin[0], len(spans), begin[1], len(jobs)))
    table = ReadJobs(jobs, np.array(places), np.array(spans), len(jobs) * (WIDTH + 1))
    return FileRows(fd, table, torch.float32)


def test_every_group_is_read_wherever_its_spans_lie(fd, content):
    numbers = st.lists(st.integers(0, len(STARTS) - 1), max_size=9)
    many = st.just(list(range(len(STARTS)))[-MOST_QUEUED - 1 :])

    @given(st.lists(numbers | many, max_size=9), st.booleans(), st.booleans())
    def check(groups, cold, joined):
        if cold:
            forget(fd)
        rows = opened(fd, groups, joined)
        order = [number for numbers in groups for number in numbers]
        out = torch.full((len(order) * (WIDTH + 1),), 7.0)
        done = 0
        for numbers in groups:
            assert rows.next(out) is None
            done += len(numbers)
            assert torch.equal(out.view(-1, WIDTH + 1)[:done], content.view(-1, WIDTH + 1)[order[:done]])
            assert (out.view(-1, WIDTH + 1)[done:] == 7.0).all()
        with pytest.raises(ValueError, match="no group is left"):
            rows.next(out)

    check()


def test_a_file_of_which_a_part_is_cached(fd, content):
    forget(fd)
    os.preadv(fd, [bytearray(40_000)], 120_000)
    rows = opened(fd, [range(40), range(40, 99)], joined=True)
    out = torch.empty(99 * (WIDTH + 1))
    assert [rows.next(out), rows.next(out)] == [None, None]
    assert torch.equal(out, content[: len(out)])


def test_readers_that_are_left_early_leave_nothing_under_way(fd, content):
    for _ in range(20):
        forget(fd)
        left = opened(fd, [[number] for number in range(20)])
        left.next(torch.empty(20 * (WIDTH + 1)))
        left.close()
        left.close()
        with pytest.raises(ValueError, match="no group is left"):
            left.next(torch.empty(20 * (WIDTH + 1)))
        rows = opened(fd, [[30, 31]])
        out = torch.empty(2 * (WIDTH + 1))
        assert rows.next(out) is None
        assert torch.equal(out, content[30 * (WIDTH + 1) : 32 * (WIDTH + 1)])


def test_two_files_read_in_turn_do_not_meet(fd, path, content):
    forget(fd)
    with path.open("rb") as other:
        readers = opened(fd, [[1], [2], [3]]), opened(other.fileno(), [[4], [5], [6]])
        outs = [torch.empty(3 * (WIDTH + 1)) for _ in readers]
        for _ in range(3):
            assert [rows.next(out) for rows, out in zip(readers, outs, strict=True)] == [None, None]
    assert torch.equal(torch.cat(outs), content[WIDTH + 1 : 7 * (WIDTH + 1)])


def test_bytes_of_the_group_that_was_read_last(fd, content):
    rows = opened(fd, [[0, 1], [50]])
    with pytest.raises(LookupError):
        rows.bytes(0, 10)
    out = torch.empty(3 * (WIDTH + 1))
    rows.next(out)
    assert rows.bytes(3, 2000) == content.numpy().tobytes()[3:2000]
    with pytest.raises(LookupError, match="bytes 0 to 9000 "):
        rows.bytes(0, 9000)
    rows.next(out)
    with pytest.raises(LookupError):
        rows.bytes(3, 2000)


def test_a_group_that_fails_is_passed(tmp_path, content):
    file = tmp_path / "cut"
    file.write_bytes(content.numpy().tobytes()[: STARTS[50]])
    with file.open("rb") as cut:
        rows = opened(cut.fileno(), [[49, 50], [90], [3]])
        out = torch.empty(4 * (WIDTH + 1))
        assert [fault and (fault.kind, fault.job) for fault in (rows.next(out) for _ in range(3))] == [
            ("ends", 0),
            ("ends", 2),
            None,
        ]
    assert torch.equal(out[-WIDTH - 1 :], content[3 * (WIDTH + 1) : 4 * (WIDTH + 1)])


def test_what_cannot_be_read_is_told(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)  # a directory
    fault = opened(fd, [[0]]).next(torch.empty(WIDTH + 1))
    assert fault.kind == "unreadable"
    os.close(fd)


def test_a_job_outside_its_groups_spans_is_not_read(fd):
    job = ReadJob(STARTS[60], STARTS[60] + 4 * WIDTH, 0, 0, 1, WIDTH, 1, 0, WIDTH + 1, 0, WIDTH)
    jobs = ReadJobs([job], np.array([[0, 1, 0, 1]]), np.array([[0, 99]]), WIDTH + 1)
    rows = FileRows(fd, jobs, torch.float32)
    out = torch.full((WIDTH + 1,), 7.0)
    assert rows.next(out).kind == "ends"
    assert (out == 7.0).all()


@pytest.mark.parametrize(
    "groups, spans, what",
    [
        ([[0, 2, 0, 1]], [[0, 99]], "spans"),
        ([[0, 1, 0, 2]], [[0, 99]], "jobs"),
        ([[0, 1, 1, 0]], [[0, 99]], "jobs"),
        ([[-1, 1, 0, 1]], [[0, 99]], "spans"),
        ([[0, 1, 0, 1]], [[99, 98]], "before it begins"),
        ([[0, 1, 0, 1]], [[-1, 98]], "before it begins"),
    ],
)
def test_groups_that_make_no_sense_are_refused(groups, spans, what):
    with pytest.raises(ValueError, match=what):
        ReadJobs([ReadJob(0, 0, 0, 0, 1, 1, 1, 0, 2, 0, 1)], np.array(groups), np.array(spans), 2)


def test_groups_after_one_that_fails_are_whole(tmp_path, content):
    file = tmp_path / "cut"
    data = content.numpy().tobytes()
    file.write_bytes(data[: STARTS[90]])
    order = [[*range(0, 60, 2), 95], *([number] for number in range(1, 60, 2))]
    with file.open("rb") as cut:
        for _ in range(5):
            forget(cut.fileno())
            rows = opened(cut.fileno(), order)
            out = torch.empty(sum(map(len, order)) * (WIDTH + 1))
            assert [fault and fault.kind for fault in (rows.next(out) for _ in order)] == ["ends", *[None] * 30]
            assert torch.equal(out.view(-1, WIDTH + 1)[31:], content.view(-1, WIDTH + 1)[1:60:2])
