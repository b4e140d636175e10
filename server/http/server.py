"""The HTTP server: uvicorn's, with a draining state, a deadline for draining, and an error for every cancelled request.

Tests: tests/server/test_shutdown.py
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from ..engine.backend import Backend
from ..executors import Executors
from .acceptor import Acceptor
from .connections import Connections
from .gate import Gate

log = logging.getLogger(__name__)

LISTEN_BACKLOG = 4096
"""Connections that may wait to be accepted."""

STOP_SECONDS = 1.5
"""Seconds that the engine may take to end."""

LAST_WORDS_SECONDS = 1.0
"""Seconds for sending the errors that end cancelled responses."""

FAILURE_SECONDS = 5.0
"""Seconds for which a server with a failed engine still answers with errors before it ends."""

QUIET_TICKS = 3
"""Tenths of a second without a connection or request after which a draining server ends."""


class HttpServer(uvicorn.Server):
    """Serves an app until a signal. The first signal drains: requests may end within `grace` seconds, new ones get 503.

    The remaining ones are then cancelled with an error that their clients can read, and the process ends with
    `exit_code`: 0, or 1 if the engine broke down. A second Ctrl-C ends it at once.
    """

    def __init__(self, config: uvicorn.Config, app: Starlette, connections: Connections, grace: float) -> None:
        super().__init__(config)
        self.exit_code = 0
        self.gate: Gate = app.state.gate
        self.worker: Backend = app.state.worker
        self.executors: Executors = app.state.executors
        self.connections = connections
        self._grace = grace
        self._cut_at: float | None = None
        self._failed_at: float | None = None
        self._seen = 0  # connections and requests at the latest tick
        self._quiet_ticks = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.gate.draining and sig == signal.SIGINT:
            os._exit(130)
        self.gate.draining = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve on the worker's event loop until the end."""
        with asyncio.Runner(loop_factory=self.worker.take_loop) as runner:
            runner.run(self.serve(sockets))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or ():
            listener.listen(LISTEN_BACKLOG)
        await super().startup([])
        make = partial(
            self.config.http_protocol_class,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self._acceptor = Acceptor(sockets or (), make, self.connections)

    async def on_tick(self, counter: int) -> bool:
        now = time.monotonic()
        if self.worker.failure is not None and not self.gate.draining:
            self._failed(now)
        if self.gate.draining and self._cut_at is None:
            self._cut_at = now + self._grace
            log.info(
                "shutting down: %d requests in progress have %g s to end; new ones get 503",
                self.gate.active,
                self._grace,
            )
        if self._cut_at is not None and (self._is_quiet() or now >= self._cut_at):
            self.should_exit = True
        return await super().on_tick(counter)

    def _is_quiet(self) -> bool:
        """True once nothing is in progress and nothing has come for a few ticks."""
        seen = self.connections.num_made + self.server_state.total_requests
        quiet = seen == self._seen and not self.gate.active and not self.connections.num_answering
        self._seen, self._quiet_ticks = seen, self._quiet_ticks + 1 if quiet else 0
        return self._quiet_ticks >= QUIET_TICKS

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.gate.draining = True
        if self.gate.active:
            log.warning("the time is up: cutting %d requests", self.gate.active)
        try:
            await asyncio.wait_for(self.executors.stop.run(self.worker.stop, STOP_SECONDS), STOP_SECONDS + 0.5)
        except Exception as error:
            log.warning("the engine was not stopped (%r); the process ends all the same", error)
        await _wait_while(lambda: self.gate.active, LAST_WORDS_SECONDS)
        self.gate.cut()
        await _wait_while(lambda: self.gate.active, LAST_WORDS_SECONDS / 4)
        self._acceptor.close()
        await super().shutdown(sockets)
        log.info("shut down")

    def _failed(self, now: float) -> None:
        """The engine failed for good: answer with errors for `FAILURE_SECONDS`, then end with code 1."""
        if self._failed_at is None:
            self._failed_at = now
            log.critical("%s; the process ends in %g s", self.worker.failure, FAILURE_SECONDS)
        elif now - self._failed_at >= FAILURE_SECONDS:
            self.exit_code = 1
            self.should_exit = True


async def _wait_while(goes_on: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while goes_on() and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
