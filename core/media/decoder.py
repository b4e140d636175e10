"""Decodes images in a process of its own, which ends if a file takes too long or nobody waits for it any longer.

The process starts with the first image. It has a limit of memory and, for each image, of a processor's time.

Tests: tests/core/media/test_decoder.py
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from functools import cache
from multiprocessing.connection import Connection
from subprocess import DEVNULL, Popen
from typing import Any

import numpy as np

from ...memory.files.given_up import check_wanted
from ...memory.host.child_python import python_command
from ...memory.host.daemon_pool import DaemonPool
from .images import MAX_PIXELS, BadImage, Check, check_size, strips

WALL_SECONDS = 120.0
"""Until a process that is silent is killed, however busy the machine; its own limit is of a processor's time."""

THREADS = 3
"""A tenant may have an image here while requests come in, and another one that the encoder waits for: then a third is
left to others.
"""

_LOOK_SECONDS = 0.05


class ImageDecoder:
    """A process that decodes one image at a time. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None
        self._link: Connection | None = None

    @property
    def pid(self) -> int | None:
        """The process's, if there is one."""
        return None if self._process is None else self._process.pid

    def decode(self, data: bytes, check: Check | None = None, most_side: int | None = None) -> np.ndarray:
        """The pixels of `open_image`, `[3, height, width]` uint8. Raises GivenUp if nobody waits for it any longer.

        check: called with the width and height of the header, and may raise BadImage.
        """
        check_size(len(data))
        with self._lock:
            try:
                return self._decode(data, check, most_side)
            except BadImage:
                raise
            except BaseException:
                self.close()
                raise

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the process; another image starts a new one."""
        process, link, self._process, self._link = self._process, self._link, None, None
        if link is not None:
            link.close()
        if process is not None:
            process.kill()
            process.wait()

    def _decode(self, data: bytes, check: Check | None, most_side: int | None) -> np.ndarray:
        link = self._send(json.dumps({"most_side": most_side}).encode(), data)
        size = self._size(link)
        try:
            if check is not None:
                check(size)
        except BadImage:
            link.send_bytes(b"false")
            raise
        link.send_bytes(b"true")
        return self._pixels(link, self._size(link))

    def _send(self, *messages: bytes) -> Connection:
        """Send the messages to the process; start it if there is none, or if it has ended since the last image."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            here, there = socket.socketpair()
            with there:
                self._link = Connection(here.detach())
                command = python_command(f"{__package__}.decode", str(there.fileno()))
                self._process = Popen(command, stdin=DEVNULL, stdout=DEVNULL, pass_fds=[there.fileno()])
        assert self._link is not None, "with the process"
        try:
            for message in messages:
                self._link.send_bytes(message)
        except OSError:
            raise self._why_ended() from None
        return self._link

    def _size(self, link: Connection) -> tuple[int, int]:
        """The next message, which tells a size. Raises BadImage."""
        answer: dict[str, Any] = json.loads(self._received(link))
        if "refused" in answer:
            raise BadImage(answer["refused"])
        width, height = answer["size"]
        if not 0 < width * height <= MAX_PIXELS:
            self.close()  # pixels would follow
            raise BadImage(f"has {width} x {height} pixels, at most {MAX_PIXELS} are taken; send a smaller image")
        return width, height

    def _pixels(self, link: Connection, size: tuple[int, int]) -> np.ndarray:
        width, height = size
        found = np.empty((3, height, width), np.uint8)
        for _, top, _, bottom in strips(size):
            rows = np.frombuffer(self._received(link), np.uint8)
            found[:, top:bottom] = rows.reshape(-1, width, 3).transpose(2, 0, 1)
        return found

    def _received(self, link: Connection) -> bytes:
        """The next message. Raises GivenUp, and BadImage if the process has ended without one."""
        deadline = time.monotonic() + WALL_SECONDS
        while not link.poll(_LOOK_SECONDS):
            check_wanted()
            if time.monotonic() > deadline:
                self.close()
                raise BadImage(f"was not decoded within {WALL_SECONDS:g} seconds; send a smaller one")
        try:
            return link.recv_bytes()
        except (EOFError, OSError):
            raise self._why_ended() from None

    def _why_ended(self) -> Exception:
        process = self._process
        assert process is not None, "it was asked"
        code = process.wait()
        self.close()
        if code == -signal.SIGPROF:
            return BadImage("takes too long to decode for its pixels; save it again, or send a smaller one")
        if code < 0:
            return BadImage(f"can't be decoded: it ends the decoder (signal {-code}); save it again")
        return RuntimeError(f"the process that decodes images ended with {code}; its messages are above")


_own = threading.local()


def image_decoder() -> ImageDecoder:
    """This thread's, which ends with it."""
    if not hasattr(_own, "decoder"):
        _own.decoder = ImageDecoder()
    return _own.decoder


@cache
def image_threads() -> DaemonPool:
    """The threads of this process that prepare images."""

    def let_steps_go_first() -> None:
        from .background import work_in_background  # torch: with the first image alone

        work_in_background(1)

    return DaemonPool("images", THREADS, initializer=let_steps_go_first)
