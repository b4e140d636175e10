"""HTTP/1.1 on one connection: uvicorn's, with deadlines, and with errors in OpenAI's shape from the parser up."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from .connections import MIN_BYTES_PER_SECOND, ConnectionLimits, Connections, CountingTransport, Phase
from .errors import ApiError

#: Logger of what clients do wrong, which is told to them and not to the log: they could fill it otherwise.
_log = logging.getLogger(f"{__name__}.requests")
_log.setLevel(logging.ERROR)

HOLD_SECONDS = 0.002, 0.5
"""After how long it is first looked whether an answer was taken that has another request behind it; and at most."""

_PARSER_MESSAGES = {
    413: "the body is larger than this server takes",
    431: "the request's line and headers are larger than this server takes",
    501: "this transfer-encoding is not known here; send the body with a content-length, or chunked",
}


class HttpConnection(H11Protocol):
    """One client's connection."""

    def __init__(self, connections: Connections, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = _log
        self.place: str | None = None
        """Address of the client, if connections from there are counted."""
        self.phase = Phase.HEAD
        self.since = time.monotonic()
        """Since when it is in its phase."""
        self._connections = connections
        self._refused = False  # what still comes is read, so that the client can read why, and thrown away
        self._cycle_seen: Any = None
        self._hold: asyncio.TimerHandle | None = None
        self._received = 0
        self._received_before = 0  # bytes, when the phase began
        self._unread_since: float | None = None  # since when the client has not taken all that was sent
        self._taken_before = 0
        self._taken = 0
        self._took_at = 0.0  # when it was last seen to have taken something of that

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.transport: Any = CountingTransport(transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        self._unset_keepalive_if_required()
        if self._hold is not None:
            self._hold.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if not self._refused:
            super().data_received(data)

    def on_response_complete(self) -> None:
        """Begin the next request, if it came already, once the client has taken this one's answer.

        Whoever sends many requests at once and reads nothing would else have them all answered into the buffers.
        """
        self._next_when_taken(HOLD_SECONDS[0])

    def _next_when_taken(self, seconds: float) -> None:
        self._hold = None
        has_next = bool(self.conn.trailing_data[0])
        if has_next and not self.transport.is_closing() and self.transport.unread:
            again = partial(self._next_when_taken, min(2 * seconds, HOLD_SECONDS[1]))
            self._hold = self.loop.call_later(seconds, again)
        else:
            super().on_response_complete()

    def look(self, now: float) -> Phase:
        """State of the connection; `since` is kept to the first look that found it so."""
        cycle = self.cycle
        if self._refused:
            phase = Phase.HEAD
        elif cycle is not None and not cycle.response_complete:
            phase = Phase.BODY if self.conn.their_state is h11.SEND_BODY else Phase.ANSWER
        elif self.conn.their_state is h11.SEND_BODY:
            phase = Phase.BODY  # it was answered before its body had come
        else:
            reads_on = not self.holds and self.conn.trailing_data[0]
            phase = Phase.HEAD if cycle is None or reads_on else Phase.IDLE
        if phase is not self.phase or cycle is not self._cycle_seen:
            self.phase, self.since, self._cycle_seen = phase, now, cycle
            self._received_before = self._received
        return phase

    def overdue(self, now: float, limits: ConnectionLimits) -> str | None:
        """Reason why it is to be cut; None while it gets on."""
        phase, seconds = self.look(now), now - self.since
        if phase is Phase.HEAD and seconds > limits.head:
            return "no request came"
        if phase is Phase.BODY:
            earned = (self._received - self._received_before) / MIN_BYTES_PER_SECOND
            if seconds > limits.body + earned:
                return "the body did not come"
        taken = self.transport.taken
        if taken > self._taken:
            self._taken, self._took_at = taken, now
        if not self.transport.unread:
            self._unread_since = None
        elif self._unread_since is None:
            self._unread_since, self._took_at, self._taken_before = now, now, taken
        elif now - self._unread_since > limits.send + (taken - self._taken_before) / MIN_BYTES_PER_SECOND:
            return "the answer was not read"
        return None

    @property
    def holds(self) -> bool:
        """True if a request waits until the answer before it was taken."""
        return self._hold is not None

    @property
    def is_unread(self) -> bool:
        """True if the client has not taken all that was sent, as far as has been looked."""
        return self._unread_since is not None

    def unread_seconds(self, now: float) -> float:
        """Seconds since the client took something of what lies unread, as far as has been looked."""
        return 0.0 if self._unread_since is None else now - self._took_at

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP. Called where the parser's error is being handled, which says more than `msg`."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        if status not in _PARSER_MESSAGES:
            status = 400
        if self.cycle is not None and not self.cycle.response_complete:  # the route would answer, too
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            message = _PARSER_MESSAGES.get(status, "this is no valid HTTP/1.1 request")
            body = bytes(ApiError(status, message, code="invalid_http").response().body)
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            answer = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            for part in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part))
        self._refused = True
        self.transport.write_eof()  # closing with something unread would take the answer back

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing is upgraded here; the request is answered as it is."""
