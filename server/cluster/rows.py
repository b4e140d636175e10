"""Rows of `out` frames: a step's outputs as plain data. The row of an output with only a token is `[id, attempt,
[token]]`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from ...core.requests.types import FinishReason, RequestOutput, StepInfo, TokenLogprobs
from ...memory.files.error import LoadFailure
from .wire import Malformed

_INT = frozenset((int,))
_ENDS, _MORE = (_PLAIN := RequestOutput("", ()))[2:5], _PLAIN[6:13]
"""An output with nothing but a token, before and after the fields of its step, which the frame has; the number of
preemptions is sent with the end.
"""


def to_row(output: RequestOutput, attempt: int) -> list[Any]:
    """An output as a row, without fields that have their usual values."""
    if output[2:5] == _ENDS and output[6:13] == _MORE and not output.page_seconds:  # like most rows
        return [output.request_id, attempt, output.token_ids]
    values = ((key, getattr(output, name), getattr(_PLAIN, name), write) for key, name, write, _ in _REST)
    rest = {key: write(value) for key, value, usual, write in values if value != usual}
    return [output.request_id, attempt, output.token_ids, rest]


def from_row(row: Any, step: StepInfo | None) -> tuple[RequestOutput, int]:
    """The output and the attempt of a row. Raises Malformed for anything that `to_row` does not return."""
    try:
        request_id, attempt, tokens, *more = row
        if not (isinstance(request_id, str) and isinstance(attempt, int) and _INT.issuperset(map(type, tokens))):
            raise TypeError("an id, an attempt or a token is of another type")
        if not more:
            return RequestOutput(request_id, tuple(tokens), step=step), attempt
        rest = {name: read(more[0][key]) for key, name, _, read in _REST if key in more[0]}
        return RequestOutput(request_id, tuple(tokens), step=step, **rest), attempt
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise Malformed(f"a row of an out frame can't be read: {error}") from None


def read_step(data: Any) -> StepInfo | None:
    """The step of an out frame."""
    if data is None:
        return None
    try:
        return StepInfo(*map(int, data))
    except (TypeError, ValueError) as error:
        raise Malformed(f"the step of an out frame can't be read: {error}") from None


def _scores(scores: tuple[TokenLogprobs, ...]) -> list[Any]:
    return [
        [one.token_id, one.logprob, [list(pair) for pair in one.top], *([] if one.rank is None else [one.rank])]
        for one in scores
    ]


def _read_logprobs(scores: Any) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(token, logprob, tuple((t, p) for t, p in top), *rank) for token, logprob, top, *rank in scores
    )


def _read_bytes(data: Any) -> bytes:
    if not isinstance(data, bytes):
        raise TypeError("a vector must be bytes")
    return data


_REST: tuple[tuple[str, str, Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    ("finish", "finish_reason", attrgetter("value"), FinishReason),
    ("stop", "stop_token_id", int, int),
    ("error", "error", str, str),
    ("failure", "failure", attrgetter("value"), LoadFailure),
    ("cached", "num_cached_tokens", int, int),
    ("queued", "queue_seconds", float, float),
    ("logprobs", "logprobs", _scores, _read_logprobs),
    ("prompt", "prompt_logprobs", _scores, _read_logprobs),
    ("draft", "was_draft", bool, bool),
    ("rejected", "num_rejected_drafts", int, int),
    ("preempted", "num_preemptions", int, int),
    ("pooled", "pooled", bytes, _read_bytes),
    ("pages", "page_seconds", float, float),
)
"""Fields of a row other than tokens: the key, the output's field, and how it is written and read."""
