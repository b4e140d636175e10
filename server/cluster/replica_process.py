"""The process of a replica, `chorus replica`: an engine behind a unix socket, until its parent ends or ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from ..launch import take_short_turns
from ..worker import EngineWorker
from .child import end_with_parent
from .replica import Replica
from .replica_settings import ReplicaSettings
from .report import Hello
from .stream import read_secret

if TYPE_CHECKING:
    from ...core.config import EngineConfig
    from ...core.engine import Engine

log = logging.getLogger(__name__)

EMPTY_SECONDS = 0.1
"""Seconds between looks at whether a draining replica is empty, or its engine broken."""

REFUSING_SECONDS = 0.3
"""Seconds that a draining replica without requests refuses those that were under way to it."""


def run(socket: Path, secret_file: Path, settings_file: Path) -> int:
    """Serve until told to end; the exit code. The process ends at once when its standard input does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the front's, which drains
    end_with_parent()
    settings = ReplicaSettings.model_validate_json(settings_file.read_text())
    secret = read_secret(secret_file)
    worker = EngineWorker(lambda: _build_engine(settings.engine))
    worker.start()
    take_short_turns()
    try:
        return asyncio.run(_serve(worker, socket, secret, settings))
    finally:
        worker.stop()


def _build_engine(config: EngineConfig) -> Engine:
    from ...core.engine import Engine  # imports torch, which takes a while

    return Engine.from_config(config)


async def _serve(worker: EngineWorker, socket: Path, secret: bytes, settings: ReplicaSettings) -> int:
    hello = worker.call(lambda engine: Hello.of(engine, os.getpid())).result()
    replica = Replica(worker, hello, secret, settings.roots)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, replica.drain)
    reports = asyncio.create_task(replica.report())
    socket.unlink(missing_ok=True)  # of a process that was killed
    server = await asyncio.start_unix_server(replica.serve, socket)
    socket.chmod(0o600)
    log.info("listening on %s", socket)
    draining_since: float | None = None
    try:
        while True:
            await asyncio.sleep(EMPTY_SECONDS)
            if worker.failure is not None:
                log.critical("the replica ends: %s", worker.failure)
                return 1
            if replica.draining:
                draining_since = draining_since or loop.time()
                waited = loop.time() - draining_since
                if waited > settings.grace_seconds or (waited > REFUSING_SECONDS and replica.is_empty):
                    return 0
    finally:
        reports.cancel()
        server.close()
