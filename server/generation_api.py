"""The routes that generate: from an HTTP request to the engine and back."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from ..core.sampling_params import InvalidRequest
from .chat_request import ChatCompletionRequest
from .completion_request import CompletionRequest
from .errors import as_api_error, client_gone, no_model, read_body
from .generation import Generation
from .logprobs import LogprobFormat
from .metrics import Metrics
from .openai import GenerationRequest
from .responses import AnswerFormat, ChatFormat, CompletionFormat, Echo, Extras
from .served_model import ServedModel
from .sse import DONE, EventStream, event, while_connected
from .tokenizer import Tokenizer
from .worker import EngineWorker

log = logging.getLogger(__name__)


class GenerationApi:
    """Completions and chat completions; the engine is only reached through the worker."""

    def __init__(self, worker: EngineWorker, tokenizer: Tokenizer, served: ServedModel, metrics: Metrics) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._served = served
        self._metrics = metrics
        self._scores = LogprobFormat(tokenizer.vocabulary)

    async def completions(self, request: Request) -> Response:
        arrival = time.monotonic()
        asked = CompletionRequest.parse(await read_body(request, self._served.max_body_bytes))
        given = asked.prompts(self._served.max_prompts)
        self._check_choices(asked, len(given))
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        encoded = iter(await self._tokenizer.encode(texts, add_special_tokens=asked.add_special_tokens))
        prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt in given]
        generation = self._generation("cmpl-", asked, prompts, arrival)
        return await self._answer(request, asked, generation, CompletionFormat, given if asked.echo else ())

    async def chat_completions(self, request: Request) -> Response:
        arrival = time.monotonic()
        asked = ChatCompletionRequest.parse(await read_body(request, self._served.max_body_bytes))
        self._check_choices(asked, 1)
        prompt = await self._tokenizer.encode_chat([message.for_template() for message in asked.messages])
        generation = self._generation("chatcmpl-", asked, [prompt], arrival)
        try:
            return await self._answer(request, asked, generation, ChatFormat)
        except InvalidRequest as error:
            raise InvalidRequest("messages", str(error)) if error.field == "prompt" else error from None

    def _check_choices(self, asked: GenerationRequest, num_prompts: int) -> None:
        limit = self._served.max_prompts
        if num_prompts * asked.n > limit:
            count = f"these are {asked.n} to each of {num_prompts} prompts" if num_prompts > 1 else f"n is {asked.n}"
            raise InvalidRequest("n", f"at most {limit} answers are given in one call, {count}")

    def _generation(
        self, prefix: str, asked: GenerationRequest, prompts: list[list[int]], arrival: float
    ) -> Generation:
        limit = self._worker.model.max_model_len
        bad_words = self._tokenizer.bad_words(asked.bad_words)
        params = [param for prompt in prompts for param in asked.sampling_params(limit - len(prompt), bad_words)]
        streams = [
            self._tokenizer.text_stream(
                asked.stop,
                skip_special_tokens=asked.skip_special_tokens,
                include_stop=asked.include_stop_str_in_output,
                min_tokens=asked.min_tokens,
            )
            for _ in params
        ]
        return Generation(
            self._worker,
            prefix + uuid.uuid4().hex,
            [prompt for prompt in prompts for _ in range(asked.n)],
            params,
            streams,
            model=asked.model,
            adapter=None if asked.model == self._served.name else asked.model,
            metrics=self._metrics,
            arrival=arrival,
            per_prompt=asked.n,
            shows_stop_token=asked.include_stop_str_in_output,
            prompt_only=asked.prompt_only,
        )

    def _echoes(self, asked: GenerationRequest, given: Sequence[str | list[int]], generation: Generation) -> list[Echo]:
        """An entry per choice. A prompt that came as text comes back as it was."""
        echoes = []
        skip = asked.skip_special_tokens
        for prompt, choice in zip(given, generation.choices[:: asked.n], strict=True):
            token_ids = choice.prompt_token_ids
            text = prompt if isinstance(prompt, str) else self._tokenizer.decode(token_ids, skip_special_tokens=skip)
            offsets: list[int] = []
            if asked.num_logprobs is not None:
                offsets = [
                    min(offset, len(text)) for offset in self._tokenizer.offsets(token_ids, skip_special_tokens=skip)
                ]
            echoes += [Echo(text, offsets)] * asked.n
        return echoes

    async def _answer(
        self,
        request: Request,
        asked: GenerationRequest,
        generation: Generation,
        format_class: type[AnswerFormat],
        echoed: Sequence[str | list[int]] = (),
    ) -> Response:
        try:
            await generation.start()
        except InvalidRequest as error:
            raise no_model(asked.model) if error.field == "model" else error from None
        try:  # now the engine has found the prompts to be such that they can be decoded
            echoes = await asyncio.to_thread(self._echoes, asked, echoed, generation) if echoed else ()
        except BaseException:
            generation.close()
            raise
        extras = Extras(
            token_ids=asked.return_token_ids,
            step_info=asked.return_step_info,
            usage_chunk=asked.stream and asked.include_usage,
            running_usage=asked.stream and asked.continuous_usage,
            logprobs=asked.num_logprobs,
            prompt_logprobs=asked.prompt_logprobs,
            echoes=echoes,
        )
        answer = format_class(generation, self._scores, extras)
        if asked.stream:
            return EventStream(_events(generation, answer), generation.close)
        try:
            await while_connected(request.receive, _read(generation, answer))
        except ClientDisconnect:
            return client_gone()
        finally:
            generation.close()
        return JSONResponse(answer.answer())


async def _read(generation: Generation, answer: AnswerFormat) -> None:
    async for delta in generation:
        answer.note(delta)


async def _events(generation: Generation, answer: AnswerFormat) -> AsyncIterator[bytes]:
    """A call's deltas as events. The status line is gone by now, so an error is an event, too."""
    try:
        async for delta in generation:
            for chunk in answer.chunks(delta):
                yield event(chunk)
        if (last := answer.last_chunk()) is not None:
            yield event(last)
    except Exception as error:
        answer_to_error = as_api_error(error)
        if answer_to_error.unforeseen:
            log.exception("a stream failed")
        yield event(answer_to_error.body())
    yield DONE
