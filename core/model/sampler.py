"""Sampling: from a step's logits to its tokens and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from ...ops.sampling.sampling import (
    RowLogprobs,
    RowSamplingParams,
    logprob_rows,
    pick,
    read_logprobs,
    row_logprobs,
    sample_into,
    uniform,
)
from ...ops.upload import on_device
from ..requests.grammars import Grammars
from ..requests.logit_edits import edited, grammar_seconds
from ..requests.request_params import MAX_LOGPROBS, RequestParams
from ..requests.types import (
    ALL_BANNED,
    BASE_LORA_INDEX,
    NOT_FINITE,
    ScheduledSequence,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from ...memory.adapters.adapter import Adapter


class Sampling(Protocol):
    """Samples from rows of logits, and computes log-probabilities."""

    def sample(
        self, logits: torch.Tensor, rows: Sequence[int], row_params: Sequence[RowSamplingParams]
    ) -> list[int]: ...

    def row_logprobs(
        self, logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], counts: Sequence[int]
    ) -> RowLogprobs: ...


def _reshapes_logits(params: RequestParams) -> bool:
    """True if anything except temperature, min_p, top_k and top_p changes the distribution."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.logit_bias
        or params.min_tokens
        or params.bad_words
        or params.allowed_token_ids is not None
        or params.grammar is not None
    )


def needs_logits(row: ScheduledSequence) -> bool:
    """True if a request needs more than the argmax of its logits."""
    params = row.params
    return row.samples and (params.temperature != 0 or _reshapes_logits(params) or params.logprobs is not None)


def adding(plan: StepPlan, rows: Sequence[ScheduledSequence]) -> dict[int, Adapter]:
    """The rows of a step whose adapter adds tokens, by index, and the adapter. rows: of `positions_of`, or the plan's
    sequences.
    """
    if not any(adapter.manifest.num_tokens for adapter in plan.adapters):
        return {}
    used = {index: plan.adapters[row.lora_index] for index, row in enumerate(rows) if row.lora_index != BASE_LORA_INDEX}
    return {index: adapter for index, adapter in used.items() if adapter.manifest.num_tokens}


def asking_rows(plan: StepPlan, rows: Sequence[ScheduledSequence]) -> list[int]:
    """Indices of the rows that need more than the argmax of their logits."""
    return [index for index, row in enumerate(rows) if needs_logits(row)]


def plain_row_params(row: ScheduledSequence) -> RowSamplingParams | None:
    """Sampling parameters of a request that samples from the model's unedited logits; else None."""
    if not row.samples or not row.params.temperature or _reshapes_logits(row.params):
        return None
    return _row_params(row)


class RowLogits(NamedTuple):
    """Logits of some of a step's entries."""

    values: torch.Tensor
    """`[…, vocab]` float32."""
    at: Mapping[int, int]
    """For each of these entries, its index in the step and the row of its logits."""


def sample_tokens(
    rows: Sequence[ScheduledSequence],
    argmax: Sequence[int],
    logits: RowLogits | None,
    sampling: Sampling,
    eos_token_ids: Collection[int],
    chosen: Collection[int] = (),
    grammars: Grammars | None = None,
) -> StepResult:
    """Sample a token for every entry that needs one.

    argmax: of each entry, or -1 if its logits are not finite: then it gets an error instead of a token, without
    affecting others. Entries without `logits` already have their token, the argmax or a sampled one, and cost nothing
    here. For entries in `chosen`, which have a token too, only log-probabilities are computed. grammars: the model's.
    """
    if logits is None:
        return _result(rows, argmax, argmax)
    values, at = logits
    asked = _Asked(rows, at, chosen)
    tokens, logprobs, named = list(argmax), None, None
    if asked.sampled:
        with asked.edits(values, at, eos_token_ids, grammars):
            sampled = sampling.sample(values, [at[index] for index in asked.sampled], asked.row_params)
        for index, token in zip(asked.sampled, sampled, strict=True):
            tokens[index] = token
    if asked.with_logprobs:
        own = [max(0, tokens[index]) for index in asked.with_logprobs]
        wanted = [at[index] for index in asked.with_logprobs]
        logprobs = sampling.row_logprobs(values, wanted, own, asked.counts)
        named = asked.named_logits(values, wanted, torch.tensor(own)).tolist() if asked.width else None
    return asked.result(argmax, tokens, logprobs, named)


