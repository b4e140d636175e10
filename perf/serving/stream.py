"""Reading a streamed answer: from bytes to events, and from events to a record."""

from __future__ import annotations

import json
from typing import Any

from .record import Record

DONE = b"[DONE]"


class StreamError(Exception):
    """A stream that is not an answer. kind: "stream error" if the server says so, "malformed" or "cut short"."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class EventReader:
    """Splits server-sent events off a stream of bytes that may be cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that is complete now; comments and other fields are passed over."""
        *blocks, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        events = (
            b"\n".join(line[5:].lstrip(b" ") for line in block.split(b"\n") if line.startswith(b"data:"))
            for block in blocks
        )
        return [event for event in events if event]


class AnswerReader:
    """Fills a record from the events of a completion or chat completion."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._events = EventReader()
        self.begun: float | None = None
        self._texts: list[str] = []
        self.done = False

    def feed(self, data: bytes, now: float) -> int:
        """Take what came at `now`; how many chunks with tokens there were. Raises StreamError."""
        before = len(self._record.token_times)
        for event in self._events.feed(data):
            if event == DONE:
                self.done = True
                continue
            try:
                self._take(json.loads(event), now)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError):
                raise StreamError("malformed", f"an event is no chunk of an answer: {event[:200]!r}") from None
        return len(self._record.token_times) - before

    def close(self) -> None:
        """The stream is over. Raises StreamError if the answer is not complete."""
        record = self._record
        record.text = "".join(self._texts)
        if record.finish_reason is None and not (self.done and self.begun is not None):
            raise StreamError("cut short", "the stream ended before the answer did")
        if not record.token_times:  # an answer without any text, from a server that does not count as it goes
            record.token_times.append(self.begun if self.begun is not None else record.ended)
        if not record.counted:
            record.output_tokens = len(record.token_times)

    def _take(self, chunk: dict[str, Any], now: float) -> None:
        if error := chunk.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise StreamError("stream error", str(message))
        record, usage = self._record, chunk.get("usage")
        grown = self._count(usage) if usage else False
        if not (choices := chunk.get("choices")):
            return
        choice = choices[0]
        part = choice.get("delta", choice)
        text = part.get("text" if part is choice else "content") or ""
        self._texts.append(text)
        if self.begun is None:
            self.begun = now
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
        if grown or (not usage and (text or part.get("reasoning_content") or part.get("reasoning"))):
            record.token_times.append(now)
        record.ended = now

    def _count(self, usage: dict[str, Any]) -> bool:
        """Take the server's counts; whether there are more output tokens than before."""
        record = self._record
        record.prompt_tokens = usage.get("prompt_tokens") or record.prompt_tokens
        output = usage.get("completion_tokens") or 0
        grown = output > record.output_tokens
        record.output_tokens, record.counted = output, True
        return grown
