"""A disk that fails: the kernel answers reads of chosen files with EIO, as it does when a device is gone.

Linux' seccomp hands the `pread` and `preadv` calls of a process to whoever holds the filter's descriptor, who lets them
go on or has them fail; reads that the system would do by itself, it does not know. Run as a process, this is `chorus`,
whose reads are handed to the test that started it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import select
import socket
import struct
import sys
import threading

_SECCOMP, _IO_SETUP, *_READS = {"x86_64": (317, 206, 17, 295, 327), "aarch64": (277, 0, 67, 69, 286)}[
    platform.machine()
]
"""System calls by number: seccomp; io_setup, which does reads outside of the process; pread64, preadv, preadv2."""

_NO_NEW_PRIVILEGES, _SET_FILTER, _NEW_LISTENER = 38, 1, 8
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ASK, _UNKNOWN = 0x7FFF0000, 0x7FC00000, 0x00050000 | errno.ENOSYS
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_ASKED = struct.Struct("=QII iIQ 6Q")
"""An intercepted call: its id, the process, flags; its number, architecture, address and arguments."""
_ANSWER = struct.Struct("=QqiI")
_GO_ON = 1


def hand_over_reads() -> int:
    """Intercept this process's reads from now on; returns the descriptor that receives them."""
    answers = [(number, _ASK) for number in _READS] + [(_IO_SETUP, _UNKNOWN)]
    steps = [(_LOAD, 0, 0, 0)]
    for number, answer in answers:
        steps += [(_JUMP_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]
    program = b"".join(struct.pack("=HBBI", *step) for step in [*steps, (_RETURN, 0, 0, _ALLOW)])
    text = ctypes.create_string_buffer(program, len(program))
    filter = struct.pack("@HP", len(program) // 8, ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        or (fd := libc.syscall(_SECCOMP, _SET_FILTER, _NEW_LISTENER, filter)) < 0
    ):
        raise OSError(ctypes.get_errno(), "no filter of system calls can be set")
    return fd


def _has_ended(listener: int) -> bool:
    """True if no process is left whose calls are intercepted."""
    poll = select.poll()
    poll.register(listener, 0)  # a hang-up is told all the same
    return bool(poll.poll(0))


class FailingDisk:
    """Answers the reads of a process that was started with `chorus`: those below `directory` fail while `fails`."""

    def __init__(self, directory: os.PathLike[str]) -> None:
        self.fails = False
        self.num_failed = 0
        self._below = f"{os.path.realpath(directory)}/"
        self._socket, self.theirs = socket.socketpair()
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        _, (listener, *_), *_ = socket.recv_fds(self._socket, 1, 1)
        asked = bytearray(_ASKED.size)
        while True:
            asked[:] = bytes(_ASKED.size)
            try:
                fcntl.ioctl(listener, _RECEIVE, asked)
                id, pid, _, _, _, _, file, *_ = _ASKED.unpack(asked)
                fails = self.fails and os.readlink(f"/proc/{pid}/fd/{file}").startswith(self._below)
                self.num_failed += fails
                answer = (id, 0, -errno.EIO, 0) if fails else (id, 0, 0, _GO_ON)
                fcntl.ioctl(listener, _SEND, _ANSWER.pack(*answer))
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno != errno.ENOENT or _has_ended(listener):
                    os.close(listener)
                    return
                # Else the process was stopped in its call, which it makes again. Without a listener it would fail.


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv.pop(1))) as told:
        listener = hand_over_reads()
        socket.send_fds(told, [b"-"], [listener])
        os.close(listener)
    from chorus.server.cli.command import main

    sys.exit(main())
