"""Addresses on which a cluster's processes listen: unix sockets, and TCP, with mutual TLS unless it is loopback."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from ..access.hosts import is_loopback
from ..executors import DaemonPool, PoolFull
from ..rare_log import RareLog
from .wire import WireError

log = logging.getLogger(__name__)
_refusals = RareLog(log)

LOOPBACK = "127.0.0.1"

HANDSHAKE_SECONDS = 10.0
"""Seconds that a TLS handshake may take."""

UNREAD_SECONDS = 30
"""Seconds without an acknowledgement after which the operating system ends a TCP connection."""

CERTIFICATE, KEY, CA = "tls.crt", "tls.key", "ca.crt"
"""Files of a TLS directory, with the names that Kubernetes gives them in a mounted secret."""

MAX_FILES = 1024
"""Files that may wait to be read."""

T = TypeVar("T")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves one connection."""


class AddressError(WireError, ValueError):
    """The text is not an address, or the address may not be used."""


class TlsError(WireError):
    """The peer does not speak TLS, or has no certificate of this cluster's CA."""


def _disk() -> DaemonPool:
    """The thread that reads files of addresses and certificates, to keep the event loop free."""
    return DaemonPool("cluster-files", threads=1, max_waiting=MAX_FILES)


async def _beside(disk: DaemonPool, read: Callable[[], T]) -> T:
    """The result of a function that reads files. Raises OSError if the disk hangs for many."""
    try:
        return await disk.run(read)
    except PoolFull as error:
        raise OSError(str(error)) from None


@dataclass(frozen=True, slots=True)
class UnixSocket:
    """`unix:PATH`; it is as private as its directory."""

    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"

    async def open(self) -> Streams:
        """Open a connection. Raises OSError."""
        return await asyncio.open_unix_connection(self.path)

    async def listen(self, handle: Handler) -> tuple[asyncio.Server, UnixSocket]:
        """Serve connections; returns the server, and the address that peers can connect to."""
        self.path.unlink(missing_ok=True)  # left by a process that was killed
        server = await asyncio.start_unix_server(handle, self.path)
        self.path.chmod(0o600)
        return server, self


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """`tcp://HOST:PORT`; for port 0 the operating system chooses one.

    Both sides show a certificate of the CA, which must be the cluster's own: everyone with a certificate that it signed
    is a member. Names in certificates are not compared, because replicas come and go on nodes with any names. Raises
    AddressError without TLS if the host is not loopback.
    """

    host: str
    port: int
    tls: Path | None = None
    """Directory of the certificate, the key and the CA."""
    disk: DaemonPool = field(default_factory=_disk, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.tls is None and not is_loopback(self.host):
            raise AddressError(f"{self} is not loopback, where a cluster needs mutual TLS: give --tls DIR")

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"

    async def open(self) -> Streams:
        """Open a connection. Raises OSError, and TlsError for a server that does not belong to the cluster."""
        context = None if self.tls is None else await _beside(self.disk, partial(tls_context, self.tls, is_client=True))
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port, ssl=context)
        except ssl.SSLError as error:
            raise tls_error(error) from None
        _end_with_peer(writer)
        return reader, writer

    async def listen(self, handle: Handler) -> tuple[asyncio.Server, TcpSocket]:
        """Serve connections; returns the server, and the address that peers can connect to. Raises TlsError for files
        that can't be used.

        The files are read again for each connection, so a new certificate needs no restart.
        """
        if self.tls is not None:
            await _beside(self.disk, partial(tls_context, self.tls, is_client=False))

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Awaitable[None]:
            _end_with_peer(writer)
            if self.tls is None:
                return handle(reader, writer)
            # not `ssl=context`: asyncio would hide the reason of a failed handshake. The peer's first bytes are TLS's.
            transport = writer.transport
            assert isinstance(transport, asyncio.Transport)
            # Not at once: Python 3.11.2 begins to read after this callback, whether reading is paused or not, and would
            # take the peer's first bytes for plain ones. Nothing is read before the next callback.
            asyncio.get_running_loop().call_soon(transport.pause_reading)
            return _begin_tls(reader, writer, partial(tls_context, self.tls, is_client=False), self.disk, handle)

        server = await asyncio.start_server(begin, self.host, self.port)
        return server, replace(self, port=server.sockets[0].getsockname()[1])


