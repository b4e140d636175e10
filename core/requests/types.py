"""Values that cross boundaries: a step's plan, its result, and a request's output.

The scheduler sends a `StepPlan` to an executor and gets a `StepResult` back; the engine returns `RequestOutput`s. No
tensors here: the simulator runs the same code without torch.

Tests: tests/core/test_engine.py, tests/core/test_moving.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from ...graphs.runner import StepMode
from ...memory.files.error import LoadFailure
from .blocks import NO_BLOCKS, PromptBlocks
from .media import MediaItem, position_shift

if TYPE_CHECKING:
    from ...memory.adapters.adapter import Adapter
    from ...memory.pages.states import StateSlots
    from .grammar_work import GrammarState
    from .pooling import PooledSum
    from .request_params import RequestParams

BASE_LORA_INDEX = -1

#: Tokens of a sequence whose one token has been sampled on the device and not been read by the host.
PENDING = [-1]

NOTHING = range(0)

PageList = list[int]
"""The block table of a running request: page numbers in order.

The request's `BlockTable` and its `ScheduledSequence`s share one list object. It only grows, and it is never used for
another request. Hence a plan sees the pages that are added after it was made, and a sequence belongs to a running
request exactly if both have the same list. When a request is preempted, its list is dropped, not emptied.
"""


class FinishReason(StrEnum):
    """Reason why a request ended. The values are OpenAI's, plus `abort` and `error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class SamplerState:
    """The sampler's state of a request."""

    edits: object = None
    """Its `LogitEdits`, created when missing."""
    grammar: GrammarState | None = None
    """Where it is in its grammar, once it has sampled a token."""


@dataclass(slots=True)
class ScheduledSequence:
    """One request in a step: the step computes its tokens `start … start+len(tokens)`."""

    request_id: str
    lora_index: int
    """Index into `StepPlan.adapters`; `BASE_LORA_INDEX` for the base model."""
    tokens: list[int]
    start: int
    pages: PageList
    """They have room for at least `start + len(tokens)` tokens."""
    params: RequestParams
    seed: int
    """Sampling is a function of (seed, position)."""
    samples: bool
    """True if it ends with the request's last known token: then a new one is sampled at position `kv_len`. False for a
    pooling request."""
    token_ids: list[int]
    """All known tokens of the request, prompt first; read only."""
    num_prompt_tokens: int
    state: SamplerState = field(default_factory=SamplerState, repr=False, compare=False)
    states: StateSlots | None = field(default=None, repr=False, compare=False)
    """Its recurrent states; None for a model without. A sequence that starts at 0 begins with a state of zeros."""
    state_step: int = 0
    """The step says which slot it reads, and which it writes."""
    lora_from: int = 0
    """Position of the first token that its adapter changes; before it, tokens are the base model's."""
    media: Sequence[MediaItem] = ()
    """The images of its prompt."""
    media_rows: Sequence[Any] = field(default=(), repr=False, compare=False)
    """The rows of each, a tensor."""
    blocks: PromptBlocks = NO_BLOCKS
    """Positions of its prompt that see each other."""
    drafts: int = 0
    """The last so many of `tokens` are proposed: they are not among `token_ids`. A token is sampled after each of them,
    too; the scheduler takes those that follow accepted drafts. KV of rejected ones is overwritten."""

    @property
    def unknown_tokens(self) -> list[int]:
        """Tokens that are proposed: its drafts, or those before a position that `verification` makes of them."""
        return self.tokens[len(self.token_ids) - self.start :]

    @property
    def kv_len(self) -> int:
        """Tokens in the KV cache after this step."""
        return self.start + len(self.tokens)

    @property
    def num_base_tokens(self) -> int:
        """Its first tokens that its adapter does not change."""
        return min(max(0, self.lora_from - self.start), len(self.tokens))

    @property
    def is_prompt(self) -> bool:
        """True if it computes a prompt, or tokens again, be it the last one of these alone."""
        return len(self.tokens) - self.drafts > 1 or self.kv_len <= self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if the request asks for logprobs of prompt tokens that follow these tokens."""
        return self.params.prompt_logprobs is not None and self.start + 1 < self.num_prompt_tokens

    @property
    def pooled(self) -> range:
        """Indices, among its tokens, of those whose hidden states the step sums up for a pooling request."""
        pooling, count = self.params.pooling, len(self.tokens)
        if pooling is None:
            return NOTHING
        if pooling == "mean":
            return range(count)
        if pooling == "cls":
            return range(int(self.start == 0))
        return range(count - (self.kv_len == self.num_prompt_tokens), count)

    @property
    def wants_states(self) -> bool:
        """True if results are made of its tokens' hidden states, or logits, after the step."""
        return self.params.pooling is not None or self.wants_prompt_logprobs

    @property
    def position_shift(self) -> int:
        """What its first token's position differs by from its place in the sequence: see `axis_positions`."""
        return position_shift(self.media, self.start) if self.media else 0

    @property
    def sees(self) -> bool:
        """True if any of its tokens stands for a row of an image, or is one of the image's ends."""
        return any(True for item in self.media for _ in item.spans(self.start, self.kv_len))

    @property
    def looks_back(self) -> bool:
        """True if the tokens generated so far change which ones may be sampled next."""
        return looks_back(self.params)

    @property
    def is_ragged(self) -> bool:
        """True if no captured step can compute it: it has several known tokens, wants prompt logprobs, is pooled,
        or has a row of an image.
        """
        return len(self.tokens) - self.drafts != 1 or self.wants_states or self.sees


