"""Bytes sent to a server as they are, and the answer to them."""

from __future__ import annotations

import io
import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any

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
        """Return what must be equal each time: the texts and their ends, or all that a route without texts says."""
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
        texts = ((one["index"], one.get("text", (one.get("message") or {}).get("content")), one["finish_reason"])
                 for one in said["choices"])  # fmt: skip
        return sorted((index, text or "", ends) for index, text, ends in texts)

    def fault(self) -> str | None:
        """Return the fault of an answer that no client should get, whatever it sent."""
        if self.status < 300 or self.status == 307:  # to a path without its last slash
            return None
        if not (400 <= self.status < 500 or self.status in (501, 503)):
            return f"status {self.status}"
        if not self.has_body:
            return None
        try:
            error = json.loads(self.body)["error"]
            sound = set(error) == {"message", "type", "param", "code"} and 0 < len(error["message"]) <= 1000
            return None if sound and isinstance(error["type"], str) else f"an error like {self.body[:200]!r}"
        except (ValueError, TypeError, KeyError):
            return f"status {self.status} with {self.body[:200]!r}"


def exchange(address: str, raw: bytes, may_wait: bool = False) -> Answer:
    """Send bytes and read one answer. Raises NoAnswer.

    may_wait: what was sent may be half a request, so that after a while no more is promised.
    """
    host, port = address.split(":")
    is_head = raw.startswith(b"HEAD ")
    try:
        with socket.create_connection((host, int(port)), timeout=HANG_SECONDS) as connection:
            with suppress(OSError):  # it may be answered before all of it was read
                connection.sendall(raw)
            received, silences, is_open = b"", 0, may_wait
            connection.settimeout(PAUSE if may_wait else HANG_SECONDS)
            while not _is_whole(received, is_head):
                try:
                    part = connection.recv(1 << 16)
                except TimeoutError:
                    if is_open:
                        connection.shutdown(socket.SHUT_WR)
                        connection.settimeout(HANG_SECONDS)
                        is_open = False
                    elif (silences := silences + 1) == HANGS:
                        raise NoAnswer(f"it hangs; {len(received)} bytes came") from None
                    continue
                if not part:
                    break
                received += part
    except OSError as error:
        raise NoAnswer(f"{type(error).__name__}: {error}") from None
    try:
        response = HTTPResponse(_Received(received), method="HEAD" if is_head else None)
        response.begin()
        return Answer(response.status, response.headers.get("content-type", ""), response.read(), not is_head)
    except (HTTPException, OSError, ValueError) as error:
        raise NoAnswer(f"no whole answer, {error!r}: {received[:200]!r}") from None


class _Received:
    """Bytes in a socket's clothes, for the standard library to read."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _is_whole(received: bytes, is_head: bool) -> bool:
    head, blank, body = received.partition(b"\r\n\r\n")
    if blank and head.startswith(b"HTTP/1.1 100"):
        return _is_whole(body, is_head)
    lines = head.lower().split(b"\r\n")
    if not blank or is_head:
        return bool(blank)
    length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), None)
    return len(body) >= length if length is not None else body.endswith(b"0\r\n\r\n")
