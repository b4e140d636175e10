"""Adapter tensors from a file into slabs by the native library, in the model's element type.

Needs what the native decoder needs. Bit for bit what `Tensor.to(dtype)` and a transpose give, the file read once.
"""

from __future__ import annotations

import ctypes
import errno
import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch

from . import native

#: A safetensors element type's number in the library; the model's dtypes have the same ones.
ELEMENTS = {"F32": 0, "F16": 1, "BF16": 2}
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

_ENDS, _UNREADABLE, _NOT_FINITE, _BEYOND_RANGE = 1, 2, 3, 4


class ReadJob(NamedTuple):
    """One module of one layer: A `[rank, d_in]` and B `[d_out, rank]` of the file, to rows of the output.

    a_start, b_start: bytes from the file's beginning, addresses when there is no file; a_element, b_element: of
    `ELEMENTS`. Row i of A is written at
    element `first + i · slab_elems + a_offset`, row i of Bᵀ at `first + i · slab_elems + b_offset`.
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
    """Jobs as the library takes them, checked once for an output of `out_elems` elements. ValueError for a bad one."""

    __slots__ = ("_values", "count", "out_elems")

    def __init__(self, jobs: Iterable[ReadJob], out_elems: int) -> None:
        jobs = list(jobs)
        for index, job in enumerate(jobs):
            _check(index, job, out_elems)
        self._values = array("q", chain.from_iterable(jobs))
        self.count = len(jobs)
        self.out_elems = out_elems

    @property
    def address(self) -> int:
        return self._values.buffer_info()[0]


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
    out: contiguous, of `jobs.out_elems` elements. What lies between
    the rows is not written; a failed job's rows are left in any state.
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


def _check(index: int, job: ReadJob, out_elems: int) -> None:
    """The library trusts its jobs; a wrong one must not reach it."""
    if min(job) < 0 or min(job.rank, job.d_in, job.d_out) < 1 or max(job.a_element, job.b_element) > 2:
        raise ValueError(f"job {index} has a negative number, an empty tensor or an unknown element type: {job}")
    last = job.first + (job.rank - 1) * job.slab_elems
    end = last + max(job.a_offset + job.d_in, job.b_offset + job.d_out)
    if end > out_elems:
        raise ValueError(f"job {index} writes up to element {end} of an output of {out_elems}: {job}")
