"""Turns prompts into text: the engine runs all choices of one API request, which are read as one stream of deltas."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ...core.requests.request import Request
from ...core.requests.request_params import InvalidRequest
from ...core.requests.types import ALL_BANNED, FinishReason, RequestOutput, StepInfo, TokenLogprobs
from ..errors import EngineUnavailable, GenerationFailed
from ..text.detokenizer import TextStream
from ..text.output_parts import OutputKind, Part, PartReader
from .content_logprobs import ContentLogprobs
from .request_metrics import Ended
from .telemetry import RequestRecords

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer
    from .backend import Backend
    from .usage import Spent

T = TypeVar("T")

_UNRECORDED = RequestRecords()

TURN_SECONDS = 0.0005
"""Seconds of work on one API request's outputs before others get a turn on the event loop."""

TOOL_CALLS = "tool_calls"
"""OpenAI's finish_reason of a message that calls tools."""

AT_ONCE = 32
"""Choices of a call that are made, or submitted, before others get a turn on the event loop."""

BULK = 64
"""Outputs read at once for a request without streaming and without stop strings."""


@dataclass(slots=True)  # not frozen: one is made per token, and freezing would quadruple the time
class Delta:
    """Text and tokens that one step added to one choice. `finish_reason` is OpenAI's, on the last delta only."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    step: StepInfo | None
    stop_reason: int | str | None = None
    """vLLM's: the stop string, or the requested stop token, that ended the choice."""
    offsets: tuple[int, ...] = ()
    """Where each token begins in the choice's text."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token, if requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Logprobs of the prompt tokens except the first: on a choice's first delta, if requested."""
    parts: Sequence[Part] | None = None
    """The text split into content, reasoning and tool calls, as far as it is certain; None without a parser."""


class _AllSettled:
    """Await it for a number of futures of other threads, whose end is noted: the loop is woken once, not for each."""

    def __init__(self, count: int) -> None:
        self._left = itertools.count(count - 1, -1)  # `next` is atomic
        self._loop = asyncio.get_running_loop()
        self._done = self._loop.create_future()

    def note(self, _: Future[None]) -> None:
        """From any thread."""
        if next(self._left) == 0:
            with suppress(RuntimeError):  # the loop was closed, and the caller with it
                self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self._done.done():
            self._done.set_result(None)

    def __await__(self) -> Generator[None, None, None]:
        return self._done.__await__()


