"""A connection that carries frames between two processes that share a secret, over asyncio's streams.

The process that connects is the client. Both sides send a nonce. Then the client proves that it has the secret, and the
server after it: HMAC-SHA256 of the role and both nonces. Until then a frame has at most `OPENING_BYTES`.
`stay_connected` reopens a connection whenever it ends.

Tests: tests/server/cluster/test_wire.py
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
import secrets
import ssl
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

from .address import Address, tls_error
from .wire import MAX_BYTES, Frame, FrameReader, FrameWriter, Malformed, OtherVersion, WireError

OPENING_BYTES = 4096
"""Largest payload of a peer that has not yet proved that it has the secret."""

OPENING_SECONDS = 10.0
"""Seconds that the opening handshake may take."""

MAX_UNSENT_BYTES = 128 << 20
"""Bytes that may wait for a peer that does not read; beyond them its connection ends."""

READ_BYTES = 256 << 10
SECRET_BYTES = 32

_OPENING = ("greet", "proof", "bye")


class WrongSecret(WireError):
    """The peer does not have this process's secret."""


class PeerRefused(WireError):
    """The peer ended the connection and gave the reason."""


class PlannedEnd(WireError):
    """The peer ended the connection after announcing its end."""


class PeerStuck(WireError):
    """The peer does not read the frames sent to it."""


