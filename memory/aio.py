"""Several reads of a file under way at once, without a thread for each (Linux AIO)."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from contextlib import suppress

#: io_setup, io_submit, io_getevents, io_destroy
_CALLS = {"x86_64": (206, 209, 208, 207), "aarch64": (0, 2, 4, 1)}
_PREAD = 0


class _Control(ctypes.Structure):  # struct iocb of linux/aio_abi.h, little-endian
    _fields_ = [
        ("data", ctypes.c_uint64), ("key", ctypes.c_uint32), ("rw_flags", ctypes.c_int32),
        ("opcode", ctypes.c_uint16), ("priority", ctypes.c_int16), ("fd", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64), ("num_bytes", ctypes.c_uint64), ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("event_fd", ctypes.c_uint32),
    ]  # fmt: skip


class _Event(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_uint64), ("control", ctypes.c_uint64), ("result", ctypes.c_int64), ("more", ctypes.c_int64),
    ]  # fmt: skip


class AsyncReads:
    """A queue of reads for one thread. OSError where the system has none."""

    def __init__(self, depth: int) -> None:
        """depth: most reads under way at once."""
        calls = _CALLS.get(platform.machine()) if platform.system() == "Linux" else None
        if calls is None:
            raise OSError("no asynchronous reads on this system")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._setup, self._submit, self._getevents, self._destroy = calls
        self._depth = depth
        self._context = ctypes.c_ulong(0)
        self._events = (_Event * depth)()
        self._controls: dict[int, _Control] = {}
        self._call(self._setup, ctypes.c_uint(depth), ctypes.byref(self._context))

    @property
    def room(self) -> int:
        """How many more reads may be begun."""
        return self._depth - len(self._controls)

    def begin(self, fd: int, reads: Sequence[tuple[int, int, int, int]]) -> None:
        """Begin (key, address, bytes, offset) reads. The memory must stay until each key has come from `wait`."""
        controls = [
            _Control(data=key, opcode=_PREAD, fd=fd, buffer=address, num_bytes=count, offset=offset)
            for key, address, count, offset in reads
        ]
        pointers = (ctypes.POINTER(_Control) * len(controls))(*map(ctypes.pointer, controls))
        begun = self._call(self._submit, self._context, ctypes.c_long(len(controls)), pointers)
        self._controls |= {control.data: control for control in controls[:begun]}
        if begun < len(controls):
            raise OSError(f"only {begun} of {len(controls)} reads could be begun")

    def wait(self) -> list[tuple[int, int]]:
        """Sleep until one is done; (key, bytes read or -errno) of those that are."""
        while True:
            with suppress(InterruptedError):
                count = self._call(
                    self._getevents, self._context, ctypes.c_long(1), ctypes.c_long(self._depth), self._events, None
                )
                break
        done = [(event.data, event.result) for event in self._events[:count]]
        for key, _ in done:
            del self._controls[key]
        return done

    def drain(self) -> None:
        """Sleep until nothing is under way."""
        while self._controls:
            self.wait()

    def close(self) -> None:
        """Wait for what is under way and give the queue back. Nothing happens the second time."""
        if self._context:
            self.drain()
            self._call(self._destroy, self._context)
            self._context = ctypes.c_ulong(0)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            self.close()

    def _call(self, *args: object) -> int:
        result = self._libc.syscall(*args)
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result