def looks_back(params: RequestParams) -> bool:
    """True if the tokens generated so far change which ones may be sampled next."""
    return params.grammar is not None or forbids_drafts(params)


def forbids_drafts(params: RequestParams) -> bool:
    """True if proposed tokens can't be verified: the edits of logits after them are those of the known tokens only."""
    penalties = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    return bool(penalties or any(len(word) > 1 for word in params.bad_words))


def adapter_runs(sequences: Sequence[ScheduledSequence]) -> tuple[list[int], list[int]]:
    """`lora_index` and number of tokens of runs of tokens, in a plan's order. A sequence is one run, or two if its
    adapter begins after its first token.
    """
    lora_indices = [sequence.lora_index for sequence in sequences]
    lengths = [len(sequence.tokens) for sequence in sequences]
    chunks = takewhile(lambda sequence: len(sequence.tokens) > 1, sequences)  # they come first
    divided = [index for index, chunk in enumerate(chunks) if chunk.start < chunk.lora_from < chunk.kv_len]
    for index in reversed(divided):
        before = sequences[index].num_base_tokens
        lora_indices.insert(index, BASE_LORA_INDEX)
        lengths[index : index + 1] = before, lengths[index] - before
    return lora_indices, lengths


@dataclass(slots=True)
class StepPlan:
    """One step: sequences of several tokens first, then those of one; sequences of one adapter are adjacent within each
    (Punica §6).

    `plan_wire` has its form for another process.
    """

    step_id: int
    sequences: list[ScheduledSequence]
    """The list never changes: the same list in a later plan has the same sequences. Sequences of decoding requests are
    reused; `Scheduler.update` advances them to the next step."""
    adapters: list[Adapter]
    bucket: int | None = None
    """The captured batch size to pad to; None if a sequence is ragged: then the step runs unpadded. With drafts it is
    the number of tokens; a GPU pads that to a size that it captures."""
    merged: Adapter | None = None
    """The adapter merged into the weights of this step; it may have no sequences."""
    sources: Sequence[int] | None = None
    """Of an async step, launched before the tokens of the step before it were read. For each sequence: the index of
    the sequence of the step before whose token replaces `PENDING`, or -1 if its tokens are known. None if all tokens
    are known."""
    num_tokens: int = field(init=False)
    num_drafts: int = field(init=False, default=0)
    """Tokens that are proposed."""

    def __post_init__(self) -> None:
        sequences = self.sequences
        if self.bucket is not None and not (sequences and sequences[0].drafts):  # those with drafts come first
            self.num_tokens = len(sequences)
            return
        self.num_tokens = sum([len(sequence.tokens) for sequence in sequences])
        self.num_drafts = sum([sequence.drafts for sequence in sequences])

    @property
    def mode(self) -> StepMode:
        if self.merged is not None:
            return StepMode.MERGED
        return StepMode.LORA if self.adapters else StepMode.BASE

    @property
    def num_adapters(self) -> int:
        return len(self.adapters)

    def continue_from(self, plan: StepPlan) -> None:
        """Let the sequences continue from the tokens that `plan`, which still runs, samples.

        Two sequences belong to one request if they have the same list of pages (`PageList`): the list of a stale
        sequence belongs to no request any more.
        """
        sequences = plan.sequences
        if self.sequences is sequences:
            self.sources = range(len(sequences))
            for sequence in sequences:
                sequence.start += 1
                sequence.state_step += 1
                sequence.tokens = PENDING
            return
        positions = {id(sequence.pages): position for position, sequence in enumerate(sequences) if sequence.samples}
        self.sources = sources = [positions.get(id(sequence.pages), -1) for sequence in self.sequences]
        for sequence, position in zip(self.sequences, sources, strict=True):
            if position >= 0:
                before = sequences[position]
                sequence.start, sequence.tokens = before.start + len(before.tokens), PENDING
                sequence.state_step = before.state_step + 1

    def rows_with_logits(self) -> list[ScheduledSequence]:
        """The sequences that the step has logits for, in order. Each draft is a sequence of its own."""
        return positions_of(self) if self.num_drafts else self.sequences


