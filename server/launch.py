"""Starting the server: the engine, the app and the socket, in an order in which mistakes show early."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from ..core.config import EngineConfig
from .addresses import Networks
from .app import create_app
from .checks import LaunchError, check_access, check_model
from .connections import ConnectionLimits, Connections, max_connections
from .http_server import DEADLINE_SECONDS, LISTEN_BACKLOG, ExitDeadline, HttpServer
from .sampling_defaults import SamplingDefaults
from .settings import LoraModule, Settings
from .tokenizer import Tokenizer
from .worker import EngineWorker

if TYPE_CHECKING:
    from ..core.engine import Engine

log = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 256 << 10
"""Bytes of an answer that the system keeps for a client that does not read it; the rest stays in sight here."""

SWITCH_SECONDS = 0.0005


def load(settings: Settings) -> tuple[EngineWorker, Tokenizer]:
    """A started worker and the tokenizer of its model; raises LaunchError for what can't be loaded."""
    check_model(settings)
    config = settings.engine_config()
    try:
        tokenizer = Tokenizer.load(config.model)
        worker = EngineWorker(lambda: _build_engine(config, settings.lora_modules))
        worker.start()
    except Exception as error:
        log.debug("loading failed", exc_info=True)
        raise LaunchError(f"can't serve {config.model}: {error}") from error
    return worker, tokenizer


def _build_engine(config: EngineConfig, modules: Sequence[LoraModule] = ()) -> Engine:
    from ..core.engine import Engine  # imports torch, which takes a while

    return Engine.from_config(config, modules=modules)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; raises LaunchError when the address is taken or not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise LaunchError(f"can't listen on {host}: {error.strerror}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit it
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise LaunchError(f"can't listen on {host} port {port}: {error.strerror}") from None
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def build_app(settings: Settings) -> Starlette:
    """The app that serves what the settings name."""
    try:
        defaults = SamplingDefaults.read(settings.model) if settings.generation_config == "auto" else SamplingDefaults()
    except ValueError as error:
        raise LaunchError(str(error)) from None
    worker, tokenizer = load(settings)
    names = worker.call(lambda engine: engine.store.names()).result()
    if taken := [name for name in names if settings.is_reserved(name)]:
        worker.stop()
        raise LaunchError(
            f"an adapter is named {taken[0]} like the base model; set --served-model-name to something else"
        )
    log.info("serving %s and %d adapters", settings.base_name, len(names))
    try:
        return create_app(worker, tokenizer, settings, defaults)
    except RuntimeError as error:
        worker.stop()
        raise LaunchError(f"can't serve {settings.model}: {error}") from error


def http_server(app: Starlette, settings: Settings) -> HttpServer:
    """The server of an app, with as many connections as this process has descriptors for."""
    count = max_connections(settings.max_connections)
    limits = ConnectionLimits(
        count,
        settings.max_connections_per_address or count // 2,
        settings.head_seconds,
        settings.body_seconds,
        settings.send_seconds,
        settings.idle_seconds,
    )
    connections = Connections(limits, Networks(settings.trusted_proxies or ()))
    app.state.gate.limit = limits.count * 3 // 4  # the rest can always be taken from those that ask for nothing
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        log_level="warning" if not settings.access_log else "info",
        access_log=settings.access_log,
        proxy_headers=False,  # the app looks at them: there only addresses count
        timeout_graceful_shutdown=1,
        # it is a delay of the event loop, which takes fractions whatever uvicorn's annotation says
        timeout_keep_alive=settings.idle_seconds,  # pyright: ignore[reportArgumentType]
        server_header=False,
    )
    return HttpServer(config, app, connections, settings.grace_seconds)


def take_short_turns() -> None:
    """Let no thread keep the others from the interpreter for long; once all that lasts has been loaded.

    A full garbage collection looks at every object there is while all threads wait, 0.2 s with torch loaded; what is
    here by now stays to the end and is left out from now on. And a thread that computes in Python gives way after
    `SWITCH_SECONDS`: a step of the engine asks for the interpreter after each of its calls into native code, and would
    wait ten times as long each time.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)


def serve(settings: Settings) -> int:
    """Serves until it is told to end; the exit code, 1 when the engine broke down."""
    check_model(settings)
    warning = check_access(settings)
    with bind(settings.host, settings.port) as bound:
        app = build_app(settings)
        take_short_turns()
        if settings.api_key_file is not None or settings.admin_key_file is not None:  # else it ends the process
            signal.signal(signal.SIGHUP, lambda *_: app.state.key_watch.reload())
        if warning is not None:
            log.warning(warning)
        logging.getLogger("chorus.audit").setLevel(logging.INFO)  # whatever else is to be logged
        ExitDeadline(settings.grace_seconds + DEADLINE_SECONDS).start()
        bound.listen(LISTEN_BACKLOG)  # from now on no client is refused, though the first may wait a moment
        log.info("listening on %s", url_of(bound))
        server = http_server(app, settings)
        server.run(sockets=[bound])
    return server.exit_code


@contextmanager
def serving(app: Starlette, settings: Settings) -> Iterator[str]:
    """A real server on a thread, on a free loopback port; gives its URL."""
    with bind("127.0.0.1", 0) as bound:
        server = http_server(app, settings)
        thread = threading.Thread(target=server.run, args=([bound],), name="chorus-http", daemon=True)
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise LaunchError("the HTTP server could not start")
            time.sleep(0.005)
        try:
            yield url_of(bound)
        finally:
            server.should_exit = True
            thread.join(settings.grace_seconds + 2 * DEADLINE_SECONDS)
