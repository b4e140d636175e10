"""Reads adapter tensors from a file into slabs with the native library, in the model's dtype.

It needs the same things as the native decoder. The result equals `Tensor.to(dtype)` and a transpose bit for bit; the
file is read once.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..library import native_library
from ..library.native_descriptors import ELEMENT_OF, ReadJob
from ..library.native_layout import layout_of

_FAULTS = {1: "ends", 2: "unreadable", 3: "not finite", 4: "beyond range"}


class ReadJobs:
    """Jobs in the library's form, checked for an output of `out_elems` elements. Raises ValueError for a bad one."""

    __slots__ = ("_groups", "_spans", "_table", "addresses", "num_groups", "out_elems")

    def __init__(
        self, jobs: Sequence[ReadJob] | np.ndarray, groups: np.ndarray, spans: np.ndarray, out_elems: int
    ) -> None:
        """jobs: `ReadJob`s, or `[jobs, 11]` int64 with their fields in order. They are read in groups.

        groups: `[groups, 4]` int64, the range of each group's spans, then the range of its jobs.
        spans: `[spans, 2]` int64, the byte ranges of the file that are needed.
        """
        self._table, self._groups, self._spans = (
            np.ascontiguousarray(rows, dtype=np.int64).reshape(-1, columns)
            for rows, columns in ((jobs, len(ReadJob._fields)), (groups, 4), (spans, 2))
        )
        self.addresses = tuple(array.ctypes.data for array in (self._spans, self._groups, self._table))
        self.num_groups = len(self._groups)
        self.out_elems = out_elems
        _check(self._table, out_elems)
        _check_groups(self._groups, self._spans, len(self._table))


@dataclass(frozen=True, slots=True)
class ReadFault:
    """The fault of a job that was not read."""

    job: int
    side: str
    """"A" or "B"."""
    kind: str
    """"ends": the file ends before the tensor does. "unreadable": the file can't be read. "not finite": the tensor
    holds NaN or infinity. "beyond range": it holds a value that is infinite in the output's dtype.
    """
    error: int = 0
    """The errno of an unreadable file."""


def available(dtype: torch.dtype) -> bool:
    """True if the library was built, this processor can run it, and it writes `dtype`."""
    return dtype in ELEMENT_OF and native_library.available(torch.float32)


class FileRows:
    """Reads a file's jobs group by group, in order, bypassing the system's page cache. Not thread-safe.

    Reading the first group starts at once, and later groups are read while earlier ones are laid out; other Python
    threads run meanwhile. Raises OSError if the library is missing: check `available` first.
    """

    __slots__ = ("_dtype", "_handle", "_jobs", "_left", "_library")

    def __init__(self, fd: int, jobs: ReadJobs, dtype: torch.dtype) -> None:
        """fd: open, of a regular file; the caller closes it. dtype: of the output."""
        self._handle = None
        found = native_library.library()
        if found is None:
            raise OSError(errno.ENOSYS, "the native library is missing")
        self._library = found
        self._jobs, self._dtype, self._left = jobs, dtype, jobs.num_groups
        spans, groups, table = jobs.addresses
        self._handle = self._library.chorus_rows_open(fd, spans, groups, jobs.num_groups, table, ELEMENT_OF[dtype])

    def next(self, out: torch.Tensor) -> ReadFault | None:
        """Lay out the next group's jobs in `out`, contiguous, with `jobs.out_elems` elements; return None if all
        succeed.

        Otherwise return the fault of the first job that failed; the next call continues with the following group. Gaps
        between the rows are not written, and a failed job's rows are undefined. Raises ValueError for a wrong `out`, or
        if no group is left.
        """
        if out.numel() != self._jobs.out_elems or not out.is_contiguous() or out.dtype != self._dtype:
            raise ValueError(
                f"out is {tuple(out.shape)} in {out.dtype}; {self._jobs.out_elems} contiguous elements in "
                f"{self._dtype} are needed"
            )
        if self._handle is None or not self._left:
            raise ValueError("no group is left to read")
        self._left -= 1
        fault = layout_of(self._library).filled("ReadFault")
        if self._library.chorus_rows_next(self._handle, out.data_ptr(), ctypes.addressof(fault)):
            return None
        return ReadFault(fault.job, "AB"[fault.side], _FAULTS[fault.fault], fault.error)

    def bytes(self, start: int, end: int) -> memoryview:
        """The file's bytes `start` … `end` of the group read last, valid until `close`, or until `next` has been called
        twice more. Raises LookupError if the group does not contain them.
        """
        at = self._library.chorus_rows_at(self._handle, start, end - start) if self._handle else None
        if at is None:
            raise LookupError(f"bytes {start} to {end} are not in the group read last")
        return memoryview((ctypes.c_char * (end - start)).from_address(at)).cast("B")

    def close(self) -> None:
        """Wait for reads in flight and drop them. A second call does nothing."""
        if self._handle is not None:
            self._library.chorus_rows_close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()


def _check(table: np.ndarray, out_elems: int) -> None:
    """Check the jobs: the library trusts them, so a wrong one must not reach it."""
    _, _, a_element, b_element, rank, d_in, d_out, first, slab_elems, a_offset, b_offset = table.T
    ends = first + (rank - 1) * slab_elems + np.maximum(a_offset + d_in, b_offset + d_out)
    odd = (table.min(axis=1, initial=0) < 0) | (table[:, 4:6].min(axis=1) < 1) | (np.maximum(a_element, b_element) > 2)
    for index in np.flatnonzero(odd | (ends > out_elems)):
        job = ReadJob(*table[index].tolist())
        if odd[index]:
            raise ValueError(f"job {index} has a negative number, an empty tensor or an unknown element type: {job}")
        raise ValueError(f"job {index} writes up to element {ends[index]} of an output of {out_elems}: {job}")


def _check_groups(groups: np.ndarray, spans: np.ndarray, num_jobs: int) -> None:
    """Check the groups, which the library trusts, too."""
    for name, pairs, most in (("spans", groups[:, :2], len(spans)), ("jobs", groups[:, 2:], num_jobs)):
        if (pairs < 0).any() or (pairs[:, 0] > pairs[:, 1]).any() or (pairs > most).any():
            raise ValueError(f"a group's {name} are not all among the {most} given")
    if (spans < 0).any() or (spans[:, 0] > spans[:, 1]).any():
        raise ValueError("a span ends before it begins")
