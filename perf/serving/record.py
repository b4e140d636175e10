"""Record of a request as its client saw it: times and answer, and how they are read from a stream's bytes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


class LoadError(Exception):
    """A load that can't be sent; the text says what to do about it."""


@dataclass(slots=True)
class Record:
    """One request's times, in seconds since the load began, and its answer.

    Latencies count from `scheduled`, when the request was to arrive, whether or not the client got to send it then: a
    client that falls behind must not make the server look fast (coordinated omission).

    scheduled: planned arrival. sent: when the client began to send. token_times: when each chunk that brought tokens
    came. ended: when the answer was complete, or the request failed. output_tokens: by the server's count where
    `counted`, else one per chunk. error: what kind of failure, "" for none; detail: its message.
    """

    model: str
    scheduled: float
    sent: float = 0.0
    token_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = False
    text: str = ""
    finish_reason: str | None = None
    error: str = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.token_times[0] - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for answers of one token."""
        if self.output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: gaps between chunks that brought tokens."""
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def e2e(self) -> float:
        """End-to-end latency."""
        return self.ended - self.scheduled

    @property
    def client_delay(self) -> float:
        """Seconds that the request waited within the client."""
        return self.sent - self.scheduled

    def to_json(self) -> dict[str, Any]:
        """Everything but the text."""
        return {name: value for name, value in asdict(self).items() if name != "text"}


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
