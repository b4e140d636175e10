"""What a step's result does to its requests: tokens are appended, those that are done end, and outputs are made.

Tests: tests/core/scheduling/test_scheduling.py, tests/core/speculation/test_speculation.py
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...memory.files.error import LoadFailure
from ..requests.pooling import to_bytes
from ..requests.request import Request
from ..requests.types import NOT_FINITE, FinishReason, RequestOutput, ScheduledSequence, StepInfo, StepResult
from ..speculation.speculation import Speculation
from .lifecycle import Lifecycle
from .request_memory import RequestMemory


class StepResults:
    """Applies the results of steps to requests."""

    def __init__(self, lifecycle: Lifecycle, memory: RequestMemory, speculation: Speculation | None) -> None:
        self._lifecycle, self._memory, self._speculation = lifecycle, memory, speculation
        self.num_generated_tokens = 0
        self.num_proposed_tokens = self.num_accepted_tokens = 0
        """Numbers of verified and of accepted proposed tokens."""
        self.num_pooled = 0
        """Number of pooling requests that have returned their vector."""

    def apply(
        self, sequences: Iterable[tuple[Request, ScheduledSequence]], result: StepResult, info: StepInfo
    ) -> list[RequestOutput]:
        """Apply a step's result to sequences that are not stale, and return their outputs."""
        outputs: list[RequestOutput] = []
        num_generated, num_pooled = 0, self.num_pooled
        has_extras = result.unready or result.errors or result.prompt_logprobs or result.pooled
        for request, sequence in sequences:
            if has_extras and not self._apply_extras(request, result, info, outputs):
                continue
            if sequence.drafts:
                new = self._advance_drafted(request, sequence, result, info)
                outputs += new
                num_generated += len(new)
            elif (output := self._advance(request, sequence, result, info, len(sequence.tokens))) is not None:
                outputs.append(output)
                num_generated += 1
        self.num_generated_tokens += num_generated - (self.num_pooled - num_pooled)
        return outputs

    def _apply_extras(self, request: Request, result: StepResult, info: StepInfo, outputs: list[RequestOutput]) -> bool:
        """Apply a request's error and prompt logprobs; False if its sequence produced nothing."""
        if request.id in result.unready:
            return False
        if error := result.errors.get(request.id):
            self._lifecycle.finish(request, FinishReason.ERROR)
            failure = LoadFailure.OVERFLOWS if error == NOT_FINITE and request.adapter is not None else None
            outputs.append(
                RequestOutput(
                    request.id,
                    (),
                    FinishReason.ERROR,
                    error=error,
                    step=info,
                    failure=failure,
                    page_seconds=request.page_seconds,
                )
            )
            return False
        request.prompt_logprobs += result.prompt_logprobs.get(request.id, ())
        if (pooled := result.pooled.get(request.id)) is not None:
            request.pooled = pooled.plus(request.pooled)
        return True

    def _advance_drafted(
        self, request: Request, sequence: ScheduledSequence, result: StepResult, info: StepInfo
    ) -> list[RequestOutput]:
        """Apply a sequence with drafts as if each of its sampled tokens came from a step of its own.

        Tokens after one that ends the request are dropped.
        """
        drafts = sequence.tokens[-sequence.drafts :]
        outputs: list[RequestOutput] = []
        for each in (result, *result.after_drafts):
            if request.finished or sequence.request_id not in each.tokens:
                break
            output = self._advance(request, sequence, each, info, 1, was_draft=each is not result)
            assert output is not None
            outputs.append(output)
        accepted = sum(output.token_ids[0] == draft for output, draft in zip(outputs, drafts, strict=False))
        self.num_proposed_tokens += len(drafts)
        self.num_accepted_tokens += accepted
        if self._speculation is not None:
            self._speculation.note(request, len(drafts), accepted)
        outputs[:accepted] = [output._replace(was_draft=True) for output in outputs[:accepted]]
        outputs[-1] = outputs[-1]._replace(num_rejected_drafts=len(drafts) - accepted)
        return outputs

    def _advance(
        self,
        request: Request,
        sequence: ScheduledSequence,
        result: StepResult,
        info: StepInfo,
        count: int,
        *,
        was_draft: bool = False,
    ) -> RequestOutput | None:
        """Apply `count` computed tokens to a request: append the sampled token, end the request if done, return its
        output. was_draft: it is one token, an accepted draft.
        """
        computed = request.num_computed_tokens = request.num_computed_tokens + count
        if request.caching and computed >= (request.num_known_blocks + 1) * self._memory.block_tokens:
            self._memory.remember(request)
        if computed >= request.leaves_at or sequence.states is not None:
            self._memory.move_on(request, was_draft=was_draft)
        if not sequence.samples:
            return self._pool(request, info)
        token = result.tokens[sequence.request_id]
        request.token_ids.append(token)
        if (reused := request.sequence) is not None:  # for the next step
            reused.tokens, reused.start = [token], computed
            if reused.states is not None:
                reused.state_step = reused.states.steps
        reason = stop_token = None
        if token in request.end_ids:
            reason, stop_token = FinishReason.STOP, token
        elif computed + 1 >= request.max_length:
            reason = FinishReason.LENGTH
        logprobs = result.logprobs.get(sequence.request_id) if result.logprobs else None
        is_first = computed == request.num_prompt_tokens
        fills = not computed % self._memory.block_tokens
        if reason is None and logprobs is None and not is_first and not fills:  # nearly every token
            return RequestOutput(sequence.request_id, (token,), step=info)
        if reason is not None:
            self._lifecycle.finish(request, reason)
        return RequestOutput(
            request_id=request.id,
            token_ids=(token,),
            finish_reason=reason,
            stop_token_id=stop_token,
            step=info,
            logprobs=(logprobs,) if logprobs else (),
            num_preemptions=request.num_preemptions,
            page_seconds=request.page_seconds,
            **(_reported_once(request) if is_first else {}),
        )

    def _pool(self, request: Request, info: StepInfo) -> RequestOutput | None:
        """End a pooling request once its prompt is computed, and return its output; None for other requests."""
        if request.pooled is None or request.num_computed_tokens < request.num_prompt_tokens:
            return None
        self.num_pooled += 1
        vector = request.pooled.mean()
        self._lifecycle.finish(request, FinishReason.STOP)
        return RequestOutput(
            request.id,
            (),
            FinishReason.STOP,
            step=info,
            num_preemptions=request.num_preemptions,
            page_seconds=request.page_seconds,
            pooled=to_bytes(vector if request.head is None else request.head.scores(vector)),
            **_reported_once(request),
        )


def _reported_once(request: Request) -> dict[str, Any]:
    """Return the fields of a request's first output that no later output has."""
    wants_logprobs = request.params.prompt_logprobs is not None
    return {
        "num_cached_tokens": request.num_cached_tokens,
        "prompt_logprobs": tuple(request.prompt_logprobs) if wants_logprobs else None,
        "queue_seconds": None if request.start_time is None else request.start_time - request.arrival_time,
    }
