"""From a step's logits to its drawn tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch

from ...ops.sampling import (
    Chances,
    Scores,
    draw_into,
    pick,
    score,
    score_rows,
    scores_of,
    uniform,
)
from ...ops.upload import on_device
from ..requests.grammars import Grammars
from ..requests.logit_edits import edited, grammar_seconds
from ..requests.sampling_params import MAX_LOGPROBS, SamplingParams
from ..requests.types import ALL_BANNED, NOT_FINITE, ScheduledRow, StepResult, TokenLogprobs


class Sampling(Protocol):
    """Draws and scores rows of logits."""

    def sample(self, logits: torch.Tensor, rows: Sequence[int], chances: Sequence[Chances]) -> list[int]: ...

    def score(
        self, logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], counts: Sequence[int]
    ) -> Scores: ...


def _reshapes_logits(params: SamplingParams) -> bool:
    """True if anything but temperature, min_p, top_k and top_p changes the distribution."""
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0 or params.logit_bias
        or params.min_tokens or params.bad_words or params.allowed_token_ids is not None or params.grammar is not None
    )  # fmt: skip


def needs_logits(row: ScheduledRow) -> bool:
    """True if more than the largest of the row's logits is asked for."""
    params = row.params
    return row.samples and (params.temperature != 0 or _reshapes_logits(params) or params.logprobs is not None)


def plain_chances(row: ScheduledRow) -> Chances | None:
    """Chances of a row that draws its token from the model's logits as they are; else None."""
    if not row.samples or not row.params.temperature or _reshapes_logits(row.params):
        return None
    return _chances(row)


class RowLogits(NamedTuple):
    """Logits of some of a step's rows. values: `[…, vocab]` float32. at: each of these rows' index, and its logits'."""

    values: torch.Tensor
    at: Mapping[int, int]


def draw(
    rows: Sequence[ScheduledRow],
    likeliest: Sequence[int],
    logits: RowLogits | None,
    sampling: Sampling,
    eos_token_ids: Collection[int],
    chosen: Collection[int] = (),
    grammars: Grammars | None = None,
) -> StepResult:
    """Draw a token for every row that asks for one.

    likeliest: each row's most likely token, -1 where its logits are not finite: that row gets an error instead of a
    token; the others are not touched by it. Rows without `logits` have their token already, the likeliest or a drawn
    one, and cost nothing here; as do the rows in `chosen`: their logits are only scored. grammars: the model's.
    """
    if logits is None:
        return _result(rows, likeliest, likeliest)
    values, at = logits
    asked = _Asked(rows, at, chosen)
    tokens, scores, named = list(likeliest), None, None
    if asked.drawn:
        with asked.edits(values, at, eos_token_ids, grammars):
            drawn = sampling.sample(values, [at[index] for index in asked.drawn], asked.chances)
        for index, token in zip(asked.drawn, drawn, strict=True):
            tokens[index] = token
    if asked.scored:
        own = [max(0, tokens[index]) for index in asked.scored]
        places = [at[index] for index in asked.scored]
        scores = sampling.score(values, places, own, asked.counts)
        named = asked.named_logits(values, places, torch.tensor(own)).tolist() if asked.width else None
    return asked.result(likeliest, tokens, scores, named)


