"""A thread that mostly waits for a disk gets its core as soon as the bytes are there."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SLICE_NS = 100_000


def ask_for_short_slices() -> bool:
    """Ask Linux to run the calling thread often and briefly, at no higher priority; whether it agreed.

    Threads that compute keep a core for their whole slice of some milliseconds; one with a shorter slice that has
    waited may interrupt them (EEVDF, Linux 6.12). Elsewhere nothing changes.
    """
    number = _SYS_SCHED_SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    size, other, nice = 48, os.SCHED_OTHER, os.getpriority(os.PRIO_PROCESS, 0)
    attributes = struct.pack("=IIQiIQQQ", size, other, 0, nice, 0, _SLICE_NS, 0, 0)
    return ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0
