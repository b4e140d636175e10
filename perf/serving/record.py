"""Record of one request as its client saw it."""

from __future__ import annotations

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
