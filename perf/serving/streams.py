"""Many streamed responses, read at little cost, for measurements of a server's own CPU time.

An ordinary HTTP client spends more time on an event than a server does, and with few processors would dominate the
measurement. Here the received bytes are counted as events, and parsed, if at all, after all have arrived.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Address = tuple[str, int]

_POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
_EVENT = b"data: {"
_END = b"data: [DONE]"
_KEPT = 500  # bytes, more than an event's beginning, or the end, which may arrive in two parts


@dataclass(frozen=True)
class Answered:
    """Streams that were read."""

    seconds: float
    """Seconds until the end of the last one."""
    firsts: list[float]
    """Seconds until the first event of each, shortest first."""
    gaps: list[float]
    """Seconds between two events of a stream."""


class Stream(asyncio.Protocol):
    """One response, on its own connection. began: by `perf_counter`. times: of each event, in seconds from then."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.began = time.perf_counter()
        self._rest = b""
        self.times: list[float] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        found = data.count(_EVENT)
        if found:
            self.times += [time.perf_counter() - self.began] * found
        self._rest = data[data.rfind(_EVENT) + 1 :] if found else data[-_KEPT:]

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended.done():  # another one broke off
            return
        if exc is None and _END in self._rest:
            self.ended.set_result(None)
        else:
            why = f"a stream broke off after {len(self.times)} events: {self._rest!r}"
            self.ended.set_exception(RuntimeError(why))


async def send(address: Address, body: dict[str, Any]) -> Stream:
    """Send a request and read its response. Raises RuntimeError unless it ends well."""
    text = json.dumps({"stream": True, **body}).encode()
    stream = Stream(_POST + b"content-length: %d\r\n\r\n" % len(text) + text)
    await asyncio.get_running_loop().create_connection(lambda: stream, *address)
    await stream.ended
    return stream


def read_streams(address: Address, bodies: Sequence[dict[str, Any]]) -> Answered:
    """Send all requests at once and read the responses. Raises RuntimeError unless each ends well."""

    async def read_all() -> Answered:
        began = time.perf_counter()
        read = await asyncio.gather(*(send(address, body) for body in bodies))
        took, times = time.perf_counter() - began, [one.times for one in read]
        gaps = [after - before for each in times for before, after in itertools.pairwise(each)]
        return Answered(took, sorted(each[0] for each in times), gaps)

    return asyncio.run(read_all())
