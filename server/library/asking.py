"""Runs prompts on an event loop: each prompt is one request, built by the HTTP API's code.

Tests: tests/server/test_llm.py
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...core.requests.request_params import AdapterPaused, InvalidRequest, NotServed
from ...core.scheduling.overload import Overloaded
from ...memory.adapters.store import UnknownAdapter
from ..api.caller import Caller
from ..api.chat_request import ChatBatch, ChatCompletionRequest
from ..api.completion_request import CompletionRequest
from ..api.generation_builder import GenerationBuilder
from ..api.near import nearest
from ..api.pooling.pooling_builder import PoolingBuilder
from ..api.pooling.pooling_request import ClassifyBody, EmbeddingsBody, ScoreBody
from ..api.pooling.pooling_scores import Scores
from ..api.translation import renaming
from ..engine.generation import Generation
from ..engine.sourced_adapters import SourcedAdapters
from ..errors import validated
from .completion import Collected, Completion, completion_of, streamed_completion, used_adapter
from .embedding import Classification, Embedding
from .images import with_files
from .params import SamplingParams, plain_copy, python_errors

R = TypeVar("R")
Begun = tuple[Generation, Callable[[], list[R]]]
"""A generation, and a function that returns its results at its end."""

PROGRAM = Caller()
"""The caller: the program itself."""

PREFIX = "llm-"

INPUTS = {"prompt": "prompts", "input": "prompts"}
"""The library's names of fields of the equivalent HTTP request."""

MAX_PLAIN = 1024
"""Characters of a text that is tokenized together with others; longer ones are first checked for length."""

MAX_LISTED = 8
"""Names of adapters that an error lists."""


@dataclass(slots=True)
class PromptRequest:
    """A prompt, or a conversation, and its parameters."""

    prompt: Any
    params: SamplingParams
    adapter: str | None = None
    is_chat: bool = False
    where: str = ""
    """Prefix of errors about it."""

    @property
    def is_plain(self) -> bool:
        """True if only its tokens depend on its text."""
        is_text = not self.is_chat and isinstance(self.prompt, str) and len(self.prompt) <= MAX_PLAIN
        return is_text and not self.params.echo and "return_full_text" not in self.params.given

    @property
    def adds_specials(self) -> bool:
        return bool(self.params.add_special_tokens)

    def body(self) -> dict[str, Any]:
        """The body of the equivalent HTTP request."""
        params = self.params
        body = params.for_chat(plain_copy(with_files(self.prompt))) if self.is_chat else params.for_text(self.prompt)
        body.pop("return_token_ids", None)
        return body if self.adapter is None else {**body, "lora_path": self.adapter}


