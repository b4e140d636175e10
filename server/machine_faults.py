"""Faults of the machine in one line each: no memory, a full disk, a place that can't be written, too many open files.

Libraries report them in many forms: `OSError`, `MemoryError`, or another error whose text quotes the system's message.
Such an error says nothing about the model or adapter that was being read, so advice about those would be untrue.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

_TEXTS = {
    errno.ENOMEM: (
        "Cannot allocate memory",
        "can't allocate memory",
        "not enough memory",
        "unable to mmap",
        "failed to map segment",
    ),
    errno.ENOSPC: ("No space left on device", "os error 28)"),
    errno.EDQUOT: ("Disk quota exceeded", "os error 122)"),
    errno.EFBIG: ("File too large", "os error 27)"),
    errno.EROFS: ("Read-only file system", "os error 30)"),
    errno.EMFILE: ("Too many open files", "os error 24)"),
}
"""How errors of libraries quote the system's: Python, PyTorch, the dynamic linker, and Rust."""

_DENIED = (errno.EACCES, errno.EPERM)
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def reason_of(error: BaseException, path: Path | None = None) -> str:
    """The reason of an error for the operator: the machine's fault if it is one, else the error's own text."""
    return fault_of(error, path) or str(error) or type(error).__name__


def fault_of(error: BaseException, path: Path | None = None) -> str | None:
    """Cause, numbers and fix if an error, or one that caused it, is the machine's fault; else None.

    path: the file or directory that was being written; by default, the one that the error names.
    """
    for one in _chain(error):
        number = _number(one)
        if number is not None:
            named = one.filename if isinstance(one, OSError) else None
            if path is None and isinstance(named, str | bytes):
                path = Path(os.fsdecode(named))
            return _said(number, path, str(one))
    return None


def size_text(num_bytes: int) -> str:
    """A size in words, such as 1.5 GiB."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} bytes"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__


def _number(error: BaseException) -> int | None:
    """The system's number of a fault of the machine."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in (*_TEXTS, *_DENIED) else None
    text = str(error)
    return next((number for number, quotes in _TEXTS.items() if any(quote in text for quote in quotes)), None)


def _said(number: int, path: Path | None, text: str) -> str:
    if number == errno.ENOMEM:
        return _no_memory(text)
    if number == errno.EMFILE:
        return f"too many open files: this process may have {_soft(resource.RLIMIT_NOFILE)}; raise ulimit -n"
    where = "its directory" if path is None else str(path)
    if number == errno.EROFS:
        return f"{where} can't be written: its file system is read-only; name a directory that can be written"
    if number in _DENIED:
        return f"{where}: permission denied to user {os.geteuid()}; change its permissions, or name another place"
    if number == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        limit = "its file system" if most == resource.RLIM_INFINITY else f"ulimit -f, {size_text(most)},"
        return (
            f"{where} can't be written: the file is larger than {limit} allows; raise the limit, or name another disk"
        )
    if number == errno.EDQUOT:
        quota = f"the disk quota of user {os.geteuid()} is used up"
        return f"{where} can't be written: {quota}; free some space, or name a directory on another disk"
    return (
        f"{where} can't be written: the disk is full{_free(path)}; free some space, or name a directory on another disk"
    )


def _no_memory(text: str) -> str:
    from ..core.executors.host_memory import available_bytes  # only here, because few errors need it

    numbers = f"the machine has {size_text(available_bytes())} available"
    if (most := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        numbers += f", and ulimit -v lets this process have {size_text(most)}"
    told = f" ({text})" if text else ""
    return (
        f"out of memory{told}: {numbers}; lower --memory-bytes and --host-cache-bytes, quantise the weights "
        "(--quantization int4), or choose a smaller model"
    )


def _free(path: Path | None) -> str:
    """The space of a path's disk in words; empty if it can't be found out."""
    place = Path.cwd() if path is None else path.absolute()
    for directory in (place, *place.parents):
        try:
            usage = shutil.disk_usage(directory)
        except OSError:
            continue
        return f": {size_text(usage.free)} of {size_text(usage.total)} are free at {directory}"
    return ""


def _soft(limit: int) -> str:
    soft = resource.getrlimit(limit)[0]
    return "no more" if soft == resource.RLIM_INFINITY else str(soft)
