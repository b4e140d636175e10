"""HTTP to allowed hosts only: every hop's host and address is checked, and everything ends by a deadline."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from functools import cache
from typing import Any

import httpcore
import httpx

from .allowed import Allowed
from .deadline import SILENT_SECONDS, Deadline

MAX_REDIRECTS = 5


def guarded_client(
    allowed: Allowed, deadline: Deadline, headers: dict[str, str] | None = None, redirects: int = MAX_REDIRECTS
) -> httpx.Client:
    """A client for one download. Its requests raise StoreRefused and StoreAway in addition to httpx's errors.

    Proxies of the environment are not used: a proxy would resolve names by itself.
    """
    return httpx.Client(
        transport=_Transport(allowed, deadline),
        headers={"accept-encoding": "identity", **(headers or {})},
        follow_redirects=redirects > 0,
        max_redirects=redirects,
        timeout=SILENT_SECONDS,
        trust_env=False,
    )


@cache
def _certificates() -> ssl.SSLContext:
    """The context that checks servers' certificates; creating it takes a while."""
    return httpx.create_ssl_context()


class _Transport(httpx.HTTPTransport):
    """Checks the URL of each request, including redirects; connects only to addresses that `Allowed` permits."""

    def __init__(self, allowed: Allowed, deadline: Deadline) -> None:
        super().__init__(verify=_certificates(), trust_env=False)
        self._allowed = allowed
        self._pool = httpcore.ConnectionPool(ssl_context=_certificates(), network_backend=_Backend(allowed, deadline))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._allowed.check_url(request.url.scheme, request.url.host, request.url.port)
        return super().handle_request(request)


class _Backend(httpcore.SyncBackend):
    """Connects to exactly the checked address, so a name can't resolve to another one (DNS rebinding)."""

    def __init__(self, allowed: Allowed, deadline: Deadline) -> None:
        self._allowed = allowed
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        error: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in self._allowed.resolve(host, port):
            try:
                stream = super().connect_tcp(address, port, self._deadline.left(timeout), local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failed:
                error = failed
            else:
                return _Stream(stream, self._deadline)
        raise error


class _Stream(httpcore.NetworkStream):
    """A connection whose reads and writes end by the deadline, however slowly the other side sends."""

    def __init__(self, inner: httpcore.NetworkStream, deadline: Deadline) -> None:
        self._inner = inner
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, self._deadline.left(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, self._deadline.left(timeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(
            self._inner.start_tls(ssl_context, server_hostname, self._deadline.left(timeout)), self._deadline
        )

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
