"""Adapter tensors from a file into slabs by the native library, in the model's element type.

Needs what the native decoder needs. Bit for bit what `Tensor.to(dtype)` and a transpose give, the file read once.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from . import native_library
from .native_descriptors import ELEMENT_OF, READ_GROUP, READ_JOB, SPAN, ReadFaultDescriptor, ReadJob

_FAULTS = {1: "ends", 2: "unreadable", 3: "not finite", 4: "beyond range"}


class ReadJobs:
    """Jobs as the library takes them, checked for an output of `out_elems` elements. ValueError for a bad one."""

    __slots__ = ("_groups", "_spans", "_table", "addresses", "num_groups", "out_elems")

    def __init__(
        self, jobs: Sequence[ReadJob] | np.ndarray, groups: np.ndarray, spans: np.ndarray, out_elems: int
    ) -> None:
        """jobs: or `[jobs, 11]` int64, `ReadJob`'s fields in order. They are read in groups.

        groups: `[groups, 4]` int64, as `READ_GROUP`: for each where its spans begin and end, then its jobs. spans:
        `[spans, 2]` int64, as `SPAN`: from which byte of the file to which, as far as anything is wanted of it.
        """
        self._table, self._groups, self._spans = (
            np.ascontiguousarray(rows, dtype=np.int64).reshape(-1, len(record.names or ()))
            for rows, record in ((jobs, READ_JOB), (groups, READ_GROUP), (spans, SPAN))
        )
        self.addresses = tuple(array.ctypes.data for array in (self._spans, self._groups, self._table))
        self.num_groups = len(self._groups)
        self.out_elems = out_elems
        _check(self._table, out_elems)
        _check_groups(self._groups, self._spans, len(self._table))


@dataclass(frozen=True, slots=True)
class ReadFault:
    """Fault of a job that was not read: `kind` is "ends", "unreadable", "not finite" or "beyond range".

    The file ends before the tensor does; it can't be read (`error`: errno); the tensor holds NaN or infinity; it holds
    a value that is infinite in the output's dtype. side: "A" or "B".
    """

    job: int
    side: str
    kind: str
    error: int = 0


def available(dtype: torch.dtype) -> bool:
    """True if the library was built, this processor can run it, and it writes `dtype`."""
    return dtype in ELEMENT_OF and native_library.available(torch.float32)


class FileRows:
    """Reads a file's jobs group by group, in order, past the system's page cache. For one thread at a time.

    The first group is on its way from the beginning, the next ones while their predecessors are laid out; other Python
    threads run meanwhile. OSError when the library is not there: ask `available` first.
    """

    __slots__ = ("_dtype", "_handle", "_jobs", "_left", "_library")

    def __init__(self, fd: int, jobs: ReadJobs, dtype: torch.dtype) -> None:
        """fd: open and of a regular file; stays the caller's. dtype: of the output."""
        self._handle = None
        found = native_library.library()
        if found is None:
            raise OSError(errno.ENOSYS, "the native library is not there")
        self._library = found
        self._jobs, self._dtype, self._left = jobs, dtype, jobs.num_groups
        spans, groups, table = jobs.addresses
        self._handle = self._library.chorus_rows_open(fd, spans, groups, jobs.num_groups, table, ELEMENT_OF[dtype])

    def next(self, out: torch.Tensor) -> ReadFault | None:
        """Lay out the next group's jobs in `out`, contiguous, of `jobs.out_elems` elements. None when all are done.

        Else the fault of the first that failed; the group after it comes next all the same. What lies between the rows
        is not written, a failed job's rows are left in any state. ValueError for another `out`, or when none is left.
        """
        if out.numel() != self._jobs.out_elems or not out.is_contiguous() or out.dtype != self._dtype:
            raise ValueError(
                f"out is {tuple(out.shape)} in {out.dtype}; {self._jobs.out_elems} contiguous elements in "
                f"{self._dtype} are needed"
            )
        if self._handle is None or not self._left:
            raise ValueError("no group is left to read")
        self._left -= 1
        fault = ReadFaultDescriptor()
        if self._library.chorus_rows_next(self._handle, out.data_ptr(), ctypes.addressof(fault)):
            return None
        return ReadFault(fault.job, "AB"[fault.side], _FAULTS[fault.fault], fault.error)

    def bytes(self, start: int, end: int) -> bytes:
        """A copy of the file's bytes `start` … `end`, of the group that was read last. LookupError if they weren't."""
        at = self._library.chorus_rows_at(self._handle, start, end - start) if self._handle else None
        if at is None:
            raise LookupError(f"bytes {start} to {end} are not in the group read last")
        return ctypes.string_at(at, end - start)

    def close(self) -> None:
        """Wait for what is under way and forget it. Nothing happens the second time."""
        if self._handle is not None:
            self._library.chorus_rows_close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()


def _check(table: np.ndarray, out_elems: int) -> None:
    """The library trusts its jobs; a wrong one must not reach it."""
    _, _, a_element, b_element, rank, d_in, d_out, first, slab_elems, a_offset, b_offset = table.T
    ends = first + (rank - 1) * slab_elems + np.maximum(a_offset + d_in, b_offset + d_out)
    odd = (table.min(axis=1, initial=0) < 0) | (table[:, 4:7].min(axis=1) < 1) | (np.maximum(a_element, b_element) > 2)
    for index in np.flatnonzero(odd | (ends > out_elems)):
        job = ReadJob(*table[index].tolist())
        if odd[index]:
            raise ValueError(f"job {index} has a negative number, an empty tensor or an unknown element type: {job}")
        raise ValueError(f"job {index} writes up to element {ends[index]} of an output of {out_elems}: {job}")


def _check_groups(groups: np.ndarray, spans: np.ndarray, num_jobs: int) -> None:
    """The library trusts these too."""
    for name, pairs, most in (("spans", groups[:, :2], len(spans)), ("jobs", groups[:, 2:], num_jobs)):
        if (pairs < 0).any() or (pairs[:, 0] > pairs[:, 1]).any() or (pairs > most).any():
            raise ValueError(f"a group's {name} are not among the {most} there are")
    if (spans < 0).any() or (spans[:, 0] > spans[:, 1]).any():
        raise ValueError("a span ends before it begins")
