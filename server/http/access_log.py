"""One log line for every HTTP request."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..log_lines import Stopwatch, about_request

access = logging.getLogger("chorus.access")


class AccessLog:
    """Middleware that adds the request's fields to log lines inside it. writes: write a line per request."""

    def __init__(self, app: ASGIApp, *, writes: bool) -> None:
        self._app = app
        self._writes = writes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        watch, status = Stopwatch(), 0

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with about_request(scope["state"]["request_id"]) as about:
            try:
                await self._app(scope, receive, note)
            finally:
                if self._writes:
                    about["status"], about["duration"] = status, watch.seconds
                    peer = (scope.get("client") or ("-",))[0]
                    access.info("%s %s from %s", scope["method"], ascii(scope["path"])[1:-1], peer)
