"""Values that cross boundaries: a step's plan, its result, and a request's output.

`StepPlan` is the only way from the scheduler to an executor and `StepResult` the only way back; `RequestOutput` is
what the engine returns. No tensors here: the simulator runs the same code without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from ...graphs.runner import StepMode
from ...memory.files.error import LoadFailure

if TYPE_CHECKING:
    from ...memory.adapters.adapter import Adapter
    from .sampling_params import SamplingParams

BASE_LORA_INDEX = -1

#: Tokens of a row with one token, which the device has drawn and the host has not read.
PENDING = [-1]


class FinishReason(StrEnum):
    """Reason why a request ended; the values are OpenAI's, plus `abort` and `error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class SamplerState:
    """The sampler's own state of a request: its `LogitEdits`, created when missing."""

    edits: object = None


@dataclass(slots=True)
class ScheduledSequence:
    """One request's part of a step, which computes its tokens `start … start+len(tokens)`.

    lora_index: index into `StepPlan.adapters`, `BASE_LORA_INDEX` for the base model.
    pages: the request's block table, covering at least `start + len(tokens)` tokens.
    params: how to sample and what to report. seed: makes sampling a function of (seed, position).
    samples: the row ends with the request's last known token, so that a new one is sampled at position `kv_len`.
    token_ids: all known tokens of the request, prompt first; read only.
    state: the sampler's, which the request keeps from step to step.
    """

    request_id: str
    lora_index: int
    tokens: list[int]
    start: int
    pages: list[int]
    params: SamplingParams
    seed: int
    samples: bool
    token_ids: list[int]
    num_prompt_tokens: int
    state: SamplerState = field(default_factory=SamplerState, repr=False, compare=False)

    @property
    def kv_len(self) -> int:
        """Tokens in the KV cache after this row."""
        return self.start + len(self.tokens)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if the request asks for log-probabilities of prompt tokens that follow this row's."""
        return self.params.prompt_logprobs is not None and self.start + 1 < self.num_prompt_tokens

    @property
    def looks_back(self) -> bool:
        """True if the tokens generated so far change what may be sampled next."""
        params = self.params
        penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        return bool(penalties or params.grammar is not None or any(len(word) > 1 for word in params.bad_words))

    @property
    def is_ragged(self) -> bool:
        """True if no captured step can compute it: it has several tokens, or prompt tokens to score."""
        return len(self.tokens) != 1 or self.wants_prompt_logprobs


@dataclass(slots=True)
class StepPlan:
    """One engine iteration: prefill rows first, then decode rows, rows of one slot adjacent within each (Punica §6).

    sequences: rows of decoding requests are reused: `Scheduler.update` moves them to the next step. The list never
    changes: the same list in a later plan has the same rows. bucket: the captured batch size to pad to; None when a row
    is ragged, and the step runs unpadded. merged: the adapter that the weights of a step in merged mode have in them;
    it may have no rows. sources: of a step launched before the one before it was read: for each row, the row of the
    step before with the token that it goes on from, and has instead of `PENDING`, or -1 if its tokens are known; None
    when all are known. mode: the weights it runs with. `plan_wire` has its form for another process.
    """

    step_id: int
    sequences: list[ScheduledSequence]
    adapters: list[Adapter]
    bucket: int | None = None
    merged: Adapter | None = None
    sources: Sequence[int] | None = None
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        sequences = self.sequences
        self.num_tokens = (
            len(sequences) if self.bucket is not None else sum([len(sequence.tokens) for sequence in sequences])
        )

    @property
    def mode(self) -> StepMode:
        if self.merged is not None:
            return StepMode.MERGED
        return StepMode.LORA if self.adapters else StepMode.BASE

    @property
    def num_adapters(self) -> int:
        return len(self.adapters)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a token under the model's raw distribution, and the most likely alternatives, best first; or
    the ones that `logprob_token_ids` names, and the token among them.

    rank: of a prompt's token, one more than there are likelier tokens; None of a generated one.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(slots=True)
class StepResult:
    """An executor's results by request id: sampled tokens, requested log-probabilities, errors.

    prompt_logprobs: of the prompt tokens that follow the row's tokens, in order.
    unready: requests with void rows: their adapter did not arrive by the deadline.
    grammar_seconds: time of a processor for the last token, of requests with heavy grammars (`GrammarPlace`), and 0 of
    those that no longer have one.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    unready: set[str] = field(default_factory=set)
    grammar_seconds: dict[str, float] = field(default_factory=dict)

    def retract(self, request_id: str) -> None:
        """Discard a request's results, because its adapter did not arrive in time."""
        for found in (self.tokens, self.logprobs, self.prompt_logprobs, self.errors):
            found.pop(request_id, None)
        self.unready.add(request_id)

    def merge(self, other: StepResult) -> None:
        self.tokens.update(other.tokens)
        self.logprobs.update(other.logprobs)
        self.prompt_logprobs.update(other.prompt_logprobs)
        self.errors.update(other.errors)
        self.unready |= other.unready
        self.grammar_seconds.update(other.grammar_seconds)


class CannotMerge(RuntimeError):
    """An adapter can't be made part of the weights, now or at all; its requests are served unmerged."""


class StepInfo(NamedTuple):
    """Size of a step; carried on outputs so that clients can see their batch."""

    step_id: int
    num_requests: int
    num_adapters: int
    num_tokens: int


NOT_FINITE = "the model produced logits that are not finite"
"""Error of a row without a most likely token."""

ALL_BANNED = (
    "every token is banned: grammar, allowed_token_ids, bad_words, logit_bias and min_tokens leave none to sample, or "
    "the grammar is too complex where the answer has come to; ask for less"
)
"""Error of a row with nothing to sample."""


class RequestOutput(NamedTuple):
    """New tokens of one request. `finish_reason` is set exactly once, on the last output.

    num_cached_tokens: prompt tokens with KV from the prefix cache, with the first output.
    logprobs: one per new token, when asked for. prompt_logprobs: one per prompt token but the first, with the first
    output, when asked for. failure: what its adapter, or pinned ones, have to do with the error. queue_seconds: from
    its arrival to its first admission, with the first output. num_preemptions: of the request, with
    its last output at the latest.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    step: StepInfo | None = None
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    failure: LoadFailure | None = None
    queue_seconds: float | None = None
    num_preemptions: int = 0
