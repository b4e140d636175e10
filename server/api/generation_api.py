"""Routes that generate text. Each parses its own request format; `GenerationBuilder` and `Responder` do the rest.

Tests: tests/server/test_completions.py, tests/server/test_chat.py
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ..access.limits import RequestLimits, check_json
from . import generate_request, messages_request, tokens_api
from .caller import Caller
from .chat_request import ChatBatch, ChatCompletionRequest, Conversations, has_messages
from .completion_request import CompletionRequest
from .generate_format import GenerateFormat
from .generate_request import GenerateBody, GenerateRequest
from .generation_builder import GenerationBuilder
from .messages_format import MessagesFormat
from .messages_request import MessagesBody
from .responder import MakeFormat, Responder
from .responses import ChatFormat, CompletionFormat
from .responses_format import ResponsesFormat
from .responses_request import ResponsesBody, ResponsesRequest
from .tokens_api import TokensBody, TokensFormat
from .translation import renaming

CHAT_NAMES = {"prompt": "messages"}
"""The source of a chat request's prompt."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A parsed request, and the format of its response."""

    asked: CompletionRequest | ChatBatch
    make_format: MakeFormat
    prefix: str
    """Prefix of the response's id."""
    names: Mapping[str, str]
    """The client's names of fields, for errors."""
    left_out: Sequence[str] = ()
    """The client's fields without an effect."""


def _completion(body: bytes, limits: RequestLimits) -> ParsedRequest:
    return ParsedRequest(CompletionRequest.parse(body, limits), CompletionFormat, "cmpl-", {})


def _chat(body: bytes, limits: RequestLimits) -> ParsedRequest:
    return ParsedRequest(ChatBatch.of(ChatCompletionRequest.parse(body, limits)), ChatFormat, "chatcmpl-", CHAT_NAMES)


def _chat_batch(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """vLLM's batch: a choice, or `n` of them, for each of several conversations."""
    return ParsedRequest(ChatBatch.parse(body, limits), ChatFormat, "chatcmpl-", CHAT_NAMES)


def _invocation(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """SageMaker's route: a chat completion if the body has messages, else a completion."""
    check_json(body, limits.max_json_values)
    return (_chat if has_messages(body) else _completion)(body, limits)


def _response(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """OpenAI's Responses; none is stored."""
    asked = ResponsesRequest.parse(body, limits)
    make_format = partial(ResponsesFormat, asked.told, asked.tools)
    return ParsedRequest(ChatBatch.of(asked.chat), make_format, "resp_", asked.names, asked.left_out)


def _message(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Anthropic's messages."""
    return ParsedRequest(ChatBatch.of(MessagesBody.parse(body, limits)), MessagesFormat, "msg_", messages_request.NAMES)


def _generate(body: bytes, limits: RequestLimits, stream: bool | None = False) -> ParsedRequest:
    """TGI's and LoRAX's."""
    asked = GenerateRequest.parse(body, limits, stream=stream)
    return ParsedRequest(asked.completion, partial(GenerateFormat, asked), "cmpl-", generate_request.NAMES)


def _tokens(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """vLLM's completion of tokens with tokens."""
    return ParsedRequest(TokensBody.read(body, limits).completion(limits), TokensFormat, "generate-", tokens_api.NAMES)


ROUTES: dict[str, tuple[Callable[[bytes, RequestLimits], ParsedRequest], type[BaseModel] | None]] = {
    "/v1/completions": (_completion, CompletionRequest),
    "/v1/chat/completions": (_chat, ChatCompletionRequest),
    "/v1/chat/completions/batch": (_chat_batch, Conversations),
    "/v1/responses": (_response, ResponsesBody),
    "/v1/messages": (_message, MessagesBody),
    "/generate": (_generate, GenerateBody),
    "/generate_stream": (partial(_generate, stream=True), GenerateBody),
    "/": (partial(_generate, stream=None), GenerateBody),
    "/inference/v1/generate": (_tokens, TokensBody),
    "/invocations": (_invocation, None),
}
"""Parsers and fields of the bodies of each path; None: one of two others."""


@dataclass(slots=True)
class GenerationApi:
    """Completions and chat completions in several formats; `GenerationBuilder` and `Responder` are common."""

    builder: GenerationBuilder
    responder: Responder

    def endpoint(self, path: str) -> Callable[[Request], Awaitable[Response]]:
        read, _ = ROUTES[path]

        async def answer(request: Request) -> Response:
            arrival = time.monotonic()
            parsed = await self.builder.parse(read, request)
            with renaming(parsed.names):
                if isinstance(parsed.asked, ChatBatch):
                    return await self._converse(request, parsed, parsed.asked, arrival)
                return await self._complete(request, parsed, parsed.asked, arrival)

        answer.__doc__ = getattr(read, "func", read).__doc__
        return answer

    async def _complete(
        self, request: Request, parsed: ParsedRequest, asked: CompletionRequest, arrival: float
    ) -> Response:
        generation, shown = await self.builder.complete(Caller.of(request), asked, parsed.prefix, arrival)
        return await self.responder.to(request, asked, generation, parsed.make_format, shown if asked.echo else ())

    async def _converse(self, request: Request, parsed: ParsedRequest, batch: ChatBatch, arrival: float) -> Response:
        asked, generation = batch.asked, await self.builder.converse(Caller.of(request), batch, parsed.prefix, arrival)
        generation.ignored = [*generation.ignored, *parsed.left_out]
        return await self.responder.to(
            request, asked, generation, parsed.make_format, batch.begun if asked.echo else ()
        )
