"""The process of a replica, `chorus replica`: an engine that listens at an address until its parent ends it or ends.

Tests: tests/server/cluster/test_cluster.py
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from ...core.config import EngineConfig
from ..engine.worker import EngineWorker
from ..log_lines import LogFormat, log_to_stderr
from ..machine_faults import reason_of
from ..start.checks import LaunchError
from ..start.launch import build_engine, take_short_turns
from .address import Listening
from .child import end_with_parent
from .listener import Listener
from .replica import Replica
from .report import Hello

if TYPE_CHECKING:
    from ...core.config import EngineConfig
    from ..settings import Settings


class ReplicaSettings(BaseModel):
    """engine: without adapters; API servers name those to load. roots: directories that must contain them."""

    model_config = ConfigDict(extra="forbid")

    engine: EngineConfig
    roots: list[Path]
    grace_seconds: float
    log_level: str
    log_format: LogFormat = "text"

    @classmethod
    def of(cls, settings: Settings) -> ReplicaSettings:
        """The replica's part of a server's settings; paths are made absolute."""
        config = settings.engine_config()
        return cls(
            engine=config.model_copy(update={"adapters": None, "model": config.model.absolute()}),
            roots=[place.resolve() for place in settings.adapter_places],
            grace_seconds=settings.grace_seconds,
            log_level=settings.log_level,
            log_format=settings.log_format,
        )


log = logging.getLogger(__name__)

EMPTY_SECONDS = 0.1
"""Seconds between checks whether a draining replica is empty, or its engine broken."""

REFUSING_SECONDS = 0.3
"""Seconds for which a draining replica without requests refuses requests that were on their way to it."""


def run(listener: Listener, settings_file: Path) -> int:
    """Serve until SIGTERM, drain, return the exit code. It ends at once when its standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the API server, which drains
    end_with_parent()
    settings = ReplicaSettings.model_validate_json(settings_file.read_text())
    log_to_stderr("warning", settings.log_format)
    try:
        address, secret = listener.address, listener.secret
    except (OSError, ValueError) as error:
        raise LaunchError(str(error)) from None
    worker = EngineWorker(lambda: build_engine(settings.engine))
    try:
        worker.start()
    except Exception as error:
        log.debug("starting failed", exc_info=True)
        raise LaunchError(f"can't serve {settings.engine.model}: {reason_of(error)}") from error
    take_short_turns()
    try:
        return asyncio.run(_serve(worker, address, secret, settings, listener.tell))
    finally:
        worker.stop()


async def _serve(
    worker: EngineWorker,
    address: Listening,
    secret: bytes,
    settings: ReplicaSettings,
    tell: Callable[[Listening], None],
) -> int:
    hello = worker.call(lambda engine: Hello.of(engine, os.getpid())).result()
    replica = Replica(worker, hello, secret, settings.roots)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, replica.drain)
    reports = asyncio.create_task(replica.report())
    try:
        server, opened = await address.listen(replica.serve)
    except OSError as error:  # includes TlsError
        raise LaunchError(f"a replica can't listen on {address}: {error}") from None
    tell(opened)
    log.info("listening on %s", opened)
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
