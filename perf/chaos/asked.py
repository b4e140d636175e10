"""A request that was put to an engine under test, and all that may come of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...core.requests.request import Request
from ...core.requests.types import FinishReason, RequestOutput
from ...memory.adapters.adapter import Adapter
from .checked_executor import EOS, MAX_MODEL_LEN, next_token, promise


@dataclass
class Asked:
    """A request as it was accepted, and what has come of it; raises Violation where that is not what it gets alone."""

    request: Request
    adapter: Adapter | None
    content: int
    prompt: list[int]
    scope: tuple[str, str]
    output: list[int] = field(default_factory=list)
    logprobs: list[int] = field(default_factory=list)
    was_sent_back: bool = False
    reason: FinishReason | None = None
    error: str | None = None
    aborted: bool = False
    was_here: bool = False  # its adapter's bytes were in memory at some time while it held them

    @property
    def ended(self) -> bool:
        return self.aborted or self.reason is not None

    def alone(self) -> tuple[list[int], FinishReason]:
        """The answer when nothing else is there."""
        params, output = self.request.params, []
        seed = self.request.seed if params.temperature else None
        while True:
            token = next_token(self.content, self.prompt + output, seed)
            output.append(token)
            if token in params.stop_token_ids or (token in EOS and not params.ignore_eos):
                return output, FinishReason.STOP
            if len(output) == params.max_tokens or len(self.prompt) + len(output) == MAX_MODEL_LEN:
                return output, FinishReason.LENGTH

    def take(self, output: RequestOutput, all_asked: Iterable[Asked]) -> None:
        """Check what is told of it. all_asked: whose tokens may be in the prefix cache."""
        id = output.request_id
        promise(not self.ended, f"{id} goes on after its end")
        self._check_told(output, all_asked)
        self.output += output.token_ids
        if output.finish_reason is None:
            return
        self.reason, self.error = output.finish_reason, output.error
        tokens, reason = self.alone()
        if self.reason is FinishReason.ERROR:
            promise(self.output == tokens[: len(self.output)], f"{id} got wrong tokens before its error")
            return
        promise((self.output, self.reason) == (tokens, reason), f"{id} got a wrong answer")
        wanted = tokens if self.request.params.logprobs is not None else []
        promise(self.logprobs == wanted, f"{id} got log-probabilities of {self.logprobs}")

    def _check_told(self, output: RequestOutput, all_asked: Iterable[Asked]) -> None:
        """Check that an output has one token, and what comes beside it."""
        request, id = self.request, output.request_id
        num_tokens = len(output.token_ids)
        promise(num_tokens == (output.finish_reason is not FinishReason.ERROR), f"{id} got {num_tokens} tokens at once")
        self.logprobs += [each.token_id for each in output.logprobs]
        if output.token_ids and not self.output:
            wanted = None if request.params.prompt_logprobs is None else self.prompt[1:]
            scores = output.prompt_logprobs
            found = None if scores is None else [each.token_id for each in scores]
            promise(found == wanted, f"{id} got scores of {found} instead of {wanted}")
            if count := output.num_cached_tokens:
                begins = self.prompt[:count]
                promise(self.was_sent_back or any(
                    other is not self and (other.scope, other.content) == (self.scope, self.content)
                    and (other.prompt + other.output)[:count] == begins for other in all_asked
                ), f"{id} got {count} tokens from the cache that nobody of its scope had asked")  # fmt: skip
