"""Server-sent events, and detection of clients that disconnect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .json_text import dumps

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"

UNWATCHED_SECONDS = 0.02
"""Seconds until a request's connection is watched: one that is answered sooner does not pay for it."""

T = TypeVar("T")


def event(body: dict[str, Any], write: Callable[[Any], bytes] = dumps) -> bytes:
    """One event, named by the body's type if it has one. JSON has no raw line breaks, so it is one `data:` line.

    write: `encode` on a thread, for a long event.
    """
    name = body.get("type")
    line = b"data: " if name is None else b"event: %b\ndata: " % name.encode()
    return line + write(body) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` while the client is connected; if it disconnects, cancel `work` and raise ClientDisconnect.

    The request's body must have been read.
    """
    task, loop, watching, has_left = asyncio.current_task(), asyncio.get_running_loop(), None, False
    assert task is not None
    num_cancels = task.cancelling()

    async def watch() -> None:
        nonlocal has_left
        await _disconnected(receive)
        has_left = True
        task.cancel()  # it waits in `work`

    def begin() -> None:
        nonlocal watching
        watching = loop.create_task(watch())

    timer = loop.call_later(UNWATCHED_SECONDS, begin)
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and task.uncancel() <= num_cancels:
            raise ClientDisconnect from None
        raise
    except Exception:
        if not has_left:
            raise
        task.uncancel()
        log.exception("a request failed after its client had left")
        raise ClientDisconnect from None
    finally:
        timer.cancel()
        if watching is not None:
            await _end(watching)


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come. `on_close` is called however the stream ends, even before it began.

    Starlette's StreamingResponse notices a lost client only when it next sends something, which is late for a request
    that waits in the queue; this class watches the connection.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_close: Callable[[], None], headers: Mapping[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._events = events
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect, OSError):
                await while_connected(receive, self._send_all(send))
        finally:
            self._on_close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
