"""HTTP/1.1 on one connection: uvicorn's protocol over httptools, with limits, and with errors in OpenAI's shape.

Tests: tests/server/http/test_connections.py
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ..errors import ApiError
from .accepted import MAX_HEAD_BYTES, Accepted, Limits
from .connections import Connections
from .unix_socket import SCOPE

# Logger of clients' mistakes. They go into the response, not into the log, which clients could otherwise fill.
_log = logging.getLogger(f"{__name__}.requests")
_log.setLevel(logging.ERROR)

MAX_HEADERS = 128
MAX_PIPELINED = 4
"""Requests without a complete response, at which a connection reads no further until one has its response."""

PARSED_AT_ONCE = 4096
"""Bytes that are parsed before the number of requests is looked at again."""

_MESSAGES = {
    400: "this is no valid HTTP/1.1 request",
    408: "the request's body came too slowly: it paused for body_seconds, or took longer than whole_body_seconds and a "
    "second more for each body_bytes_per_second; send it faster, or raise these settings",
    413: "the body of a GET or HEAD request is larger than the 64 KiB that this server reads and ignores",
    431: "the request's line and headers are larger than this server takes",
}

_CODES = {408: "body_timed_out"}

MAX_IGNORED_BYTES = 64 << 10
"""The longest body of a GET or HEAD request. It means nothing (RFC 9110, section 9.3.1): it is read, so that the next
request is found after it, and no route sees it.
"""


class _Refused(Exception):
    """A refused request, with the status of the response."""


class HttpConnection(HttpToolsProtocol):
    """One client's connection. uvicorn's parser calls `on_url`, `on_header` and so on."""

    def __init__(self, connections: Connections, accepted: Accepted, *args: Any, **kwargs: Any) -> None:
        self._body = bytearray()
        self._unread = bytearray()  # received, but not parsed until a request has its response
        # The parser calls this for each chunk, and a chunk may be one byte: so it must not be a Python function.
        self.on_body = self._body.extend  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__(*args, **kwargs)
        self.parser: Any  # uvicorn forgets it in the end
        self.logger = _log
        self.network: str | None = None
        """Address of the client, if its connections are counted."""
        self._connections, self._accepted = connections, accepted
        self._cycles: list[Any] = []  # requests without a complete response, oldest first
        self._in_head = self._in_body = self._refused = False
        self._head_bytes = self._num_hosts = 0
        self._body_bytes = 0  # bytes of the body received so far
        self._ignored_bytes: int | None = None  # bytes of a body that means nothing; None: the body means something
        self._silent_bytes = 0  # bytes received since the parser last found anything
        self._since = self._read_at = time.monotonic()  # when a head, a body or a wait began, or bytes came

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)
        self.client = self.client or (self._accepted.address, 0)
        self._connections.begin(self._accepted, self)

    def close(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        if self._accepted.descriptors is not None:
            self._accepted.descriptors.close()
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn knows only the latest
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._read_at = time.monotonic()
        if self._refused:  # keep reading, and discard it, so that the client can read the reason
            return
        self._unread += data
        self._parse()

    def _parse(self) -> None:
        """Parse what was received, as long as there is a place for another request."""
        while self._unread and not self._refused:
            if len(self._cycles) >= MAX_PIPELINED and not self._in_body:
                self.flow.pause_reading()
                return
            size = 16 * PARSED_AT_ONCE if self._in_body else PARSED_AT_ONCE
            data = bytes(self._unread[:size])
            del self._unread[:size]
            self._parse_piece(data)
        if self._refused:
            self._unread.clear()

    def _parse_piece(self, data: bytes) -> None:
        if not (self._in_head or self._in_body or self._cycles):
            self._in_head, self._since = True, self._read_at
        self._silent_bytes += len(data)
        self._body_bytes += len(data)
        super().data_received(data)
        try:
            self._pass_body()
        except _Refused as refused:
            self._refuse(refused.args[0])
        if self._silent_bytes > MAX_HEAD_BYTES and not self._refused:
            self._refuse(431)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._accepted.descriptors is not None:
            self.scope[SCOPE] = self._accepted.descriptors  # pyright: ignore[reportGeneralTypeIssues]
        self._in_head, self._head_bytes, self._num_hosts = True, 0, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer, which must not pass for a header
            return
        super().on_header(name, value)
        name = self.headers[-1][0]
        self._head_bytes += len(name) + len(value)
        self._num_hosts += name == b"host"
        if len(self.headers) > MAX_HEADERS or self._head_bytes + len(self.url) > MAX_HEAD_BYTES:
            raise _Refused(431)
        if name == b"content-length" and self._has_idle_body and _exceeds(value, MAX_IGNORED_BYTES):
            raise _Refused(413)

    def on_headers_complete(self) -> None:
        needs_host = self.parser.get_http_version() != "1.0"
        if self._num_hosts > 1 or self._num_hosts < needs_host:
            raise _Refused(400)
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        self._in_head, self._in_body, self._since, self._silent_bytes = False, True, self._read_at, 0
        self._body_bytes, self._ignored_bytes = 0, 0 if self._has_idle_body else None

    def on_message_complete(self) -> None:
        self._pass_body()
        super().on_message_complete()
        self._in_body, self._silent_bytes = False, 0
        self._connections.note(self)

    @property
    def _has_idle_body(self) -> bool:
        """True if a body of the request whose head was parsed last means nothing."""
        return self.parser.get_method() in (b"GET", b"HEAD")

    def _pass_body(self) -> None:
        """Hand on what was received of a body. Raises _Refused for too much of one that means nothing."""
        if self._body:
            if self._ignored_bytes is None:
                super().on_body(bytes(self._body))
            else:
                self._ignored_bytes += len(self._body)
            self._body.clear()
            if self._ignored_bytes is not None and self._ignored_bytes > MAX_IGNORED_BYTES:
                raise _Refused(413)
            self._silent_bytes *= not self._cycles  # data after the response is useless

    def on_response_complete(self) -> None:
        self._cycles.pop(0)
        self._since = time.monotonic()
        super().on_response_complete()
        if self._refused and not self._cycles:
            self._read_no_more()
        elif self._unread and not self.transport.is_closing():
            self._parse()
        self._connections.note(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._connections.note(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._connections.note(self)

    @property
    def waits(self) -> bool:
        """True while the server waits for the client: for a request, for its body, or for the response to be read."""
        return self.flow.write_paused or len(self._cycles) <= self._in_body

    @property
    def answers(self) -> bool:
        """True while a request has no complete response."""
        return bool(self._cycles)

    def is_overdue(self, now: float, limits: Limits) -> bool:
        """True if a head was late, or a body paused for too long or fell below the minimum rate.

        The rest of a body whose response is complete may take as long as a head.
        """
        if self._awaits_body:
            allowed = limits.whole_body_seconds + self._body_bytes / limits.body_bytes_per_second
            is_late = now - self._read_at > limits.body_seconds or now - self._since > allowed
            return is_late and not self.flow.read_paused
        is_idle = not (self._in_head or self._in_body or self.cycle is None)  # uvicorn closes idle connections
        return (self._refused or not (is_idle or self._cycles)) and now - self._since > limits.head_seconds

    @property
    def _awaits_body(self) -> bool:
        """True while a request waits for its body and no other response is due first."""
        return self._in_body and not self._refused and len(self._cycles) == 1

    def expire(self) -> bool:
        """End an overdue connection; False if its client gets the reason first, and then as much time as a head."""
        if self._awaits_body and not self.cycle.response_started:
            self._refuse(408)
            return False
        return True

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP or a refused request. Called while the parser's error is being handled."""
        cause = getattr(sys.exc_info()[1], "__context__", None)
        self._refuse(cause.args[0] if isinstance(cause, _Refused) else 400)

    def _refuse(self, status: int) -> None:
        """Answer with an error, unless other responses are due first or a part of this one was sent."""
        answered = self._in_body and not self._cycles
        self._refused, self._since = True, time.monotonic()
        if self._in_body and len(self._cycles) == 1 and not self.cycle.response_started:
            cycle = self._cycles.pop()  # otherwise its route would answer, too
            cycle.disconnected = True
            cycle.message_event.set()
        if self._cycles:
            return
        if not answered:
            body = bytes(ApiError(status, _MESSAGES[status], code=_CODES.get(status, "invalid_http")).response().body)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self._read_no_more()

    def _read_no_more(self) -> None:
        """Close after the client does: closing with unread data would take the response back."""
        self._refused = True
        self.flow.resume_reading()
        if not self.transport.is_closing():
            try:
                self.transport.write_eof()
            except OSError:  # the client has reset the connection, which the system tells here first
                self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """Upgrades are not supported; the request is answered as it is."""


def _exceeds(length: bytes, most: int) -> bool:
    """True if a body's length, in digits, is more; the parser refuses what are no digits."""
    digits = length.strip().lstrip(b"0")
    return len(digits) > len(str(most)) or (digits.isdigit() and int(digits) > most)
