"""Rows of `out` frames: a step's outputs as plain data. The plain row of one token is `[id, life, [token]]`."""

from __future__ import annotations

from typing import Any

from ...core.requests.types import FinishReason, RequestOutput, StepInfo, TokenLogprobs
from ...memory.files.error import LoadFailure
from .wire import Malformed

_INT = frozenset((int,))
_ENDS, _MORE = (_PLAIN := RequestOutput("", ()))[2:5], _PLAIN[6:11]
"""Fields of an output with nothing beside a token, before and behind its step, which is the frame's; the number of
preemptions is sent with the end.
"""


def to_row(output: RequestOutput, life: int) -> list[Any]:
    """An output as a row. What is as in most outputs is left out."""
    if output[2:5] == _ENDS and output[6:11] == _MORE:  # as most rows are
        return [output.request_id, life, output.token_ids]
    rest: dict[str, Any] = {}
    if output.finish_reason is not None:
        rest["finish"], rest["preempted"] = output.finish_reason.value, output.num_preemptions
    if output.stop_token_id is not None:
        rest["stop"] = output.stop_token_id
    if output.error is not None:
        rest["error"] = output.error
    if output.failure is not None:
        rest["failure"] = output.failure.value
    if output.num_cached_tokens:
        rest["cached"] = output.num_cached_tokens
    if output.queue_seconds is not None:
        rest["queued"] = output.queue_seconds
    if output.logprobs:
        rest["logprobs"] = _scores(output.logprobs)
    if output.prompt_logprobs is not None:
        rest["prompt"] = _scores(output.prompt_logprobs)
    return [output.request_id, life, output.token_ids, rest]


def from_row(row: Any, step: StepInfo | None) -> tuple[RequestOutput, int]:
    """The output and the life of a row. Malformed for what `to_row` does not give."""
    try:
        request_id, life, tokens, *more = row
        if not (isinstance(request_id, str) and isinstance(life, int) and _INT.issuperset(map(type, tokens))):
            raise TypeError("an id, a life or a token is of another type")
        if not more:
            return RequestOutput(request_id, tuple(tokens), None, None, None, step), life
        rest = more[0]
        finish, failure, prompt = rest.get("finish"), rest.get("failure"), rest.get("prompt")
        queued = rest.get("queued")
        output = RequestOutput(
            request_id,
            tuple(tokens),
            None if finish is None else FinishReason(finish),
            rest.get("stop"),
            rest.get("error"),
            step,
            rest.get("cached", 0),
            _read_scores(rest.get("logprobs", ())),
            None if prompt is None else _read_scores(prompt),
            None if failure is None else LoadFailure(failure),
            None if queued is None else float(queued),
            int(rest.get("preempted", 0)),
        )
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise Malformed(f"a row of an out frame can't be read: {error}") from None
    return output, life


def read_step(data: Any) -> StepInfo | None:
    """The step of an out frame."""
    if data is None:
        return None
    try:
        return StepInfo(*map(int, data))
    except (TypeError, ValueError) as error:
        raise Malformed(f"the step of an out frame can't be read: {error}") from None


def _scores(scores: tuple[TokenLogprobs, ...]) -> list[Any]:
    return [[one.token_id, one.logprob, [list(pair) for pair in one.top]] for one in scores]


def _read_scores(scores: Any) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token, logprob, tuple((t, p) for t, p in top)) for token, logprob, top in scores)
