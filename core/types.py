"""The values that cross boundaries: what a caller asks, what a step does, what it gave.

`StepPlan` is the only way from the scheduler to an executor and `StepResult` the only way back; `RequestOutput` is
what the engine hands outwards. No tensors here: the simulator runs the same code without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..memory.adapter_store import Adapter

BASE_SLOT = -1


class FinishReason(StrEnum):
    """Why a request ended; the values are OpenAI's, plus `abort` and `error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class InvalidRequest(ValueError):
    """A request that can't be served as asked. `field` names the wrong input, the text says how to mend it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to end.

    temperature: 0 is greedy. top_k: 0 keeps all tokens. top_p: nucleus mass in (0, 1].
    seed: same seed and prompt give the same tokens whatever else is in the batch; None draws one.
    stop_token_ids: end on any of these in addition to the model's end-of-sequence ids.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0.0 <= self.temperature <= 100.0:  # also refuses NaN
            raise InvalidRequest("temperature", f"temperature is {self.temperature}; it must be between 0 and 100")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest("top_p", f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < 0:
            raise InvalidRequest("top_k", f"top_k is {self.top_k}; use 0 for all tokens or a positive count")


@dataclass(slots=True)
class ScheduledRow:
    """One request's part of a step: tokens `start … start+len(tokens)` of it are computed.

    slot: index into `StepPlan.adapters`, `BASE_SLOT` for the base model.
    pages: the request's block table, covering at least `start + len(tokens)` tokens.
    sampling: set when the row's last token is the request's last known one, so that a new token is drawn.
    position of the drawn token is `start + len(tokens)`; `seed` makes the draw a function of (seed, position).
    """

    request_id: str
    slot: int
    tokens: list[int]
    start: int
    pages: list[int]
    sampling: SamplingParams | None
    seed: int

    @property
    def kv_len(self) -> int:
        """Tokens in the KV cache once this row has run."""
        return self.start + len(self.tokens)


@dataclass(slots=True)
class StepPlan:
    """One engine iteration: prefill rows first, then decode rows, rows of one slot adjacent within each (Punica §6).

    bucket: the captured batch size to pad to, None when the step holds a prefill chunk and runs unpadded.
    """

    step_id: int
    rows: list[ScheduledRow]
    adapters: list[Adapter]
    bucket: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def num_adapters(self) -> int:
        return len(self.adapters)


@dataclass(slots=True)
class StepResult:
    """What an executor gives back: the drawn token per request id, and what went wrong per request id."""

    tokens: dict[str, int] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What shared a step; carried on outputs so that a client can see its batch."""

    step_id: int
    num_requests: int
    num_adapters: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """New tokens of one request. `finish_reason` is set exactly once, on the last output.

    num_cached_tokens: prompt tokens whose KV came from the prefix cache.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    step: StepInfo | None = None
    num_cached_tokens: int = 0
