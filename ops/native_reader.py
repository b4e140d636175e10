"""Adapter tensors from a file into slabs by the native library, in the model's element type.

Needs what the native decoder needs. Bit for bit what `Tensor.to(dtype)` and a transpose give, the file read once.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from . import native

#: A safetensors element type's number in the library; the model's dtypes have the same ones.
ELEMENTS = {"F32": 0, "F16": 1, "BF16": 2}
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

_ENDS, _UNREADABLE, _NOT_FINITE, _BEYOND_RANGE = 1, 2, 3, 4


class ReadJob(NamedTuple):
    """One module of one layer: A `[rank, d_in]` and B `[d_out, rank]` of the file, to rows of the output.

    a_start, b_start: bytes from the file's beginning, addresses when there is no file; a_element, b_element: of
    `ELEMENTS`. Row i of A is written at element `first + i · slab_elems + a_offset`, row i of Bᵀ at
    `first + i · slab_elems + b_offset`.
    """

    a_start: int
    b_start: int
    a_element: int
    b_element: int
    rank: int
    d_in: int
    d_out: int
    first: int
    slab_elems: int
    a_offset: int
    b_offset: int


class ReadJobs:
    """Jobs as the library takes them, checked for an output of `out_elems` elements. ValueError for a bad one."""

    __slots__ = ("_table", "count", "out_elems")

    def __init__(self, jobs: Sequence[ReadJob] | np.ndarray, out_elems: int) -> None:
        """jobs: or `[jobs, 11]` int64, `ReadJob`'s fields in order."""
        self._table = np.ascontiguousarray(jobs, dtype=np.int64).reshape(-1, len(ReadJob._fields))
        self.count = len(self._table)
        self.out_elems = out_elems
        _check(self._table, out_elems)

    @property
    def address(self) -> int:
        return self._table.ctypes.data


@dataclass(frozen=True, slots=True)
class ReadFault:
    """Why a job was not read: `kind` is "ends", "unreadable", "not finite" or "beyond range".

    The file ends before the tensor does; it can't be read (`error`: errno); the tensor holds NaN or infinity; it holds
    a value that is infinite in the output's dtype. side: "A" or "B".
    """

    job: int
    side: str
    kind: str
    error: int = 0

    def __str__(self) -> str:
        why = {
            "ends": "the file ends before it does",
            "unreadable": f"cannot be read: {os.strerror(self.error)}",
            "not finite": "holds NaN or infinity",
            "beyond range": "holds a value beyond the range of the dtype asked for",
        }[self.kind]
        return f"{self.side} of job {self.job}: {why}"


class _Fault(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("fault", "job", "side", "error")]


def available(dtype: torch.dtype) -> bool:
    """Whether the library was built, this processor can run it, and it writes `dtype`."""
    return dtype in _DTYPES and native.available(torch.float32)


def read_layer(fd: int, jobs: ReadJobs, out: torch.Tensor) -> ReadFault | None:
    """Do `jobs` one after another on the calling thread; other Python threads run meanwhile.

    Returns the fault of the first that fails; None when all are done.

    fd: a file that allows `pread`, its position stays; -1: what is to be read lies in memory.
    out: contiguous, of `jobs.out_elems` elements. What lies between the rows is not written; a failed job's rows are
    left in any state.
    """
    if out.numel() != jobs.out_elems or not out.is_contiguous() or out.dtype not in _DTYPES:
        raise ValueError(
            f"out is {tuple(out.shape)} in {out.dtype}; {jobs.out_elems} contiguous elements in float32, float16 or "
            "bfloat16 are needed"
        )
    fault = _Fault()
    library = native.library()
    if library is None:
        raise OSError(errno.ENOSYS, "the native library is not there; ask available() first")
    if library.chorus_read_rows(
        fd, jobs.address, jobs.count, _DTYPES[out.dtype], out.data_ptr(), ctypes.addressof(fault)
    ):
        return None
    kind = {_ENDS: "ends", _UNREADABLE: "unreadable", _NOT_FINITE: "not finite", _BEYOND_RANGE: "beyond range"}
    return ReadFault(fault.job, "AB"[fault.side], kind[fault.fault], fault.error)


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