class DeviceSampling:
    """The same sampling as `sample_tokens`, launched on the logits' device; the host waits for it later, once.

    chosen: `[2, …]` int64 on the device: the argmax of each entry, and 1 if it is defined. logits: `[…, vocab]`,
    float32 or in a dtype of 16 bits, beginning with the entries' own. fetch: starts fetching values from the device,
    and returns a function that waits for them.
    """

    def __init__(
        self,
        rows: Sequence[ScheduledSequence],
        chosen: torch.Tensor,
        logits: torch.Tensor,
        eos_token_ids: Collection[int],
        fetch: Callable[[torch.Tensor], Callable[[], torch.Tensor]],
        grammars: Grammars | None = None,
    ) -> None:
        at = {index: index for index, row in enumerate(rows) if needs_logits(row)}
        self._asked = asked = _Asked(rows, at)
        found = torch.cat((chosen, chosen[:1], chosen[:1]))
        if asked.sampled:
            drawn = logits.float() if asked.edits_logits else logits  # a copy of logits in other dtypes
            with asked.edits(drawn, at, eos_token_ids, grammars):
                sample_into(found[2:], drawn, asked.sampled, asked.row_params)
        values, self.tokens = found[:3], found[3]
        """`[…]` int64 on the device, the sampled tokens; undefined for entries that sample none."""
        self._count = values.numel()
        if asked.with_logprobs:
            own = pick(self.tokens, asked.with_logprobs)
            logprobs = row_logprobs(pick(logits, asked.with_logprobs), own, max(asked.counts))
            if asked.width:
                logprobs = torch.cat((logprobs, asked.named_logits(logits, asked.with_logprobs, own)), -1)
            values = torch.cat((values.double().flatten(), logprobs.flatten()))
        self._values = fetch(values)

    def result(self) -> StepResult:
        """Wait for the sampled tokens."""
        asked = self._asked
        values = self._values().flatten().tolist()
        count = self._count // 3
        argmax, can_tell, tokens = ([int(value) for value in values[part * count :][:count]] for part in range(3))
        argmax = [token if good else -1 for token, good in zip(argmax, can_tell, strict=True)]
        flat, logprobs, named = values[self._count :], None, None
        if asked.with_logprobs:
            each = len(flat) // len(asked.with_logprobs)
            ends = range(each, len(flat) + 1, each)
            logprobs = read_logprobs([flat[end - each : end - asked.width] for end in ends])
            named = [flat[end - asked.width : end] for end in ends]
        return asked.result(argmax, tokens, logprobs, named)


def max_fetched_values(rows: int) -> int:
    """The most float64 values that a `DeviceSampling` for so many entries fetches.

    There are three per entry. If all need log-probabilities, add the log-probability of its own token, and columns for
    the most likely tokens of one entry and the named tokens of another.
    """
    return rows * (4 + 3 * MAX_LOGPROBS)