class DeviceDraw:
    """A draw as `draw` makes it, given to the logits' device, which the host waits for later, once.

    chosen: `[2, …]` int64 on the device, of each row its most likely token, and 1 if there is one. logits:
    `[…, vocab]` float32; the first are the rows' own. fetch: begins to fetch values from the device, and returns what
    waits for them.

    tokens: `[…]` int64 on the device, what was drawn; any token where none was.
    """

    def __init__(
        self,
        rows: Sequence[ScheduledRow],
        chosen: torch.Tensor,
        logits: torch.Tensor,
        eos_token_ids: Collection[int],
        fetch: Callable[[torch.Tensor], Callable[[], torch.Tensor]],
        grammars: Grammars | None = None,
    ) -> None:
        at = {index: index for index, row in enumerate(rows) if needs_logits(row)}
        self._asked = asked = _Asked(rows, at)
        found = torch.cat((chosen, chosen[:1], chosen[:1]))
        if asked.drawn:
            with asked.edits(logits, at, eos_token_ids, grammars):
                draw_into(found[2:], logits, asked.drawn, asked.chances)
        values, self.tokens = found[:3], found[3]
        self._count = values.numel()
        if asked.scored:
            own = pick(self.tokens, asked.scored)
            scores = score(pick(logits, asked.scored), own, max(asked.counts))
            if asked.width:
                scores = torch.cat((scores, asked.named_logits(logits, asked.scored, own)), -1)
            values = torch.cat((values.double().flatten(), scores.flatten()))
        self._values = fetch(values)

    def result(self) -> StepResult:
        """Wait for the draw."""
        asked = self._asked
        values = self._values().flatten().tolist()
        count = self._count // 3
        likeliest, can_tell, tokens = ([int(value) for value in values[part * count :][:count]] for part in range(3))
        likeliest = [token if good else -1 for token, good in zip(likeliest, can_tell, strict=True)]
        flat, scores, named = values[self._count :], None, None
        if asked.scored:
            each = len(flat) // len(asked.scored)
            ends = range(each, len(flat) + 1, each)
            scores = scores_of([flat[end - each : end - asked.width] for end in ends])
            named = [flat[end - asked.width : end] for end in ends]
        return asked.result(likeliest, tokens, scores, named)


def most_drawn_values(rows: int) -> int:
    """Most float64 values that a `DeviceDraw` of so many rows fetches: of each row three, and if all are scored its own
    token's score, and columns for the likeliest tokens of one row and the named tokens of another.
    """
    return rows * (4 + 3 * MAX_LOGPROBS)


