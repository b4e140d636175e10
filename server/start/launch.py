"""Starting the server: the engine, the app and the socket, in an order that reports mistakes early.

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
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from ...core.config import EngineConfig
from ...core.model.config_json import UnsupportedModel
from ...memory.adapters.store import UnknownAdapter
from ..api.sampling_defaults import SamplingDefaults
from ..app import create_app
from ..engine.adapter_loader import NotAlone, check_alone
from ..engine.backend import Backend
from ..engine.kv_publisher import kv_publisher_of
from ..engine.recorder import Recorder
from ..engine.telemetry import Telemetry
from ..engine.tracing import Tracer
from ..engine.usage_file import UsageFile
from ..engine.worker import EngineWorker
from ..http.connections import Connections
from ..http.protocol import HttpConnection
from ..http.server import LISTEN_BACKLOG, HttpServer
from ..http.unix_socket import unix_listener
from ..machine_faults import reason_of
from ..settings import LoraModule, Settings
from ..text.tokenizer import Tokenizer
from .checks import LaunchError, check_access, check_model, warn_of_rights
from .exits import DEADLINE_SECONDS, ExitDeadline
from .full_collections import collect_seldom

if TYPE_CHECKING:
    from ...core.engine import Engine

log = logging.getLogger(__name__)

SILENT_SECONDS = 1
"""Seconds for which the operating system holds back a new connection until its client sends something."""

SEND_BUFFER_BYTES = 32 << 10
"""Bytes of unread response that the operating system buffers for a client; when they are full, generation waits."""

RESERVED_DESCRIPTORS = 192
"""File descriptors reserved for everything but connections: adapter files, and sockets being accepted or closed."""

MIN_CONNECTIONS = 16

SWITCH_SECONDS = 0.0005

OpenBackend = Callable[[Settings], tuple[Backend, Tokenizer]]


def load(settings: Settings) -> tuple[EngineWorker, Tokenizer]:
    """A started worker and the tokenizer of its model; raises LaunchError if either can't be loaded."""
    check_model(settings)
    config = settings.engine_config()
    try:
        tokenizer = Tokenizer.load(config.model, config.tokenizer, settings.chat_template, settings.tool_call_format)
        worker = EngineWorker(lambda: build_engine(config, settings.lora_modules))
        worker.start()
    except Exception as error:
        log.debug("loading failed", exc_info=True)
        raise LaunchError(f"can't serve {config.model}: {reason_of(error)}") from error
    return worker, tokenizer


def build_engine(config: EngineConfig, modules: Sequence[LoraModule] = ()) -> Engine:
    from ...core.engine import Engine  # imports torch, which takes a while

    return Engine.from_config(config, modules=modules)


def bind(host: str, port: int, send_seconds: float = 20.0, *, shares_port: bool = False) -> socket.socket:
    """A bound socket; raises LaunchError if the address is taken or is not this machine's.

    send_seconds: a client that reads nothing of the data sent to it for so long loses its connection. shares_port:
    share the port with other processes that also set this; the operating system distributes connections among them.
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
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # connections inherit these options
        if sys.platform == "linux":
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1000 * send_seconds)))
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_SECONDS)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise LaunchError(
            f"can't listen on {host} port {port}: {error.strerror}; choose another --host or --port"
        ) from None
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def build_app(settings: Settings, open_backend: OpenBackend | None = None) -> Starlette:
    """The app for these settings. open_backend: makes the backend that computes the responses; default: `load`."""
    try:
        defaults = SamplingDefaults.of(settings)
        recorder = None if settings.record is None else Recorder(settings.record)
        usage_file = None if settings.usage_file is None else UsageFile(settings.usage_file)
        tracer = Tracer.of(settings.otlp_traces_endpoint)
    except ValueError as error:  # NotAppendable and NoTracing, too
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
        _check_as_base(worker, settings)
        app = create_app(
            worker,
            tokenizer=tokenizer,
            settings=settings,
            defaults=defaults,
            kv_publisher=kv_publisher_of(worker, settings),
            telemetry=Telemetry(None, recorder, tracer, usage_file),
        )
        _check_as_base_exists(worker, settings)
        return app
    except LaunchError:
        worker.stop()
        raise
    except (RuntimeError, OSError, UnsupportedModel) as error:
        worker.stop()
        raise LaunchError(f"can't serve {settings.model}: {reason_of(error)}") from error


def _check_as_base(worker: Backend, settings: Settings) -> None:
    """Raise LaunchError if an adapter can't serve the base model's name here."""
    if settings.adapter_as_base is not None:
        try:
            check_alone(worker, "--adapter-as-base")
        except NotAlone as error:
            raise LaunchError(str(error)) from None


def _check_as_base_exists(worker: Backend, settings: Settings) -> None:
    """Raise LaunchError if the adapter that is to serve the base model's name is unknown."""
    name = settings.adapter_as_base
    if name is None or settings.adapter_rules.find(name) is not None:
        return
    try:
        worker.adapters.state(name).result()
    except UnknownAdapter:
        aside = {one.name: one.reason for one in worker.adapters.quarantined().result()}
        why = f"it is not served: {aside[name]}" if name in aside else "no adapter has this name"
        raise LaunchError(f"--adapter-as-base {name}: {why}; see --adapters and --lora-modules") from None