@dataclass(frozen=True, slots=True)
class AddressFile:
    """The address that a file holds at the moment, of a process that may restart at another one."""

    path: Path
    tls: Path | None = None
    disk: DaemonPool = field(default_factory=_disk, repr=False, compare=False)

    def __str__(self) -> str:
        return str(self.path)

    async def open(self) -> Streams:
        """Open a connection. Raises OSError, such as FileNotFoundError before anything has listened."""
        found = parse_address((await _beside(self.disk, self.path.read_text)).strip(), self.tls)
        return await (replace(found, disk=self.disk) if isinstance(found, TcpSocket) else found).open()

    def write(self, address: str) -> None:
        """Publish a new address; readers see either the old one or all of the new one."""
        new = self.path.with_suffix(".new")
        new.write_text(address)
        new.replace(self.path)

    def stamp(self) -> tuple[str, int] | None:
        """The address, and a stamp that changes with each write; None before anything has listened."""
        with suppress(FileNotFoundError):
            return self.path.read_text(), self.path.stat().st_mtime_ns
        return None


Listening = UnixSocket | TcpSocket
Address = Listening | AddressFile


def parse_address(text: str, tls: Path | None = None) -> Listening:
    """Parse `unix:PATH`, or `tcp://HOST:PORT`, where an empty host is loopback. Raises AddressError."""
    if text.startswith("unix:") and text != "unix:":
        return UnixSocket(Path(text.removeprefix("unix:")))
    try:
        parts = urlsplit(text)
        port = parts.port or 0
    except ValueError as error:
        raise AddressError(f"{text!r} is not an address: {error}") from None
    if parts.scheme != "tcp" or parts.path or parts.query or parts.fragment or "@" in parts.netloc:
        raise AddressError(f"{text!r} is not an address; give unix:PATH or tcp://HOST:PORT")
    return TcpSocket(parts.hostname or LOOPBACK, port, tls)


def tls_context(directory: Path, *, is_client: bool) -> ssl.SSLContext:
    """A context for TLS 1.2 or later that requires a certificate of the CA from the peer. Raises TlsError that names
    the file that can't be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if is_client else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(directory / CERTIFICATE, directory / KEY, password=_no_password)
        context.load_verify_locations(directory / CA)
    except (OSError, ValueError) as error:
        raise TlsError(f"{directory} must hold {CERTIFICATE}, {KEY} and {CA} of one cluster: {error}") from None
    return context


def tls_error(error: ssl.SSLError) -> TlsError:
    """The error of a connection, with OpenSSL's reason."""
    reason = (error.reason or str(error)).lower().replace("_", " ")
    return TlsError(f"TLS failed: {reason}")


async def _begin_tls(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    context: Callable[[], ssl.SSLContext],
    disk: DaemonPool,
    handle: Handler,
) -> None:
    try:
        await writer.start_tls(await _beside(disk, context), ssl_handshake_timeout=HANDSHAKE_SECONDS)
    except OSError as error:
        told = tls_error(error) if isinstance(error, ssl.SSLError) else error
        _refusals.warning("a connection was refused: %s: %s", type(told).__name__, told)
        writer.transport.abort()
        return
    except asyncio.CancelledError:  # at the process's end; asyncio would log it as an error
        return
    await handle(reader, writer)


def _end_with_peer(writer: asyncio.StreamWriter) -> None:
    """Make the operating system notice if the peer's machine is gone."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREAD_SECONDS)


def _no_password() -> str:
    raise ValueError(f"{KEY} has a passphrase; use a key without one")
