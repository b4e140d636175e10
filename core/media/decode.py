"""The process that decodes files of images: `python -m chorus.core.media.decode LINK`, with the descriptor of a socket.

A file that takes more memory than `MEMORY_BYTES` is refused. One that takes more of a processor's time than its pixels
may ends the process.

Tests: tests/core/media/test_decoder.py
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from ...memory.host.child_python import limit_memory
from .images import BadImage, decoded, opened, strips

MEMORY_BYTES = 1 << 30
"""WebP takes 16 bytes a pixel: for 50 million 0.8 GB."""

HEADER_SECONDS = 1.0
PIXELS_A_SECOND = 16e6
"""Ten times slower than most files are decoded."""

_STEPS = 10
"""Added to its niceness, as for the threads that encode: see `work_in_background`."""


def decode_seconds(pixels: int) -> float:
    """Seconds of a processor's time that an image may take after its header was read."""
    return HEADER_SECONDS + pixels / PIXELS_A_SECOND


def _tell(link: Connection, **fields: Any) -> None:
    link.send_bytes(json.dumps(fields).encode())


def serve_one(link: Connection) -> None:
    """Decode a file: send its size, wait until the parent agrees, then send its rows; or send why it is refused."""
    asked, data = json.loads(link.recv_bytes()), link.recv_bytes()
    try:
        signal.setitimer(signal.ITIMER_PROF, HEADER_SECONDS)
        image = opened(data)
        _tell(link, size=image.size)
        if not json.loads(link.recv_bytes()):
            return
        signal.setitimer(signal.ITIMER_PROF, decode_seconds(image.size[0] * image.size[1]))
        image = decoded(image, asked["most_side"])
    except BadImage as error:
        _tell(link, refused=str(error))
        return
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    _tell(link, size=image.size)
    for box in strips(image.size):
        link.send_bytes(image.crop(box).tobytes())


def main(link_fd: int) -> None:
    """Serve until the other side closes its end."""
    from PIL import Image

    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a whole group: the parent drains first
        signal.signal(number, signal.SIG_IGN)
    Image.init()
    os.nice(_STEPS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libtiff prints warnings to stderr
    limit_memory(MEMORY_BYTES)
    with suppress(EOFError, OSError), Connection(link_fd) as link:
        while True:
            serve_one(link)


if __name__ == "__main__":
    main(int(sys.argv[1]))
