"""A request to an engine under test, and the checks of its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from chorus.core.requests.request import Request
from chorus.core.requests.types import FinishReason, RequestOutput, TokenLogprobs
from chorus.memory.adapters.adapter import Adapter

from .made_up_images import inputs_of

NEAR = 1e-3
"""Log-probabilities may differ by so much between kernels."""


class Violation(AssertionError):
    """The engine broke a promise."""


def promise(kept: bool, text: str, *parts: object) -> None:
    """parts: put into the braces of `text`, if it is needed at all."""
    if not kept:
        raise Violation(text.format(*parts) if parts else text)


def invoked_at(adapter: Adapter, prompt: list[int]) -> int | None:
    """The position from which an adapter changes a prompt, as PEFT has it; None if it never does."""
    wanted = list(adapter.manifest.invocation_tokens)
    starts = [at for at in range(len(prompt)) if prompt[at : at + len(wanted)] == wanted]
    return (starts[-1] if starts else None) if wanted else 0


@dataclass
class Told:
    """All outputs of a request, joined."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)  # of the prompt
    reason: FinishReason | None = None

    def add(self, output: RequestOutput) -> None:
        self.tokens += output.token_ids
        self.logprobs += output.logprobs
        self.scores += output.prompt_logprobs or ()
        self.reason = output.finish_reason

    def agrees(self, other: Told) -> bool:
        pairs, others = (
            [pair for one in told.logprobs + told.scores for pair in ((one.token_id, one.logprob), *one.top)]
            for told in (self, other)
        )
        near = [token == wanted and abs(x - y) < NEAR for (token, x), (wanted, y) in zip(pairs, others, strict=False)]
        same = (self.tokens, self.reason, len(pairs)) == (other.tokens, other.reason, len(others))
        return same and all(near) and len(self.scores) == len(other.scores)


@dataclass(eq=False)
class Asked:
    """An accepted request and its outputs so far; raises Violation where they differ from the request's when alone."""

    request: Request
    adapter: Adapter | None
    """None also if the prompt does not invoke its adapter."""
    prompt: list[int]
    scope: tuple[str, str]
    told: Told = field(default_factory=Told)
    was_sent_back: bool = False
    error: str = ""
    aborted: bool = False
    was_removed: bool = False  # its adapter was, by force
    was_moved: bool = False
    earlier: list[Adapter | None] = field(default_factory=list)  # versions of equal content it ran with
    was_here: bool = False  # its adapter's bytes were in memory at some time while it held them

    @property
    def changed_from(self) -> int:
        """The first position that its adapter changes."""
        return 0 if self.adapter is None else invoked_at(self.adapter, self.prompt) or 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.told.tokens

    def inputs(self, tokens: list[int]) -> Sequence[int]:
        """What the KV of its tokens tells of them."""
        return inputs_of(self.request, tokens)

    @property
    def ended(self) -> bool:
        return self.aborted or self.told.reason is not None

    def take(self, output: RequestOutput, everybody: Iterable[Asked]) -> None:
        """Check an output: its tokens, the prompt's scores, and that cached tokens come from its own scope."""
        id, params, count = output.request_id, self.request.params, len(output.token_ids)
        promise(not self.ended, "{} goes on after its end", id)
        has_failed = output.finish_reason is FinishReason.ERROR
        promise(count == (not has_failed), "{} got {} tokens at once", id, count)
        is_right = (output.error is not None) == has_failed
        promise(is_right, "{} has the error {} and goes on, or has none", id, output.error)
        most = len(self.prompt) - (not self.was_sent_back)
        promise(0 <= output.num_cached_tokens <= most, "{} of {} were cached", output.num_cached_tokens, id)
        if count and not self.told.tokens:
            wanted = None if params.prompt_logprobs is None else self.prompt[1:]
            scores = output.prompt_logprobs
            found = None if scores is None else [each.token_id for each in scores]
            promise(found == wanted, "{} got scores of {} instead of {}", id, found, wanted)
            promise(wanted is None or not output.num_cached_tokens, "{} was scored from the cache", id)
            self._check_cached(output.num_cached_tokens, everybody)
        else:
            promise(output.prompt_logprobs is None, "the prompt of {} is scored again, or not at all", id)
        self.told.add(output)
        self.error = output.error or ""

    def _check_cached(self, count: int, everybody: Iterable[Asked]) -> None:
        begins = self.inputs(self.prompt)[:count]
        promise(
            not count
            or self.was_sent_back
            or any(
                other is not self
                and other.scope == self.scope
                and self._has_kv_of(other, count)
                and other.inputs(other.tokens)[:count] == begins
                for other in everybody
            ),
            "{} got {} tokens from the cache that no request of its scope had",
            self.request.id,
            count,
        )

    def _has_kv_of(self, other: Asked, count: int) -> bool:
        """True if the KV of the first `count` tokens is the other's, given that the tokens are."""
        if self.adapter is None or self.changed_from >= count:
            return other.adapter is None or other.changed_from >= count
        if self.changed_from != other.changed_from:
            return False
        content = self.adapter.manifest.content_hash
        had = [each for each in (other.adapter, *other.earlier) if each is not None]
        return any(each is self.adapter or (content and each.manifest.content_hash == content) for each in had)

    def check_end(self, alone: Told) -> None:
        """Check the answer, or its part before an error, against the one that the request gets alone."""
        id, told = self.request.id, self.told
        if told.reason is FinishReason.ERROR:
            promise(told.tokens == alone.tokens[: len(told.tokens)], "{} got wrong tokens before its error", id)
            is_right = not told.scores or Told(scores=told.scores).agrees(Told(scores=alone.scores))
            promise(is_right, "{} got wrong scores of its prompt before its error", id)
        else:
            promise(told.agrees(alone), "{} ({}) got {} instead of {}", id, self.request.params, told, alone)
