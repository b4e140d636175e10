"""A web server on loopback that plays stores, honest and hostile: a handler computes the answer to a path."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class StoreServer(ThreadingHTTPServer):
    """`paths` maps a path to bytes, or to a function that answers by the request's handler; `asked` counts paths."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paths: dict[str, bytes | Callable[[BaseHTTPRequestHandler], None]] = {}
        self.asked: Counter[str] = Counter()
        self.over = threading.Event()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients of hostile answers leave early."""


class _Handler(BaseHTTPRequestHandler):
    server: StoreServer

    def do_GET(self) -> None:
        self.server.asked[self.path] += 1
        content = self.server.paths.get(self.path)
        if content is None:
            self.send_error(404)
        elif isinstance(content, bytes):
            send(self, content)
        else:
            content(self)

    def log_message(self, format: str, *args: object) -> None: ...


def send(handler: BaseHTTPRequestHandler, content: bytes, length: int | None = None, **headers: str) -> None:
    handler.send_response(200)
    handler.send_header("content-length", str(len(content) if length is None else length))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(content)


def redirect(url: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("location", url)
        handler.send_header("content-length", "0")
        handler.end_headers()

    return answer


def hang(handler: BaseHTTPRequestHandler) -> None:
    handler.server.over.wait()  # type: ignore[attr-defined]


@contextmanager
def store_server() -> Iterator[StoreServer]:
    with StoreServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()
