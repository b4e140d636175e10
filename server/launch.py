"""Starting the server: the engine, the app and the socket, in an order in which mistakes show early."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette

from ..core.config import EngineConfig
from .app import create_app
from .pull import PullError, resolve_model
from .served_model import ServedModel
from .settings import Settings
from .tokenizer import Tokenizer
from .worker import EngineWorker

if TYPE_CHECKING:
    from ..core.engine import Engine

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 20
"""How long answers in progress may go on once the server is told to stop."""

LISTEN_BACKLOG = 2048
"""Connections that may wait to be accepted; uvicorn's own default."""

KEEP_ALIVE_SECONDS = 75
"""Well above what client pools keep idle connections for, so that no request meets a connection being closed."""


class LaunchError(Exception):
    """The server can't start as it was told to; the text is for the person who told it."""


def check_model(settings: Settings) -> None:
    """Raises LaunchError unless the directories that the settings name are there."""
    try:
        resolve_model(settings.model)
    except PullError as error:
        raise LaunchError(str(error)) from None
    if not (settings.model / "config.json").is_file():
        raise LaunchError(f"{settings.model} holds no model: it has no config.json")
    if settings.adapters is not None and not settings.adapters.is_dir():
        raise LaunchError(f"there is no adapters directory {settings.adapters}")
    for root in settings.adapter_roots or ():
        if not root.is_dir():
            raise LaunchError(f"there is no directory {root}, which adapter_roots names")


def load(settings: Settings) -> tuple[EngineWorker, Tokenizer]:
    """A started worker and the tokenizer of its model; raises LaunchError for what can't be loaded."""
    check_model(settings)
    config = settings.engine_config()
    try:
        tokenizer = Tokenizer.load(config.model)
        worker = EngineWorker(lambda: _build_engine(config))
        worker.start()
    except Exception as error:
        log.debug("loading failed", exc_info=True)
        raise LaunchError(f"can't serve {config.model}: {error}") from error
    return worker, tokenizer


def _build_engine(config: EngineConfig) -> Engine:
    from ..core.engine import Engine  # imports torch, which takes a while

    return Engine.from_config(config)


def bind(host: str, port: int) -> socket.socket:
    """A bound socket; raises LaunchError when the address is taken or not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise LaunchError(f"can't listen on {host}: {error.strerror}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
    worker, tokenizer = load(settings)
    served = ServedModel(
        settings.base_name,
        str(settings.model),
        settings.max_body_bytes,
        settings.max_prompts,
        settings.loadable_from,
    )
    names = worker.call(lambda engine: engine.store.names()).result()
    if served.name in names:
        worker.stop()
        raise LaunchError(
            f"an adapter is named {served.name} like the base model; set --served-model-name to something else"
        )
    log.info("serving %s and %d adapters", served.name, len(names))
    return create_app(worker, tokenizer, served)


def uvicorn_server(app: Starlette, settings: Settings) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning" if not settings.access_log else "info",
            access_log=settings.access_log,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            ws="none",
        )
    )


def serve(settings: Settings) -> None:
    """Serves until it is interrupted."""
    check_model(settings)
    with bind(settings.host, settings.port) as bound:
        app = build_app(settings)
        bound.listen(LISTEN_BACKLOG)  # from now on no client is refused, though the first may wait a moment
        log.info("listening on %s", url_of(bound))
        uvicorn_server(app, settings).run(sockets=[bound])


@contextmanager
def serving(app: Starlette, settings: Settings) -> Iterator[str]:
    """A real server on a thread, on a free loopback port; gives its URL."""
    with bind("127.0.0.1", 0) as bound:
        server = uvicorn_server(app, settings)
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
            thread.join(SHUTDOWN_SECONDS * 2)
