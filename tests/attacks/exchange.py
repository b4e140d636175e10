"""Bytes sent to a server as they are, and the answer to them."""

from __future__ import annotations

import io
import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any, cast

from .attacked_server import Address

HANG_SECONDS = 20.0
HANGS = 3
"""Times in a row that nothing may come for so long: this process may itself have been stopped."""
PAUSE = 0.3
"""Seconds until a client that sent half a request says that this was all."""


class NoAnswer(Exception):
    """The server closed the connection, or said nothing for too long."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP response. kind: its content type."""

    status: int
    kind: str
    body: bytes
    has_body: bool = True

    def essence(self) -> Any:
        """Return the part that must be equal each time: texts and finish reasons, or a body without texts."""
        if self.kind.startswith("text/event-stream"):
            events = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
            if not events or events[-1] != "[DONE]":
                return "a stream without an end"
            parts: dict[int, list[Any]] = {}
            for event in map(json.loads, events[:-1]):
                if "error" in event:
                    return event
                for choice in event["choices"]:
                    text, ends = parts.setdefault(choice["index"], ["", None])
                    said = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                    parts[choice["index"]] = [text + said, choice["finish_reason"] or ends]
            return sorted((index, *part) for index, part in parts.items())
        said = json.loads(self.body)
        if not isinstance(said, dict) or "choices" not in said:
            return said
        texts = (
            (one["index"], one.get("text", (one.get("message") or {}).get("content")), one["finish_reason"])
            for one in said["choices"]
        )
        return sorted((index, text or "", ends) for index, text, ends in texts)

    def fault(self) -> str | None:
        """Return the fault of an answer that no client should get, whatever it sent."""
        if self.status < 300 and b'"code":"internal_error"' in self.body and self.kind.startswith("text/event-stream"):
            return f"a stream with {self.body[-300:]!r}"
        if self.status < 300 or self.status == 307:  # to a path without its last slash
            return None
        if not (400 <= self.status < 500 or self.status in (501, 503)):
            return f"status {self.status}"
        if not self.has_body:
            return None
        try:
            error = json.loads(self.body)["error"]
            sound = (
                set(error) - {"details"} == {"message", "type", "param", "code"} and 0 < len(error["message"]) <= 1000
            )
            return None if sound and isinstance(error["type"], str) else f"an error like {self.body[:200]!r}"
        except (ValueError, TypeError, KeyError):
            return f"status {self.status} with {self.body[:200]!r}"


def exchange(address: Address, raw: bytes, may_wait: bool = False) -> Answer:
    """Send bytes and read one answer. Raises NoAnswer.

    may_wait: the bytes sent may be half a request, so after a while no more is promised.
    """
    is_head = raw.startswith(b"HEAD ")
    try:
        with socket.create_connection(address, timeout=HANG_SECONDS) as connection:
            with suppress(OSError):  # it may be answered before all of it was read
                connection.sendall(raw)
            response = HTTPResponse(
                cast(socket.socket, _Received(connection, may_wait)), method="HEAD" if is_head else None
            )
            response.begin()
            return Answer(response.status, response.headers.get("content-type", ""), response.read(), not is_head)
    except (HTTPException, OSError, ValueError) as error:
        raise NoAnswer(f"no whole answer, {type(error).__name__}: {error}") from None


class _Received(io.RawIOBase):
    """Bytes of a connection, for the standard library to read; a timeout is not yet the end of them."""

    def __init__(self, connection: socket.socket, may_wait: bool) -> None:
        self._connection, self._count = connection, 0
        self._timeouts = [HANG_SECONDS] * HANGS + [PAUSE] * may_wait
        connection.settimeout(self._timeouts[-1])

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while self._timeouts:
            try:
                count = self._connection.recv_into(buffer)
                self._count += count
                return count
            except TimeoutError:
                if self._timeouts.pop() == PAUSE:
                    self._connection.shutdown(socket.SHUT_WR)
                    self._connection.settimeout(HANG_SECONDS)
        raise NoAnswer(f"it hangs; {self._count} bytes came")
