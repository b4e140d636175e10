"""The routes: from an HTTP request to the engine and back."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from .. import __version__
from ..core.sampling_params import InvalidRequest
from .errors import ApiError, as_api_error, client_gone
from .generation import Generation
from .metrics import Metrics
from .openai import ChatCompletionRequest, CompletionRequest, GenerationRequest
from .responses import AnswerFormat, ChatFormat, CompletionFormat
from .sse import DONE, EventStream, event, while_connected
from .tokenizer import Tokenizer
from .worker import EngineWorker

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the API says about the base model, and what it takes in one call."""

    name: str
    root: str
    max_body_bytes: int
    max_prompts: int


class Api:
    """The handlers of one app; the engine is only reached through the worker."""

    def __init__(self, worker: EngineWorker, tokenizer: Tokenizer, served: ServedModel) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._served = served
        self._metrics = Metrics(lambda: worker.stats)
        self._started = int(time.time())

    # --- about the server ---

    async def health(self, _: Request) -> Response:
        """200 while the engine takes requests, 503 when it doesn't."""
        healthy = self._worker.healthy
        body = {"status": "ok" if healthy else "unavailable", "stats": asdict(self._worker.stats)}
        if not healthy:
            body["reason"] = self._worker.failure
        return JSONResponse(body, status_code=200 if healthy else 503)

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def metrics(self, _: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": await self._model_cards()})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for card in await self._model_cards():
            if card["id"] == name:
                return JSONResponse(card)
        raise _no_model(name)

    async def _model_cards(self) -> list[dict[str, object]]:
        adapters = await asyncio.wrap_future(self._worker.call(lambda engine: list(engine.store.describe())))
        common = {"object": "model", "created": self._started, "owned_by": "chorus"}
        limit = self._worker.model.max_model_len
        base = {
            "id": self._served.name,
            **common,
            "root": self._served.root,
            "parent": None,
            "max_model_len": limit,
        }
        return [
            base,
            *(
                {
                    "id": adapter.name,
                    **common,
                    "root": str(adapter.path),
                    "parent": self._served.name,
                    "max_model_len": limit,
                    "rank": adapter.rank,
                }
                for adapter in adapters
            ),
        ]

    # --- generation ---

    async def completions(self, request: Request) -> Response:
        arrival = time.monotonic()
        asked = CompletionRequest.parse(await self._body(request))
        given = asked.prompts(self._served.max_prompts)
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        encoded = iter(await self._tokenizer.encode(texts, add_special_tokens=asked.add_special_tokens))
        prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt in given]
        generation = self._generation("cmpl-", asked, prompts, arrival)
        return await self._answer(request, asked, generation, CompletionFormat)

    async def chat_completions(self, request: Request) -> Response:
        arrival = time.monotonic()
        asked = ChatCompletionRequest.parse(await self._body(request))
        prompt = await self._tokenizer.encode_chat([message.for_template() for message in asked.messages])
        generation = self._generation("chatcmpl-", asked, [prompt], arrival)
        try:
            return await self._answer(request, asked, generation, ChatFormat)
        except InvalidRequest as error:
            raise InvalidRequest("messages", str(error)) if error.field == "prompt" else error from None

    async def _body(self, request: Request) -> bytes:
        limit = self._served.max_body_bytes
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise ApiError(413, f"the body is larger than the {limit} bytes this server takes")
        return bytes(body)

    def _generation(
        self, prefix: str, asked: GenerationRequest, prompts: list[list[int]], arrival: float
    ) -> Generation:
        limit = self._worker.model.max_model_len
        return Generation(
            self._worker,
            prefix + uuid.uuid4().hex,
            prompts,
            [asked.sampling_params(limit - len(prompt)) for prompt in prompts],
            [self._tokenizer.text_stream(asked.stop, skip_special_tokens=asked.skip_special_tokens) for _ in prompts],
            model=asked.model,
            adapter=None if asked.model == self._served.name else asked.model,
            metrics=self._metrics,
            arrival=arrival,
        )

    async def _answer(
        self, request: Request, asked: GenerationRequest, generation: Generation, format_class: type[AnswerFormat]
    ) -> Response:
        answer = format_class(
            generation,
            token_ids=asked.return_token_ids,
            step_info=asked.return_step_info,
            usage_chunk=asked.stream and asked.include_usage,
        )
        try:
            await generation.start()
        except InvalidRequest as error:
            raise _no_model(asked.model) if error.field == "model" else error from None
        if asked.stream:
            return EventStream(_events(generation, answer), generation.close)
        try:
            await while_connected(request.receive, _read(generation, answer))
        except ClientDisconnect:
            return client_gone()
        finally:
            generation.close()
        return JSONResponse(answer.answer())


def _no_model(name: str) -> ApiError:
    message = f"there is no model {name!r}; GET /v1/models lists those there are"
    return ApiError(404, message, param="model", code="model_not_found")


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
