"""What is told of a request after a step."""

from __future__ import annotations

from .request import Request
from .types import FinishReason, RequestOutput, StepInfo


def tell(request: Request, token: int, count: int, info: StepInfo, reason: FinishReason | None) -> RequestOutput:
    """The output of a request that drew `token`, `count` times, in the step `info`. reason: why it ends."""
    tokens = tuple(request.token_ids[request.num_prompt_tokens + 1 :]) if request.is_quiet else (token,) * count
    request.is_quiet = not request.streams
    logprobs = ()
    if request.logprobs:
        logprobs, request.logprobs = tuple(request.logprobs), []
    prompt_logprobs = None
    if request.params.prompt_logprobs is not None and request.num_output_tokens == 1:
        prompt_logprobs = tuple(request.prompt_logprobs)
    stop_token = token if reason is FinishReason.STOP else None
    return RequestOutput(
        request.id, tokens, reason, stop_token, None, info, request.num_cached_tokens, logprobs, prompt_logprobs
    )