async def some_at_once(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, with a turn for others on the event loop after every few."""
    for index, item in enumerate(items):
        if index and index % AT_ONCE == 0:
            await asyncio.sleep(0)
        yield item


class Choice:
    """One choice: an engine request and the text generated for it so far."""

    def __init__(
        self,
        index: int,
        request: Request,
        text_stream: TextStream,
        *,
        prompt_token_ids: list[int] | None = None,
        prompt_only: bool = False,
        keeps_all: bool = True,
        reader: PartReader | None = None,
    ) -> None:
        """prompt_token_ids: the request's, if the caller has them, to avoid a copy. prompt_only: discard generated
        tokens. keeps_all: keep the text and logprobs of all deltas. reader: splits the text into parts.
        """
        self.index = index
        self.request = request
        self.prompt_token_ids = list(request.token_ids) if prompt_token_ids is None else prompt_token_ids
        self.text = ""
        self.token_ids: list[int] = []
        self.offsets: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self.pooled: bytes | None = None
        """The result of a pooling request."""
        self.discarded: tuple[TokenLogprobs, ...] = ()
        """Log-probabilities of a discarded token."""
        self.num_cached_tokens: int | None = None
        self.num_preemptions = 0
        self._page_seconds = self._pages_told = 0.0  # told by all replicas that have run it, and by the present one
        self.num_accepted_drafts = self.num_rejected_drafts = 0
        """Proposed tokens that became part of the output, and those that were computed in vain."""
        self.num_reasoning_tokens = 0
        """Tokens between the marks of reasoning, including the closing mark."""
        self.queue_seconds: float | None = None
        self.first_seconds: float | None = None
        """Seconds from arrival to the first token."""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.parts: list[Part] = []
        self.own_end: int | None = None
        """A stop token that the client did not ask for."""
        self._reader = reader
        self._scores = None if reader is None else ContentLogprobs()
        self._keeps_all = keeps_all
        self._stream = text_stream
        self._prompt_only = prompt_only

    @property
    def reads(self) -> bool:
        """True if the text is parsed into parts."""
        return self._reader is not None

    @property
    def kinds(self) -> frozenset[OutputKind]:
        """What the parsed text has so far."""
        return frozenset(() if self._reader is None else self._reader.kinds)

    def add_output(self, output: RequestOutput) -> Delta:
        """Add the engine's output; text after a stop string is dropped."""
        self._add_counts(output)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if self._prompt_only:
            self.pooled, self.discarded = output.pooled, output.logprobs
            self.finish_reason = (FinishReason.LENGTH if output.pooled is None else FinishReason.STOP).value
            return Delta(self.index, "", (), self.finish_reason, output.step, prompt_logprobs=output.prompt_logprobs)
        text, offsets = self._push(output)
        tokens, logprobs = output.token_ids[: len(offsets)], output.logprobs[: len(offsets)]
        if self._stream.stopped_by is None and output.finish_reason is not None:
            text += self._stream.finish()
        self._note_end(output)
        parts: list[Part] | None = None
        if self._reader is not None:
            self.num_reasoning_tokens += len(tokens) if self._reader.reasons else 0
            final = self.finish_reason is not None
            parts = self._reader.read(text, final=final)
            if self._scores is not None and self.request.params.logprobs is not None:
                parts = self._with_scores(self._scores, parts, output, offsets, final=final)
            if self.finish_reason == FinishReason.STOP.value and self._reader.calls:
                self.finish_reason = TOOL_CALLS
        self.token_ids += tokens
        if self._keeps_all:
            self.text += text
            self.parts += parts or ()
            self.offsets += offsets
            self.logprobs += logprobs
        return Delta(
            self.index,
            text=text,
            token_ids=tokens,
            finish_reason=self.finish_reason,
            step=output.step,
            stop_reason=self.stop_reason,
            offsets=tuple(offsets),
            logprobs=logprobs,
            prompt_logprobs=output.prompt_logprobs,
            parts=parts,
        )

    def _with_scores(
        self, scores: ContentLogprobs, parts: list[Part], output: RequestOutput, offsets: Sequence[int], *, final: bool
    ) -> list[Part]:
        """The parts with the log-probabilities of their tokens; an end token that is not shown is in none."""
        shown = offsets[:-1] if offsets and self._is_end(output, output.token_ids[len(offsets) - 1]) else offsets
        return scores.given(parts, shown, output.logprobs[: len(shown)], self._stream.position, final=final)

    def _add_counts(self, output: RequestOutput) -> None:
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
            self.queue_seconds = output.queue_seconds
        self.num_accepted_drafts += output.was_draft
        self.num_rejected_drafts += output.num_rejected_drafts
        self.num_preemptions = max(self.num_preemptions, output.num_preemptions)
        if told := output.page_seconds:
            self._page_seconds += told - self._pages_told if told >= self._pages_told else told  # less: another replica
            self._pages_told = told

    def page_seconds_until(self, now: float) -> float:
        """Pages of KV times the seconds that it has held them: the engine's count, or what replicas told of it."""
        return max(self._page_seconds, self.request.page_seconds_until(now))

    def _note_end(self, output: RequestOutput) -> None:
        if self._stream.stopped_by is not None:
            self.finish_reason = FinishReason.STOP.value
            self.stop_reason = self._stream.stopped_by
        elif output.finish_reason is not None:
            self.finish_reason = output.finish_reason.value
            asked = self.request.params.stop_token_ids
            if output.stop_token_id in asked and output.stop_token_id != self.own_end:
                self.stop_reason = output.stop_token_id

    def _is_end(self, output: RequestOutput, token: int) -> bool:
        """True if the last token of an output is a stop token that is not shown."""
        return output.stop_token_id == token and not self._stream.shows_stop

    def _push(self, output: RequestOutput) -> tuple[str, list[int]]:
        """The new text, and where each token up to a stop string begins."""
        text, offsets = "", []
        last = len(output.token_ids) - 1
        for position, token in enumerate(output.token_ids):
            offsets.append(self._stream.position)
            if position == last and self._is_end(output, token):
                break  # it counts, but has no text
            text += self._stream.push(token)
            if self._stream.stopped_by is not None:
                break
        return text, offsets


class Generation:
    """The choices of one API request. Await `start`, read the deltas once, and always `close`.

    Either all choices run or none: if one is refused or fails, all end.
    """

    def __init__(
        self,
        worker: Backend,
        choices: Sequence[Choice],
        *,
        id: str,
        model: str,
        records: RequestRecords = _UNRECORDED,
        per_prompt: int = 1,
        in_bulk: bool = False,
    ) -> None:
        """choices: each `per_prompt` consecutive ones have the same prompt. id, model: as the client sees them.

        in_bulk: no delta is urgent (no streaming, no stop strings), so many are read together.
        """
        self.id = id
        self._tokenizer: Tokenizer | None = None
        self.model = model
        self.ignored: Sequence[str] = ()
        """Fields of the request that have no effect on the response."""
        self.warnings: Sequence[str] = ()
        """What is probably a mistake in the request."""
        self._worker = worker
        self._metrics, self._recorder, self._trace, self._spend = records
        self._spent: Spent | None = None  # once the engine has accepted it, with metrics
        self._arrival = choices[0].request.arrival_time
        self._per_prompt = per_prompt
        self._latest = [self._arrival] * len(choices)
        self._in_bulk = in_bulk
        self._loop: asyncio.AbstractEventLoop  # the reader's, from `start` on
        self._outputs: deque[tuple[RequestOutput, float]] = deque()  # with their arrival times
        self._came: asyncio.Future[None] | None = None  # the reader waits for it
        self._turn_ends = 0.0
        self.choices = choices
        self._by_request = {choice.request.id: choice for choice in self.choices}
        self._open: set[str] = set()

    @property
    def tokenizer(self) -> Tokenizer:
        """The one that made the prompts: the model's, or an adapter's; set where text is made of the tokens."""
        assert self._tokenizer is not None
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts; one with several choices counts once."""
        return sum(len(choice.prompt_token_ids) for choice in self.choices[:: self._per_prompt])

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had, as far as known."""
        return sum(choice.num_cached_tokens or 0 for choice in self.choices[:: self._per_prompt])

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def num_accepted_drafts(self) -> int:
        return sum(choice.num_accepted_drafts for choice in self.choices)

    @property
    def num_rejected_drafts(self) -> int:
        return sum(choice.num_rejected_drafts for choice in self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning among the generated ones, shown or not."""
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    async def start(self) -> None:
        """Returns when the engine has accepted every choice; raises its InvalidRequest or Overloaded otherwise."""
        loop = self._loop = asyncio.get_running_loop()
        receiver = (self._put_in_bulk, None) if self._in_bulk else (self._put, loop)
        waiting: list[Future[None]] = []
        all_settled = _AllSettled(len(self.choices))
        try:
            self._open.update(self._by_request)
            for first in range(0, len(self.choices), AT_ONCE):
                if first:
                    await asyncio.sleep(0)
                some = self.choices[first : first + AT_ONCE]
                for each in some:
                    waiting.append(self._worker.submit(each.request, *receiver))
                    waiting[-1].add_done_callback(all_settled.note)
            await all_settled
            if (error := next(filter(None, (each.exception() for each in waiting)), None)) is not None:
                try:
                    raise error
                finally:
                    del error  # else the error's own frame refers to it
            self._check_tokenizer()
        except BaseException:
            while waiting:  # nobody waits for them any more; the error's frame should not refer to them
                waiting.pop().cancel()
            for request_id in self._open:
                self._worker.abort(request_id)
            self._open.clear()
            raise
        if self._metrics is not None:
            tenant = self.choices[0].request.tenant
            self._spent = self._metrics.accepted(self.model, tenant, len(self.choices), self.num_prompt_tokens)
        if self._spend is not None:
            self._spend(self.num_prompt_tokens)

    def _check_tokenizer(self) -> None:
        """Raise EngineUnavailable if the adapter's name means a version with other tokens than the prompts'."""
        for choice in self.choices if self._tokenizer is not None else ():
            bound = choice.request.bound
            if bound is not None and bound.manifest.tokens != self.tokenizer.tokens:
                raise EngineUnavailable("the adapter was replaced by one with other tokens meanwhile; ask again")

    async def _pause(self) -> None:
        """Let others have their turn until there is something to read."""
        if self._outputs:
            await asyncio.sleep(0)
        else:
            self._came = asyncio.get_running_loop().create_future()
            try:
                await self._came
            finally:
                self._came = None
        self._turn_ends = time.monotonic() + TURN_SECONDS

    def _failure(self, output: RequestOutput, ending: FinishReason) -> Exception:
        """The error of a request that the engine ended."""
        self._end(output.request_id, ending.value)
        reason = output.error or "the engine ended this request"
        if reason == ALL_BANNED:
            params = self._by_request[output.request_id].request.params
            return InvalidRequest("allowed_token_ids" if params.grammar is None else "grammar", reason)
        return GenerationFailed(reason, output.failure) if ending is FinishReason.ERROR else EngineUnavailable(reason)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Deltas of all choices as they come; ends when all have finished. Raises GenerationFailed."""
        self._turn_ends = time.monotonic() + TURN_SECONDS
        while self._open:
            if not self._outputs or time.monotonic() > self._turn_ends:
                await self._pause()
                continue
            output, came = self._outputs.popleft()
            if output.request_id not in self._open:
                continue
            ending = output.finish_reason
            if ending is FinishReason.ERROR or ending is FinishReason.ABORT:
                raise self._failure(output, ending)
            yield self._take(output, came)

    def _take(self, output: RequestOutput, came: float) -> Delta:
        delta = self._by_request[output.request_id].add_output(output)
        self._observe_tokens(delta, came)
        if (by := delta.finish_reason) is not None:
            if output.finish_reason is None:  # a stop string, which the engine does not look for
                self._worker.abort(output.request_id)
            self._end(output.request_id, FinishReason.STOP.value if by == TOOL_CALLS else by)
        return delta

    @property
    def goes_on(self) -> bool:
        """True if the next delta is ready and is read in this turn, before others get theirs."""
        if not self._outputs or time.monotonic() > self._turn_ends:
            return False
        return any(output.request_id in self._open for output, _ in self._outputs)

    def _put(self, output: RequestOutput) -> None:
        """Take an output on the reader's loop."""
        self._outputs.append((output, time.monotonic()))
        self._wake()

    def _put_in_bulk(self, output: RequestOutput) -> None:
        """Take an output on the engine's thread; wake the loop once there is enough to do."""
        self._outputs.append((output, time.monotonic()))
        if output.finish_reason is not None or len(self._outputs) % BULK == 0:
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop was closed, and the reader with it
                self._worker.abort(output.request_id)

    def _wake(self) -> None:
        if self._came is not None and not self._came.done():
            self._came.set_result(None)

    async def finish(self) -> None:
        """Read all deltas; the choices then hold the whole response."""
        async for _ in self:
            pass

    def close(self) -> None:
        """Abort the choices that still run. Safe to call at any time, and repeatedly."""
        for request_id in list(self._open):
            self._worker.abort(request_id)
            self._end(request_id, FinishReason.ABORT.value)

    def _end(self, request_id: str, finish_reason: str) -> None:
        self._open.discard(request_id)
        choice = self._by_request[request_id]
        if self._trace is not None:
            self._trace.ended(choice.request, self._ended(choice), finish_reason)
        if self._metrics is not None and self._spent is not None:
            self._metrics.ended(self._spent, self.model, finish_reason, self._ended(choice))
            if not self._open:
                self._metrics.request_ended(self._per_prompt, max(len(choice.token_ids) for choice in self.choices))
        if self._recorder is not None:
            self._recorder.note(choice.request, len(choice.prompt_token_ids), len(choice.token_ids))

    def _ended(self, choice: Choice) -> Ended:
        now = time.monotonic()
        return Ended(
            now - self._arrival,
            queue_seconds=choice.queue_seconds,
            first_seconds=choice.first_seconds,
            last_seconds=self._latest[choice.index] - self._arrival,
            num_prompt_tokens=len(choice.prompt_token_ids),
            num_cached_tokens=choice.num_cached_tokens or 0,
            num_generated_tokens=len(choice.token_ids),
            max_tokens=choice.request.params.max_tokens,
            num_preemptions=choice.num_preemptions,
            kinds=choice.kinds,
            page_seconds=choice.page_seconds_until(now),
            is_first_choice=choice.index % self._per_prompt == 0,
        )

    def _observe_tokens(self, delta: Delta, now: float) -> None:
        if self._spend is not None and delta.token_ids:
            self._spend(len(delta.token_ids))
        if self._metrics is None or self._spent is None or not delta.token_ids:
            return
        choice, seconds = self.choices[delta.index], now - self._latest[delta.index]
        first = len(choice.token_ids) == len(delta.token_ids)
        if first:
            choice.first_seconds = seconds
        self._metrics.generated(self._spent, len(delta.token_ids), seconds, first=first)
        self._latest[delta.index] = now