@dataclass(slots=True)
class Asking:
    """Runs the prompts of one LLM; its coroutines run on one event loop."""

    builder: GenerationBuilder
    pooling: PoolingBuilder
    sourced: SourcedAdapters
    most: int
    """Completions in the engine at once; the others follow as these end."""
    _held: int = 0
    _freed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def all(self, asked: Sequence[PromptRequest], advance: Callable[[], None] = lambda: None) -> list[Completion]:
        """Completions in the order of the prompts; the first error cancels the others.

        advance: called as each ends.
        """
        tasks: list[asyncio.Task[Completion]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for index, one in enumerate(asked):
                    if index % self.most == 0:
                        await self._encode(asked[index : index + self.most])
                    await self._take(one.params.n or 1)
                    task = group.create_task(self._one(one))
                    task.add_done_callback(lambda _: advance())
                    tasks.append(task)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def embed(
        self, given: Sequence[Any], adapters: Sequence[str | None], fields: Mapping[str, Any]
    ) -> list[Embedding]:
        """Vectors in the order of the inputs. fields: the HTTP request's."""

        async def begin(part: Sequence[Any], adapter: str | None) -> Begun[Embedding]:
            asked = validated(EmbeddingsBody, {**fields, "input": part, "lora_path": adapter})
            generation, vectors = await self.pooling.embedded(PROGRAM, asked, PREFIX, time.monotonic())
            return generation, lambda: [
                Embedding(vector, tuple(choice.prompt_token_ids), used_adapter(choice))
                for vector, choice in zip(vectors(), generation.choices, strict=True)
            ]

        return await self._pooled(given, adapters, begin)

    async def classify(
        self, given: Sequence[Any], adapters: Sequence[str | None], fields: Mapping[str, Any]
    ) -> list[Classification]:
        """Classes in the order of the inputs. fields: the HTTP request's."""

        async def begin(part: Sequence[Any], adapter: str | None) -> Begun[Classification]:
            asked = validated(ClassifyBody, {**fields, "input": part, "lora_path": adapter})
            generation, classes = await self._scores.classified(PREFIX, PROGRAM, asked, time.monotonic())
            return generation, lambda: [
                Classification(*found, tuple(choice.prompt_token_ids), used_adapter(choice))
                for found, choice in zip(classes(), generation.choices, strict=True)
            ]

        return await self._pooled(given, adapters, begin)

    async def score(
        self, pairs: Sequence[tuple[str, str]], adapter: str | None, fields: Mapping[str, Any]
    ) -> list[float]:
        """Scores in the order of the pairs. fields: the HTTP request's."""

        async def begin(part: Sequence[Any], adapter: str | None) -> Begun[float]:
            first, second = map(list, zip(*part, strict=True))
            asked = validated(ScoreBody, {**fields, "text_1": first, "text_2": second, "lora_path": adapter})
            return await self._scores.scored(PREFIX, PROGRAM, asked, part, time.monotonic(), activates=asked.activates)

        return await self._pooled(pairs, [adapter] * len(pairs), begin)

    @property
    def _scores(self) -> Scores:
        return Scores(self.pooling, self.sourced.bring)

    async def _pooled(
        self,
        given: Sequence[Any],
        adapters: Sequence[str | None],
        begin: Callable[[Sequence[Any], str | None], Awaitable[Begun[R]]],
    ) -> list[R]:
        """Results in the order of the inputs; an adapter's are computed together."""
        indices: dict[str | None, list[int]] = defaultdict(list)
        for index, adapter in enumerate(adapters):
            indices[adapter].append(index)
        found: dict[int, R] = {}
        step = min(self.most, self.builder.settings.max_inputs)
        for adapter, its in indices.items():
            for first in range(0, len(its), step):
                part = its[first : first + step]
                await self._take(len(part))
                try:
                    results = await self._results(lambda: begin([given[index] for index in part], adapter), adapter)  # noqa: B023 - awaited here
                    found.update(zip(part, results, strict=True))
                finally:
                    await self._give_back(len(part))
        return [found[index] for index in range(len(given))]

    async def _results(self, begin: Callable[[], Awaitable[Begun[R]]], adapter: str | None) -> list[R]:
        with python_errors(), renaming(INPUTS):
            try:
                generation, results = await begin()
                try:
                    await self.sourced.start(generation)
                    await generation.finish()
                    return results()
                finally:
                    generation.close()
            except (NotServed, AdapterPaused):
                raise
            except InvalidRequest as error:
                if error.field == "model" and adapter is not None and await self._is_unknown(adapter):
                    raise await self._no_adapter(adapter) from None
                raise

    async def _is_unknown(self, adapter: str) -> bool:
        try:
            await asyncio.wrap_future(self.builder.worker.adapters.state(adapter))
        except UnknownAdapter:
            return True
        return False

    async def _encode(self, asked: Sequence[PromptRequest]) -> None:
        """Tokenize short texts, many at once: each call of the tokenizer waits for the interpreter's lock."""
        alike: dict[tuple[str | None, bool], list[PromptRequest]] = defaultdict(list)
        for one in asked:
            if one.is_plain:
                alike[one.adapter, one.adds_specials].append(one)
        for (adapter, specials), plain in alike.items():
            tokenizer = await self.builder.tokenizer_of(PROGRAM, None, adapter, chat=False)
            texts = [one.prompt for one in plain]
            encoded = await tokenizer.encode(texts, add_special_tokens=specials)
            for one, tokens in zip(plain, encoded, strict=True):
                one.prompt = tokens or one.prompt

    async def _one(self, asked: PromptRequest) -> Completion:
        """One completion; its capacity was reserved."""
        try:
            while True:
                try:
                    async with self._begun(asked, stream=False) as (generation, begun):
                        await generation.finish()
                        return completion_of(generation, begun)
                except Overloaded:
                    if self._held <= (asked.params.n or 1):  # no other completion of this program will free capacity
                        raise
                    async with self._freed:
                        await self._freed.wait()
        finally:
            await self._give_back(asked.params.n or 1)

    async def pieces(self, asked: PromptRequest, ended: list[Completion]) -> AsyncGenerator[str, None]:
        """A completion's text as it comes; at its end the whole completion is put into `ended`."""
        collected = Collected()
        async with self._begun(asked, stream=True) as (generation, begun):
            if begun:
                yield begun
            async for delta in generation:
                if text := collected.add(delta):
                    yield text
            ended.append(streamed_completion(generation, collected, begun))

    @asynccontextmanager
    async def _begun(self, asked: PromptRequest, *, stream: bool) -> AsyncIterator[tuple[Generation, str]]:
        """A generation that the engine has accepted, and the text that its completion begins with; closed at the end of
        the `with` block.
        """
        with python_errors(asked.where):
            try:
                generation, begun = await self._call(asked, stream=stream)
                try:
                    await self.sourced.start(generation)
                    yield generation, begun
                finally:
                    generation.close()
            except (NotServed, AdapterPaused):
                raise
            except InvalidRequest as error:
                if error.field == "model" and asked.adapter is not None:
                    raise await self._no_adapter(asked.adapter) from None
                raise

    async def _call(self, asked: PromptRequest, *, stream: bool) -> tuple[Generation, str]:
        builder, arrival = self.builder, time.monotonic()
        body = {**asked.body(), "stream": stream}
        if asked.is_chat:
            batch = ChatBatch.of(ChatCompletionRequest.of(body, builder.settings))
            generation = await builder.converse(PROGRAM, batch, PREFIX, arrival)
            return generation, batch.begun[0] if batch.asked.echo else ""
        if asked.prompt == []:
            raise InvalidRequest("prompt", "the prompt has no tokens; give at least one")
        request = CompletionRequest.of(body, builder.settings)
        generation, (shown,) = await builder.complete(PROGRAM, request, PREFIX, arrival)
        if not request.echo:
            return generation, ""
        skip = request.skip_special_tokens
        return generation, shown if isinstance(shown, str) else generation.tokenizer.decode(
            shown, skip_special_tokens=skip
        )

    async def _no_adapter(self, name: str) -> InvalidRequest:
        names = sorted(await asyncio.wrap_future(self.builder.worker.adapters.names()))
        if (near := nearest(name, names)) is not None:
            hint = f"did you mean {near!r}?"
        elif names:
            hint = "there are " + ", ".join(names[:MAX_LISTED]) + (", …" if len(names) > MAX_LISTED else "")
        else:
            hint = "none is loaded; call load_adapter"
        return InvalidRequest("adapter", f"there is no adapter {name!r}; {hint}")

    async def _take(self, count: int) -> None:
        async with self._freed:
            await self._freed.wait_for(lambda: not self._held or self._held + count <= self.most)
            self._held += count

    async def _give_back(self, count: int) -> None:
        async with self._freed:
            self._held -= count
            self._freed.notify_all()