def max_connections(wanted: int | None = None) -> int:
    """Connections that this process's limit of descriptors allows: at most `wanted`, at least 16."""
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
    app.state.gate.requests.most = count * 3 // 4  # a new connection can replace one of the others
    config = uvicorn.Config(
        app,
        http=partial(HttpConnection, connections),  # pyright: ignore[reportArgumentType] - uvicorn calls it like a class
        ws="none",
        loop="asyncio",
        log_config=None,  # uvicorn's lines have the format of all others
        log_level="warning",
        access_log=False,  # `AccessLog` writes them
        proxy_headers=False,  # the app evaluates the proxy headers, which count only from trusted addresses
        timeout_graceful_shutdown=1,
        # it delays the event loop; fractions work whatever uvicorn's annotation says
        timeout_keep_alive=settings.idle_seconds,  # pyright: ignore[reportArgumentType]
        server_header=False,
    )
    return HttpServer(config, app, connections, settings.grace_seconds)


def take_short_turns() -> None:
    """Keep one thread from holding the interpreter's lock for long; call it once everything permanent is loaded.

    A full garbage collection visits every object while all threads wait: 0.2 s with torch loaded. Objects that exist by
    now live until the end, so the collector ignores them from here on, and visits all others seldom. A thread that
    computes in Python also releases the lock after `SWITCH_SECONDS`: an engine step needs the lock after each of its
    native calls, and would wait ten times as long each time.
    """
    gc.collect()
    gc.freeze()
    collect_seldom()
    atexit.register(gc.unfreeze)  # frozen objects are never destroyed; nanobind, which Triton uses, warns about that
    sys.setswitchinterval(SWITCH_SECONDS)


def serve(
    settings: Settings,
    open_backend: OpenBackend | None = None,
    *,
    shares_port: bool = False,
    on_listening: Callable[[], None] = lambda: None,
) -> int:
    """Serve until a signal; return the exit code, 1 if the engine broke down. See `build_app` and `bind`."""
    check_model(settings)
    warnings = [one for one in (check_access(settings), warn_of_rights(settings)) if one is not None]
    with ExitStack() as stack:
        address = settings.host, settings.port, settings.send_seconds
        bound = stack.enter_context(bind(*address, shares_port=shares_port))
        others = [] if settings.unix_socket is None else [_enter_unix(stack, settings.unix_socket)]
        app = build_app(settings, open_backend)
        take_short_turns()
        # otherwise the timer ends the process
        signal.signal(signal.SIGHUP, lambda *_: app.state.key_watch.reload())
        for warning in warnings:
            log.warning(warning)
        for name in ("chorus.audit", *(["chorus.access"] if settings.access_log else [])):
            logging.getLogger(name).setLevel(logging.INFO)  # whatever else is to be logged
        ExitDeadline(settings.grace_seconds + DEADLINE_SECONDS).start()
        bound.listen(LISTEN_BACKLOG)  # from now on no client is refused, though the first ones may wait a moment
        log.info("listening on %s", url_of(bound))
        on_listening()
        server = http_server(app, settings)
        server.run(sockets=[bound, *others])
    return server.exit_code


def _enter_unix(stack: ExitStack, path: Path) -> socket.socket:
    """The bound socket of `--unix-socket`, removed at the end of the stack. Raises LaunchError."""
    try:
        return stack.enter_context(unix_listener(path))
    except OSError as error:
        raise LaunchError(f"can't listen on {path}: {error.strerror or error}; choose another --unix-socket") from None


@contextmanager
def serving(app: Starlette, settings: Settings) -> Iterator[str]:
    """A real server on a thread and a free loopback port; yields its URL."""
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