class FrameStream:
    """An open connection. One task reads; any code on the loop may send."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frames: FrameReader, out: FrameWriter
    ) -> None:
        """Use `connect` or `accept`, which open the connection."""
        self._reader = reader
        self._writer = writer
        self._frames = frames
        self._out = out

    async def read(self) -> Frame | None:
        """The next frame; None once the peer has closed the connection between two frames.

        Raises WireError for invalid data, Refused with the peer's reason, ConnectionError if the connection broke.
        """
        while (frame := self._frames.next_frame()) is None:
            try:
                data = await self._reader.read(READ_BYTES)
            # such as a certificate that the server rejects, which the client learns of late
            except ssl.SSLError as error:
                raise tls_error(error) from None
            if not data:
                self._frames.close()
                return None
            self._frames.feed(data)
        if frame.kind == "bye":
            raise PeerRefused(
                f"the peer ended the connection: {frame.fields[0] if frame.fields else 'no reason given'}"
            )
        return frame

    def send(self, kind: str, *fields: Any) -> None:
        """Queue a frame; to a dead peer it is lost. Raises PeerStuck if too much waits, and FrameTooLarge."""
        if self.unsent > MAX_UNSENT_BYTES:
            raise PeerStuck(f"the peer has left {MAX_UNSENT_BYTES} bytes unread")
        self._writer.write(self._out.frame(kind, *fields))

    @property
    def unsent(self) -> int:
        """Bytes that wait for the peer to read others."""
        return self._writer.transport.get_write_buffer_size()

    async def drain(self) -> None:
        """Wait until the peer has read most of the frames sent to it."""
        await self._writer.drain()

    def close(self, reason: str | None = None) -> None:
        """End the connection. reason: sent to the peer."""
        if reason is not None and not self._writer.is_closing():
            self._writer.write(self._out.frame("bye", reason[:1000]))
        self._writer.close()

    async def open(self, secret: bytes, *, is_client: bool, max_bytes: int) -> None:
        """Prove to each other that both sides have the secret; see `connect` and `accept`."""
        ours, role, other = (
            secrets.token_bytes(SECRET_BYTES),
            *(("client", "server") if is_client else ("server", "client")),
        )
        self.send("greet", ours)
        theirs = await self._opening_field("greet")
        proof = hmac.digest(secret, role.encode() + ours + theirs, "sha256")
        expected = hmac.digest(secret, other.encode() + theirs + ours, "sha256")
        if is_client:
            self.send("proof", proof)
        if not hmac.compare_digest(await self._opening_field("proof"), expected):
            raise WrongSecret("the peer does not have this cluster's secret")
        if not is_client:
            self.send("proof", proof)
        self._frames.max_bytes = max_bytes

    async def _opening_field(self, kind: str) -> bytes:
        frame = await self.read()
        if frame is None:
            raise WireError("the peer ended the connection during the handshake")
        if frame.kind != kind or len(frame.fields) != 1 or not isinstance(frame.fields[0], bytes):
            raise Malformed(f"the peer sent {frame.kind} instead of {kind}")
        if len(frame.fields[0]) != SECRET_BYTES:
            raise Malformed(f"{kind} has {len(frame.fields[0])} bytes, not {SECRET_BYTES}")
        return frame.fields[0]


async def connect(address: Address, secret: bytes, kinds: Collection[str], max_bytes: int = MAX_BYTES) -> FrameStream:
    """Open a connection to the server at an address. Raises OSError if nothing listens; WireError, like `accept`."""
    async with asyncio.timeout(OPENING_SECONDS):  # TimeoutError is an OSError
        reader, writer = await address.open()
    return await _opened(reader, writer, secret, kinds, max_bytes, is_client=True)


async def accept(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: bytes,
    kinds: Collection[str],
    max_bytes: int = MAX_BYTES,
) -> FrameStream:
    """A connection from a client, in the handler of an address's `listen`.

    Raises a WireError with the peer's fault, after sending it to the peer and closing the connection.
    """
    return await _opened(reader, writer, secret, kinds, max_bytes, is_client=False)


async def _opened(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: bytes,
    kinds: Collection[str],
    max_bytes: int,
    *,
    is_client: bool,
) -> FrameStream:
    frames = FrameReader({*kinds, *_OPENING}, OPENING_BYTES)
    stream = FrameStream(reader, writer, frames, FrameWriter(max_bytes))
    try:
        async with asyncio.timeout(OPENING_SECONDS):
            await stream.open(secret, is_client=is_client, max_bytes=max_bytes)
    except TimeoutError:
        stream.close("the handshake took too long")
        raise WireError(f"the peer did not open the connection within {OPENING_SECONDS:g} s") from None
    except BaseException as error:
        # a peer of another version can't read the reason; it reports its own
        stream.close(
            str(error) if isinstance(error, WireError) and not isinstance(error, OtherVersion | PeerRefused) else None
        )
        raise
    return stream


def new_secret(path: Path) -> bytes:
    """Write a new secret into a new file that only this user may read; return it."""
    secret = secrets.token_bytes(SECRET_BYTES)
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(secret.hex())
    return secret


def read_secret(path: Path) -> bytes:
    """The secret in a file: 64 hexadecimal digits. Raises ValueError, which does not show the contents."""
    try:
        secret = bytes.fromhex(path.read_text().strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"{path} must hold a secret of {2 * SECRET_BYTES} hexadecimal digits")
    return secret


log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.02, 0.5
"""Most seconds between attempts to connect: at first, and after many. The last value is below the registry's
`FIRST_WRITE_SECONDS`.
"""


def _trouble(error: OSError, stream: FrameStream | None) -> str:
    """The reason why a connection ended, for the log and for the peer, unless the peer ended it."""
    if isinstance(error, PlannedEnd):
        return str(error)
    trouble = f"{type(error).__name__}: {error}"
    if stream is not None and isinstance(error, WireError) and not isinstance(error, PeerRefused):
        stream.close(trouble)
    return trouble


async def stay_connected(
    peer: str, connect: Callable[[], Awaitable[FrameStream]], talk: Callable[[FrameStream], Awaitable[None]]
) -> None:
    """Connect and let `talk` read until the peer disconnects, repeatedly, until cancelled. A problem is logged once, as
    a warning unless the peer is being replaced (`PlannedEnd`).
    """
    retry, told, level = FIRST_RETRY_SECONDS, None, logging.WARNING
    while True:
        stream, trouble = None, None
        try:
            stream = await connect()
            retry, told, level = FIRST_RETRY_SECONDS, None, logging.WARNING
            await talk(stream)
            trouble = "it ended the connection"
        except FileNotFoundError:  # it does not listen yet
            pass
        except OSError as error:  # includes WireError
            trouble = _trouble(error, stream)
            level = logging.INFO if isinstance(error, PlannedEnd) else level
        except Exception:  # an error of this process itself: the peer must not be lost to it for good
            log.exception("a frame of %s could not be processed; connecting again", peer)
        finally:
            if stream is not None:
                stream.close()
        if trouble not in (None, told):
            log.log(level, "%s is not connected: %s", peer, trouble)
            told = trouble
        await asyncio.sleep(retry * random.uniform(0.5, 1))
        retry = min(LAST_RETRY_SECONDS, 2 * retry)