class _Asked:
    """Rows of a step, by index, that draw a token from their logits, and rows with a given token to score.

    at: indices of the rows that have logits. chosen: of the rows with a token already.
    """

    def __init__(self, rows: Sequence[ScheduledRow], at: Collection[int], chosen: Collection[int] = ()) -> None:
        self._rows = rows
        params = {index: rows[index].params for index in at if rows[index].samples}
        self.drawn = [i for i, it in params.items() if i not in chosen and (it.temperature or _reshapes_logits(it))]
        self.chances = [_chances(rows[index]) for index in self.drawn]
        self.scored = [index for index, it in params.items() if it.logprobs is not None]
        self.named = [params[index].logprob_token_ids for index in self.scored]
        self.width = max(map(len, self.named), default=0)
        self.counts = [0 if params[index].logprob_token_ids else params[index].logprobs or 0 for index in self.scored]

    def edits(
        self,
        logits: torch.Tensor,
        at: Mapping[int, int],
        eos_token_ids: Collection[int],
        grammars: Grammars | None,
    ) -> AbstractContextManager[None]:
        """Context in which the logits are changed as the drawing rows ask."""
        reshaped = [(at[i], self._rows[i]) for i in self.drawn if _reshapes_logits(self._rows[i].params)]
        return edited(logits, reshaped, eos_token_ids, grammars) if reshaped else nullcontext()

    def named_logits(self, logits: torch.Tensor, places: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens that each scored row names, less its own token's: `[scored, width]` float64.

        places: the rows of the logits. tokens: `[scored]` int64, on their device.
        """
        padded = [ids + (0,) * (self.width - len(ids)) for ids in self.named]
        rows, ids = (on_device(torch.tensor(each), logits.device) for each in (places, padded))
        return logits[rows[:, None], ids].double() - logits[rows, tokens].double()[:, None]

    def result(
        self,
        likeliest: Sequence[int],
        tokens: Sequence[int],
        scores: Scores | None,
        named: Sequence[Sequence[float]] | None,
    ) -> StepResult:
        """Return the step's result, see `_result`. named: what `named_logits` gave."""
        result = _result(self._rows, likeliest, tokens)
        result.grammar_seconds = grammar_seconds([self._rows[index] for index in self.drawn])
        if scores is not None:
            found = _logprobs(scores, [tokens[index] for index in self.scored], self.counts)
            for place, (ids, less) in enumerate(zip(self.named, named or (), strict=False)):
                if ids:
                    found[place] = _with_named(found[place], ids, less)
            names = [self._rows[index].request_id for index in self.scored]
            result.logprobs = {name: it for name, it in zip(names, found, strict=True) if name in result.tokens}
        return result


def _with_named(one: TokenLogprobs, ids: Sequence[int], less: Sequence[float]) -> TokenLogprobs:
    """The scores of named tokens beside the drawn one's, best first. less: how much theirs differ from it."""
    by_id = {one.token_id: one.logprob}
    by_id |= {token: one.logprob + by for token, by in zip(ids, less, strict=False)}
    return TokenLogprobs(one.token_id, one.logprob, tuple(sorted(by_id.items(), key=lambda pair: -pair[1])))


def _result(rows: Sequence[ScheduledRow], likeliest: Sequence[int], tokens: Sequence[int]) -> StepResult:
    """Return the tokens or errors of rows. likeliest, tokens: of every row, -1 where there is none."""
    drawn, errors = {}, {}
    for row, best, token in zip(rows, likeliest, tokens, strict=False):
        if row.samples:
            if best >= 0 and token >= 0:
                drawn[row.request_id] = token
            else:
                errors[row.request_id] = NOT_FINITE if best < 0 else ALL_BANNED
    return StepResult(drawn, errors=errors)


def score_prompts(
    rows: Sequence[ScheduledRow],
    logits: Callable[[int, int], torch.Tensor],
    sampling: Sampling,
    vocab: int,
    result: StepResult,
) -> None:
    """Add the log-probabilities of prompt tokens to a step's result, in slices of bounded memory.

    logits: called with a range of the step's score tokens (see `following_tokens`), gives theirs, until the next call.
    """
    scored = [row for row in rows if row.scores_prompt]
    tokens = [token for row in scored for token in following_tokens(row)]
    counts = [row.params.prompt_logprobs or 0 for row in scored for _ in following_tokens(row)]
    found: list[TokenLogprobs] = []
    for begin, end in score_slices(rows, vocab):
        found += _with_ranks(sampling, logits(begin, end), tokens[begin:end], counts[begin:end])
    at = 0
    for row in scored:
        count = len(following_tokens(row))
        scores = found[at : at + count]
        at += count
        if any(math.isnan(score.logprob) for score in scores):
            result.tokens.pop(row.request_id, None)
            result.errors[row.request_id] = NOT_FINITE
        else:
            result.prompt_logprobs[row.request_id] = scores


def _with_ranks(
    sampling: Sampling, logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> Iterator[TokenLogprobs]:
    """Log-probabilities and rank of a token for each row of logits."""
    ranks = _ranks(logits, tokens)  # first: scoring may change the logits
    scores = sampling.score(logits, range(len(tokens)), tokens, counts)
    for one, rank in zip(_logprobs(scores, tokens, counts), ranks, strict=True):
        yield TokenLogprobs(one.token_id, one.logprob, one.top, rank)


def _ranks(logits: torch.Tensor, tokens: Sequence[int]) -> list[int]:
    """One more than there are tokens with a larger logit, for a token of each row."""
    own = logits.gather(1, on_device(torch.tensor(tokens), logits.device)[:, None])
    return ((logits > own).sum(1) + 1).tolist()


def score_slices(rows: Sequence[ScheduledRow], vocab: int) -> Iterator[tuple[int, int]]:
    """The ranges of a step's score tokens that `score_prompts` asks for."""
    count, step = sum(len(following_tokens(row)) for row in rows if row.scores_prompt), score_rows(vocab)
    for begin in range(0, count, step):
        yield begin, min(begin + step, count)


def following_tokens(row: ScheduledRow) -> list[int]:
    """The prompt tokens that follow each of the row's first ones, which its prompt scores are of."""
    return row.token_ids[row.start + 1 : min(row.kv_len + 1, row.num_prompt_tokens)]


def _chances(row: ScheduledRow) -> Chances:
    params = row.params
    if params.temperature == 0:
        return _GREEDY
    top_k = min(params.top_k, _MOST_TOP_K)
    return Chances(params.temperature, uniform(row.seed, row.kv_len), top_k, params.top_p, params.min_p)


_GREEDY = Chances(0.0, 0.0)
_MOST_TOP_K = 1 << 40  # more than any vocabulary has, and a native integer


def _logprobs(scores: Scores, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token, own, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, own, ids, values, count in zip(tokens, scores.own, scores.ids, scores.values, counts, strict=True)
    ]