def positions_of(plan: StepPlan) -> list[ScheduledSequence]:
    """The sequences of a step with drafts, with each position that has logits as a sequence of its own.

    Position i of a sequence with drafts ends with its draft i; position 0 ends with its last known token and keeps the
    request's id. The other ids occur once in the step.
    """
    taken = {sequence.request_id for sequence in plan.sequences}
    rows: list[ScheduledSequence] = []
    for sequence in plan.sequences:
        if not sequence.drafts:
            rows.append(sequence)
            continue
        known = len(sequence.tokens) - sequence.drafts
        for count in range(sequence.drafts + 1):
            request_id = sequence.request_id
            if count:
                request_id = f"{request_id} after {count} drafts"
                while request_id in taken:
                    request_id += "'"
                taken.add(request_id)
            rows.append(_position(sequence, request_id, sequence.tokens[: known + count]))
    return rows


def _position(sequence: ScheduledSequence, request_id: str, tokens: list[int]) -> ScheduledSequence:
    """The same sequence with other tokens and no drafts. `dataclasses.replace` would take many times as long."""
    return ScheduledSequence(
        request_id=request_id,
        lora_index=sequence.lora_index,
        tokens=tokens,
        start=sequence.start,
        pages=sequence.pages,
        params=sequence.params,
        seed=sequence.seed,
        samples=sequence.samples,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        state=sequence.state,
        states=sequence.states,
        state_step=sequence.state_step,
        lora_from=sequence.lora_from,
        media=sequence.media,
        media_rows=sequence.media_rows,
        blocks=sequence.blocks,
    )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprob of a token under the model's raw distribution, with alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely alternatives, best first; or those that `logprob_token_ids` names, and the token among them."""
    rank: int | None = None
    """For a prompt token: one more than the number of likelier tokens. None for a generated token."""


@dataclass(slots=True)
class StepResult:
    """An executor's results of a step, by request id."""

    tokens: dict[str, int] = field(default_factory=dict)
    """Sampled tokens."""
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Of the prompt tokens that follow the sequence's tokens, in order."""
    pooled: dict[str, PooledSum] = field(default_factory=dict)
    """Of pooling requests: the sum of the hidden states of this step's pooled tokens."""
    errors: dict[str, str] = field(default_factory=dict)
    unready: set[str] = field(default_factory=set)
    """Requests without a result: their adapter missed its deadline."""
    after_drafts: list[StepResult] = field(default_factory=list)
    """Tokens and logprobs after accepted drafts: item i is of the sequences whose first i + 1 drafts were accepted."""
    grammar_seconds: dict[str, float] = field(default_factory=dict)
    """CPU seconds for the last token of requests with heavy grammars (`GrammarState`); 0 for requests whose grammar is
    no longer heavy."""

    def retract(self, request_id: str) -> None:
        """Discard a request's results, because its adapter did not arrive in time."""
        for found in (self.tokens, self.logprobs, self.prompt_logprobs, self.pooled, self.errors):
            found.pop(request_id, None)
        for after in self.after_drafts:
            after.tokens.pop(request_id, None)
        self.unready.add(request_id)

    def merge(self, other: StepResult) -> None:
        self.tokens.update(other.tokens)
        self.logprobs.update(other.logprobs)
        self.prompt_logprobs.update(other.prompt_logprobs)
        self.pooled.update(other.pooled)
        self.errors.update(other.errors)
        self.unready |= other.unready
        self.grammar_seconds.update(other.grammar_seconds)
        for index, after in enumerate(other.after_drafts):
            if index < len(self.after_drafts):
                self.after_drafts[index].merge(after)
            else:
                self.after_drafts.append(after)


class CannotMerge(RuntimeError):
    """An adapter can't be merged into the weights, now or ever; its requests are served unmerged."""


class StepInfo(NamedTuple):
    """Size of a step. Outputs carry it: clients can see their batch."""

    step_id: int
    num_requests: int
    num_adapters: int
    num_tokens: int


NOT_FINITE = "the model produced logits that are not finite"
"""Error of a sequence without an argmax."""

ALL_BANNED = (
    "every token is banned: grammar, allowed_token_ids, bad_words, logit_bias and min_tokens leave none to sample, or "
    "the grammar is too complex at this point of the output; simplify it, or ban fewer tokens"
)
"""Error of a sequence with nothing to sample."""


class RequestOutput(NamedTuple):
    """New tokens of one request."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    """Set exactly once, on the last output."""
    stop_token_id: int | None = None
    error: str | None = None
    step: StepInfo | None = None
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache; with the first output."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per new token, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """One per prompt token except the first, if asked for; with the first output."""
    failure: LoadFailure | None = None
    """The part of its adapter, or of pinned adapters, in the error."""
    queue_seconds: float | None = None
    """From its arrival to its first admission; with the first output."""
    was_draft: bool = False
    """True if the token was proposed and accepted."""
    num_rejected_drafts: int = 0
    """Proposed tokens that were computed in vain; with the last token of their step."""
    num_preemptions: int = 0
    """Of the request so far; with the first and the last output."""
    pooled: bytes | None = None
    """The result of a pooling request, whose only output this is: its vector, or the scores that a head gives it, as
    `pooling.to_bytes` writes them."""
    page_seconds: float = 0.0
    """Pages of the pool times the seconds that it has held them here so far; with the first and the last output, and
    whenever it has filled a block."""