class _Asked:
    """Entries of a step, by index, that sample from their logits, and entries whose token needs log-probabilities.

    at: indices of the entries with logits. chosen: those that already have a token.
    """

    def __init__(self, rows: Sequence[ScheduledSequence], at: Collection[int], chosen: Collection[int] = ()) -> None:
        self._rows = rows
        params = {index: rows[index].params for index in at if rows[index].samples}
        self.sampled = [i for i, it in params.items() if i not in chosen and (it.temperature or _reshapes_logits(it))]
        self.row_params = [_row_params(rows[index]) for index in self.sampled]
        self.with_logprobs = [index for index, it in params.items() if it.logprobs is not None]
        self.named = [params[index].logprob_token_ids for index in self.with_logprobs]
        self.width = max(map(len, self.named), default=0)
        self.counts = [
            0 if params[index].logprob_token_ids else params[index].logprobs or 0 for index in self.with_logprobs
        ]

    @property
    def edits_logits(self) -> bool:
        """True if a sampling request asks for edits, which are of float32."""
        return any(_reshapes_logits(self._rows[index].params) for index in self.sampled)

    def edits(
        self,
        logits: torch.Tensor,
        at: Mapping[int, int],
        eos_token_ids: Collection[int],
        grammars: Grammars | None,
    ) -> AbstractContextManager[None]:
        """Context in which the logits are edited as the sampling requests ask."""
        reshaped = [(at[i], self._rows[i]) for i in self.sampled if _reshapes_logits(self._rows[i].params)]
        return edited(logits, reshaped, eos_token_ids, grammars) if reshaped else nullcontext()

    def named_logits(self, logits: torch.Tensor, at: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        """Logits of each entry's named tokens, minus the logit of its own token: `[with_logprobs, width]` float64.

        at: the rows of the logits. tokens: `[with_logprobs]` int64, on the device of the logits.
        """
        padded = [ids + (0,) * (self.width - len(ids)) for ids in self.named]
        rows, ids = (on_device(torch.tensor(each), logits.device) for each in (at, padded))
        return logits[rows[:, None], ids].double() - logits[rows, tokens].double()[:, None]

    def result(
        self,
        argmax: Sequence[int],
        tokens: Sequence[int],
        logprobs: RowLogprobs | None,
        named: Sequence[Sequence[float]] | None,
    ) -> StepResult:
        """Return the step's result, see `_result`. named: the result of `named_logits`."""
        result = _result(self._rows, argmax, tokens)
        if matched := [self._rows[index] for index in self.sampled if self._rows[index].params.grammar is not None]:
            result.grammar_seconds = grammar_seconds(matched)
        if logprobs is not None:
            found = _logprobs(logprobs, [tokens[index] for index in self.with_logprobs], self.counts)
            for number, (ids, less) in enumerate(zip(self.named, named or (), strict=False)):
                if ids:
                    found[number] = _with_named(found[number], ids, less)
            names = [self._rows[index].request_id for index in self.with_logprobs]
            result.logprobs = {name: it for name, it in zip(names, found, strict=True) if name in result.tokens}
        return result


def _with_named(one: TokenLogprobs, ids: Sequence[int], less: Sequence[float]) -> TokenLogprobs:
    """Log-probabilities of named tokens and the sampled one, best first. less: differences to the sampled token."""
    by_id = {one.token_id: one.logprob}
    by_id |= {token: one.logprob + by for token, by in zip(ids, less, strict=False)}
    return TokenLogprobs(one.token_id, one.logprob, tuple(sorted(by_id.items(), key=lambda pair: -pair[1])))


def _result(rows: Sequence[ScheduledSequence], argmax: Sequence[int], tokens: Sequence[int]) -> StepResult:
    """Return the tokens or errors of the entries. argmax, tokens: of every entry, -1 if undefined."""
    sampled, errors = {}, {}
    for row, best, token in zip(rows, argmax, tokens, strict=False):
        if row.samples:
            if best >= 0 and token >= 0:
                sampled[row.request_id] = token
            else:
                errors[row.request_id] = NOT_FINITE if best < 0 else ALL_BANNED
    return StepResult(sampled, errors=errors)


def add_prompt_logprobs(
    rows: Sequence[ScheduledSequence],
    logits: Callable[[int, int], torch.Tensor],
    sampling: Sampling,
    vocab: int,
    result: StepResult,
    parted: Callable[[int, int, torch.Tensor], Iterator[torch.Tensor]] | None = None,
) -> None:
    """Add the log-probabilities of prompt tokens to a step's result, in slices of bounded memory.

    logits: called with a range of the step's prompt-logprob tokens (see `following_tokens`), returns their logits,
    which are valid until the next call. parted: divides these into runs of tokens, each with its own number of columns;
    None: they are one run.
    """
    with_logprobs = [row for row in rows if row.wants_prompt_logprobs]
    tokens = [token for row in with_logprobs for token in following_tokens(row)]
    counts = [row.params.prompt_logprobs or 0 for row in with_logprobs for _ in following_tokens(row)]
    found: list[TokenLogprobs] = []
    for begin, end in prompt_logprob_slices(rows, vocab):
        values = logits(begin, end)
        for part in [values] if parted is None else parted(begin, end, values):
            at = slice(len(found), len(found) + len(part))
            found += _with_ranks(sampling, part, tokens[at], counts[at])
    _add_scored(with_logprobs, found, result)


def _add_scored(with_logprobs: Sequence[ScheduledSequence], found: list[TokenLogprobs], result: StepResult) -> None:
    """Give each sequence the log-probabilities of its tokens."""
    at = 0
    for row in with_logprobs:
        count = len(following_tokens(row))
        logprobs = found[at : at + count]
        at += count
        if any(math.isnan(row_logprobs.logprob) for row_logprobs in logprobs):
            result.tokens.pop(row.request_id, None)
            result.errors[row.request_id] = NOT_FINITE
        else:
            result.prompt_logprobs[row.request_id] = logprobs


def _with_ranks(
    sampling: Sampling, logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> Iterator[TokenLogprobs]:
    """Log-probability and rank of a token for each row of logits."""
    ranks = _ranks(logits, tokens)  # first, because computing log-probabilities may change the logits
    logprobs = sampling.row_logprobs(logits, range(len(tokens)), tokens, counts)
    for one, rank in zip(_logprobs(logprobs, tokens, counts), ranks, strict=True):
        yield TokenLogprobs(one.token_id, one.logprob, one.top, rank)


def _ranks(logits: torch.Tensor, tokens: Sequence[int]) -> list[int]:
    """Rank of a token in each row: one more than the number of tokens with a larger logit."""
    own = logits.gather(1, on_device(torch.tensor(tokens), logits.device)[:, None])
    return ((logits > own).sum(1) + 1).tolist()


def prompt_logprob_slices(rows: Sequence[ScheduledSequence], vocab: int) -> Iterator[tuple[int, int]]:
    """The ranges of a step's prompt-logprob tokens that `add_prompt_logprobs` processes."""
    count, step = sum(len(following_tokens(row)) for row in rows if row.wants_prompt_logprobs), logprob_rows(vocab)
    for begin in range(0, count, step):
        yield begin, min(begin + step, count)


def following_tokens(row: ScheduledSequence) -> list[int]:
    """The prompt tokens whose log-probabilities this entry computes: those that follow its tokens."""
    return row.token_ids[row.start + 1 : min(row.kv_len + 1, row.num_prompt_tokens)]


def _row_params(row: ScheduledSequence) -> RowSamplingParams:
    params = row.params
    if params.temperature == 0:
        return _GREEDY
    top_k = min(params.top_k, _MOST_TOP_K)
    return RowSamplingParams(params.temperature, uniform(row.seed, row.kv_len), top_k, params.top_p, params.min_p)


_GREEDY = RowSamplingParams(0.0, 0.0)
_MOST_TOP_K = 1 << 40  # more than any vocabulary, and within a native integer


def _logprobs(logprobs: RowLogprobs, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token, own, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, own, ids, values, count in zip(
            tokens, logprobs.own, logprobs.ids, logprobs.values, counts, strict=True
        )
    ]
