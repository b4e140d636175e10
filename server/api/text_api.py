"""Routes that convert between text and tokens, with vLLM's request bodies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ...core.requests.request_params import InvalidRequest
from ..access.limits import RequestLimits, check_json
from ..engine.backend import Backend
from ..errors import JsonResponse
from ..executors import DaemonPool
from ..text.tokenizer import Tokenizer
from . import messages_request
from .caller import Caller
from .chat_request import ChatCompletionRequest, has_messages
from .generation_builder import GenerationBuilder
from .json_text import encode
from .messages_request import MessagesToCount
from .openai import Name
from .responses_request import ResponsesRequest
from .translation import OtherBody, renaming


class TextToTokens(OtherBody):
    """A text to tokenize."""

    model: Name | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class ChatToTokens(ChatCompletionRequest):
    """A conversation to tokenize; fields that only concern generation are ignored."""

    return_token_strs: bool = False
    tool_choice: Any = "none"


class TokensToText(OtherBody):
    """Tokens to decode."""

    model: Name | None = None
    tokens: list[Annotated[int, Field(ge=0)]]


def tokenize_request(body: bytes, limits: RequestLimits) -> TextToTokens | ChatToTokens:
    """Parse either kind of body of POST /tokenize."""
    check_json(body, limits.max_json_values)
    return ChatToTokens.parse(body, limits) if has_messages(body) else TextToTokens.read(body, limits)


class TextApi:
    """vLLM's /tokenize and /detokenize."""

    def __init__(self, worker: Backend, tokenizer: Tokenizer, builder: GenerationBuilder, threads: DaemonPool) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._builder = builder
        self._threads = threads

    async def tokenize(self, request: Request) -> Response:
        asked = await self._builder.parse(tokenize_request, request)
        await self._builder.require(Caller.of(request), asked.model, getattr(asked, "lora_path", None))
        limit = self._worker.model.max_model_len
        chat, path = isinstance(asked, ChatToTokens), getattr(asked, "lora_path", None)
        tokenizer = await self._builder.tokenizer_of(Caller.of(request), asked.model, path, chat=chat)
        if isinstance(asked, ChatToTokens):
            caller = Caller.of(request)
            tokens, _ = await self._builder.encode_chat(caller, asked, tokenizer, asked.conversation(), limit)
        else:
            specials = asked.add_special_tokens
            (tokens,) = await tokenizer.encode([asked.prompt], add_special_tokens=specials, most=limit)
        names = tokenizer.names(tokens) if asked.return_token_strs else None
        body = {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": names}
        return Response(await self._threads.run(encode, body), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        asked = await self._builder.parse(TokensToText.read, request)
        await self._builder.require(Caller.of(request), asked.model)
        tokenizer = await self._builder.tokenizer_of(Caller.of(request), asked.model, None, chat=False)
        vocab, own = self._worker.model.vocab_size, tokenizer.own.values()
        if bad := [token for token in asked.tokens if token >= vocab and token not in own]:
            raise InvalidRequest("tokens", f"token id {max(bad)} is outside the vocabulary of {vocab}")
        text = await self._threads.run(partial(tokenizer.decode, asked.tokens, skip_special_tokens=False))
        return JsonResponse({"prompt": text})

    async def tokenizer_info(self, _: Request) -> Response:
        """vLLM's tokenizer_info: the data that a client needs to apply the chat template itself."""
        return JsonResponse(self._tokenizer.info())

    async def count_tokens(self, request: Request) -> Response:
        """Anthropic's count_tokens: the length of a conversation's prompt."""
        asked = await self._builder.parse(MessagesToCount.parse, request)
        return JsonResponse({"input_tokens": await self._length(request, asked, messages_request.NAMES)})

    async def input_tokens(self, request: Request) -> Response:
        """OpenAI's count of the tokens that a response would be made from."""
        asked = await self._builder.parse(ResponsesRequest.parse, request)
        length = await self._length(request, asked.chat, asked.names)
        return JsonResponse({"object": "response.input_tokens", "input_tokens": length})

    async def _length(self, request: Request, asked: ChatCompletionRequest, names: Mapping[str, str]) -> int:
        """Tokens of a conversation's prompt. names: of fields, in errors."""
        await self._builder.require(Caller.of(request), asked.model, asked.lora_path)
        with renaming(names):
            tokenizer = await self._builder.tokenizer_of(Caller.of(request), asked.model, asked.lora_path)
            most = self._worker.model.max_model_len
            tokens, _ = await self._builder.encode_chat(
                Caller.of(request), asked, tokenizer, asked.conversation(), most
            )
            return len(tokens)
