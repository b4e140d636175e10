"""The HTTP server's life: uvicorn's, with a draining state, an end that cuts nobody silently, and a deadline for it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from .acceptor import Acceptor
from .connections import Connections
from .executors import Executors
from .gate import Gate
from .http_protocol import HttpConnection
from .worker import EngineWorker

log = logging.getLogger(__name__)

LISTEN_BACKLOG = 4096
"""Connections that may wait to be accepted."""

STOP_SECONDS = 1.5
"""Seconds that the engine may take to end."""

LAST_WORDS_SECONDS = 1.0
"""Seconds that the errors that end cut answers may take to be sent."""

DEADLINE_SECONDS = 4.0
"""Seconds after the grace time at which the process ends whatever hangs."""

FAILURE_SECONDS = 5.0
"""Seconds that a server whose engine broke down for good still says so before it ends."""


class HttpServer(uvicorn.Server):
    """Serves an app until a signal. The first one drains: what runs may end within `grace` seconds, new work gets 503.

    Then what is left is cut with an error its client can read, and the process ends with `exit_code`: 0, or 1 when the
    engine broke down. A second Ctrl-C ends it at once.
    """

    def __init__(self, config: uvicorn.Config, app: Starlette, connections: Connections, grace: float) -> None:
        super().__init__(config)
        self.exit_code = 0
        self._gate: Gate = app.state.gate
        self.worker: EngineWorker = app.state.worker
        self.executors: Executors = app.state.executors
        self.connections = connections
        self._grace = grace
        self.acceptors: list[Acceptor] = []
        self._cut_at: float | None = None
        self._failed_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._gate.draining and sig == signal.SIGINT:
            os._exit(130)
        self._gate.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        for listener in sockets or ():
            listener.listen(LISTEN_BACKLOG)
            self.acceptors.append(Acceptor(listener, self._protocol, self.connections))

    def _protocol(self) -> HttpConnection:
        return HttpConnection(
            self.connections, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def on_tick(self, counter: int) -> bool:
        now = time.monotonic()
        if self.worker.failure is not None and not self._gate.draining:
            self._failed(now)
        if self._gate.draining and self._cut_at is None:
            self._cut_at = now + self._grace
            log.info("shutting down: %d requests in progress have %g s to end; new ones get 503",
                     self._gate.active, self._grace)  # fmt: skip
        if self._cut_at is not None and (not self._gate.active or now >= self._cut_at):
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gate.draining = True
        if self._gate.active:
            log.warning("the time is up: cutting %d requests", self._gate.active)
        try:
            await asyncio.wait_for(self.executors.stop.run(self.worker.stop, STOP_SECONDS), STOP_SECONDS + 0.5)
        except Exception as error:
            log.warning("the engine was not stopped (%r); the process ends all the same", error)
        await _wait_while(lambda: self._gate.active, LAST_WORDS_SECONDS)
        self.connections.cut_those_that_do_not_read()
        self._gate.cut()
        await _wait_while(lambda: self._gate.active, LAST_WORDS_SECONDS / 4)
        for acceptor in self.acceptors:
            acceptor.close()
        await asyncio.sleep(0)
        await _wait_while(lambda: self.connections.num_unsent, LAST_WORDS_SECONDS / 4)  # the last bytes
        self.connections.cut()
        await super().shutdown(sockets)
        log.info("shut down")

    def _failed(self, now: float) -> None:
        """The engine broke down for good: say so for a while, then end, so that whoever started the server sees it."""
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


class ExitDeadline:
    """Ends the process a while after it was told to end, whatever its threads hang in.

    Signals reach it through a pipe that the system writes to at once, even while the main thread is stuck in a call.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def start(self) -> None:
        """To be called on the main thread, the only one that may ask for signals; elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            return
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._run, args=(reader,), name="chorus-exit", daemon=True).start()

    def _run(self, reader: int) -> None:
        while not set(os.read(reader, 64)) & {signal.SIGINT, signal.SIGTERM}:
            pass
        time.sleep(self._seconds)
        last = threading.Timer(0.2, os._exit, (0,))  # writing to the log may hang, too
        last.daemon = True
        last.start()
        log.error("the server did not end by itself within %g s; it ends now", self._seconds)
        os._exit(0)
