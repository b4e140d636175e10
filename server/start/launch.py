"""Starting the server: the engine, the app and the socket, in an order in which mistakes show early.

Tests: tests/server/cli/test_command.py
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from ...core.config import EngineConfig
from ..api.sampling_defaults import SamplingDefaults
from ..app import create_app
from ..engine.backend import Backend
from ..engine.kv_publisher import kv_publisher_of
from ..engine.recorder import Recorder
from ..engine.tracing import Tracer
from ..engine.worker import EngineWorker
from ..http.connections import Connections
from ..http.protocol import HttpConnection
from ..http.server import LISTEN_BACKLOG, HttpServer
from ..settings import LoraModule, Settings
from ..text.tokenizer import Tokenizer
from .checks import LaunchError, check_access, check_model
from .exits import DEADLINE_SECONDS, ExitDeadline

if TYPE_CHECKING:
    from ...core.engine import Engine

log = logging.getLogger(__name__)

SILENT_SECONDS = 1
"""For which the system keeps a connection to itself while its client has said nothing."""

SEND_BUFFER_BYTES = 32 << 10
"""Bytes of an answer that the system keeps for a client that does not read it; until it does, no more is made."""

RESERVED_DESCRIPTORS = 192
"""Descriptors kept for all but connections: adapter files, and sockets that are being accepted or closed."""

MIN_CONNECTIONS = 16

SWITCH_SECONDS = 0.0005

OpenBackend = Callable[[Settings], tuple[Backend, Tokenizer]]


def load(settings: Settings) -> tuple[EngineWorker, Tokenizer]:
    """A started worker and the tokenizer of its model; raises LaunchError for what can't be loaded."""
    check_model(settings)
    config = settings.engine_config()
    try:
        tokenizer = Tokenizer.load(config.model, config.tokenizer, settings.chat_template)
        worker = EngineWorker(lambda: build_engine(config, settings.lora_modules))
        worker.start()
    except Exception as error:
        log.debug("loading failed", exc_info=True)
        raise LaunchError(f"can't serve {config.model}: {error}") from error
    return worker, tokenizer


def build_engine(config: EngineConfig, modules: Sequence[LoraModule] = ()) -> Engine:
    from ...core.engine import Engine  # imports torch, which takes a while

    return Engine.from_config(config, modules=modules)


def bind(host: str, port: int, send_seconds: float = 20.0, *, shares_port: bool = False) -> socket.socket:
    """A bound socket; raises LaunchError when the address is taken or not ours.

    send_seconds: for which a client may take nothing of what it was sent, before the system ends its connection.
    shares_port: with other processes that say so, too, among which the system spreads connections.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise LaunchError(f"can't listen on {host}: {error.strerror}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit all of these
        if sys.platform == "linux":
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1000 * send_seconds)))
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_SECONDS)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise LaunchError(f"can't listen on {host} port {port}: {error.strerror}") from None
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def build_app(settings: Settings, open_backend: OpenBackend | None = None) -> Starlette:
    """The app that serves what the settings name. open_backend: what computes its answers; default: `load`."""
    try:
        defaults = SamplingDefaults.of(settings)
        recorder = None if settings.record is None else Recorder(settings.record)
        tracer = Tracer.of(settings.otlp_traces_endpoint)
    except ValueError as error:  # NoTrace and NoTracing among them
        raise LaunchError(str(error)) from None
    worker, tokenizer = (open_backend or load)(settings)
    names = [one.name for one in worker.adapters.listing().result().adapters()]
    if taken := [name for name in names if settings.is_reserved(name)]:
        worker.stop()
        raise LaunchError(
            f"an adapter is named {taken[0]} like the base model; set --served-model-name to something else"
        )
    log.info("serving %s and %d adapters", settings.base_name, len(names))
    try:
        return create_app(
            worker,
            tokenizer=tokenizer,
            settings=settings,
            defaults=defaults,
            kv_publisher=kv_publisher_of(worker, settings),
            recorder=recorder,
            tracer=tracer,
        )
    except (RuntimeError, OSError) as error:
        worker.stop()
        raise LaunchError(f"can't serve {settings.model}: {error}") from error


def max_connections(wanted: int | None = None) -> int:
    """Connections that fit below this process's limit of descriptors: at most `wanted`, never fewer than 16."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted or 1 << 16
    in_use = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 64
    fitting = max(MIN_CONNECTIONS, soft - in_use - RESERVED_DESCRIPTORS)
    if wanted is not None and wanted > fitting:
        log.warning("max_connections is %d, %d descriptors leave room for %d; raise ulimit -n", wanted, soft, fitting)
    return min(wanted or fitting, fitting)


def http_server(app: Starlette, settings: Settings) -> HttpServer:
    """The server of an app, with as many connections as this process has descriptors for."""
    count = max_connections(settings.max_connections)
    connections = Connections(count, settings)
    app.state.gate.requests.most = count * 3 // 4  # a new connection can replace one of the rest
    config = uvicorn.Config(
        app,
        http=partial(HttpConnection, connections),  # pyright: ignore[reportArgumentType] - it is called as a class is
        ws="none",
        loop="asyncio",
        log_config=None,  # its lines have the format of all others
        log_level="warning",
        access_log=False,  # `AccessLog` writes them
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
    atexit.register(gc.unfreeze)  # what is frozen is never destroyed, of which nanobind, in Triton, complains
    sys.setswitchinterval(SWITCH_SECONDS)


def serve(
    settings: Settings,
    open_backend: OpenBackend | None = None,
    *,
    shares_port: bool = False,
    on_listening: Callable[[], None] = lambda: None,
) -> int:
    """Serve until a signal; return the exit code, 1 when the engine broke down. See `build_app` and `bind`."""
    check_model(settings)
    warning = check_access(settings)
    with bind(settings.host, settings.port, settings.send_seconds, shares_port=shares_port) as bound:
        app = build_app(settings, open_backend)
        take_short_turns()
        if settings.api_key_file is not None or settings.admin_key_file is not None:  # else it ends the process
            signal.signal(signal.SIGHUP, lambda *_: app.state.key_watch.reload())
        if warning is not None:
            log.warning(warning)
        for name in ("chorus.audit", *(["chorus.access"] if settings.access_log else [])):
            logging.getLogger(name).setLevel(logging.INFO)  # whatever else is to be logged
        ExitDeadline(settings.grace_seconds + DEADLINE_SECONDS).start()
        bound.listen(LISTEN_BACKLOG)  # from now on no client is refused, though the first may wait a moment
        log.info("listening on %s", url_of(bound))
        on_listening()
        server = http_server(app, settings)
        server.run(sockets=[bound])
    return server.exit_code


@contextmanager
def serving(app: Starlette, settings: Settings) -> Iterator[str]:
    """A real server on a thread, on a free loopback port; gives its URL."""
    with bind("127.0.0.1", 0, settings.send_seconds) as bound:
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
