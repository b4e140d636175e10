"""The routes that generate: each reads its own kind of request, and has the same calls made of it."""

from __future__ import annotations

import time
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from ..access.limits import RequestLimits, check_json
from ..engine.backend import Backend
from ..settings import Settings
from ..text.tokenizer import Tokenizer
from . import generate_request, messages_request, responses_request
from .answers import Answers, MakeFormat
from .calls import Calls
from .chat_request import ChatBatch, ChatCompletionRequest, has_messages
from .completion_request import CompletionRequest
from .generate_format import GenerateFormat
from .generate_request import GenerateRequest
from .messages_format import MessagesFormat
from .messages_request import MessagesBody
from .responses import ChatFormat, CompletionFormat
from .responses_format import ResponsesFormat
from .responses_request import ResponsesRequest
from .translation import renaming

CHAT_NAMES = {"prompt": "messages"}
"""What a chat request's prompt comes from."""


class GenerationApi:
    """Completions and chat completions, in the forms of several servers; `Calls` and `Answers` do what they share."""

    def __init__(
        self, worker: Backend, tokenizer: Tokenizer, settings: Settings, calls: Calls, answers: Answers
    ) -> None:
        self._worker = worker
        self._tokenizer = tokenizer
        self._settings = settings
        self._calls = calls
        self._answers = answers

    async def completions(self, request: Request) -> Response:
        arrival = time.monotonic()
        asked = await self._calls.parse(CompletionRequest.parse, request)
        return await self._complete(request, asked, arrival, CompletionFormat)

    async def invocations(self, request: Request) -> Response:
        """SageMaker's: a chat completion where the body has messages, else a completion."""
        arrival = time.monotonic()
        asked = await self._calls.parse(_conversation_or_prompt, request)
        if isinstance(asked, CompletionRequest):
            return await self._complete(request, asked, arrival, CompletionFormat)
        with renaming(CHAT_NAMES):
            return await self._chat("chatcmpl-", request, asked, arrival, ChatFormat)

    async def generate(self, request: Request) -> Response:
        """TGI's and LoRAX's."""
        return await self._generate(request, stream=False)

    async def generate_stream(self, request: Request) -> Response:
        return await self._generate(request, stream=True)

    async def generate_either(self, request: Request) -> Response:
        """The same, a stream if the body says so."""
        return await self._generate(request, stream=None)

    async def _generate(self, request: Request, *, stream: bool | None) -> Response:
        arrival = time.monotonic()
        asked = await self._calls.parse(partial(GenerateRequest.parse, stream=stream), request)
        with renaming(generate_request.NAMES):
            return await self._complete(request, asked.completion, arrival, partial(GenerateFormat, asked))

    async def _complete(
        self, request: Request, asked: CompletionRequest, arrival: float, make_format: MakeFormat
    ) -> Response:
        given = asked.prompts(self._settings.max_prompts)
        self._calls.check(request, asked, len(given))
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        most, specials = self._calls.most_tokens(asked), asked.add_special_tokens
        encoded = iter(await self._tokenizer.encode(texts, add_special_tokens=specials, most=most))
        prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt in given]
        kept = [asked.cut(prompt, self._worker.model.max_model_len) for prompt in prompts]
        generation = await self._calls.make("cmpl-", request, asked, kept, arrival, "prompt")
        shown = [one if after is before else after for one, before, after in zip(given, prompts, kept, strict=True)]
        return await self._answers.to(request, asked, generation, make_format, shown if asked.echo else ())

    async def chat_completions(self, request: Request) -> Response:
        arrival = time.monotonic()
        asked = await self._calls.parse(ChatCompletionRequest.parse, request)
        with renaming(CHAT_NAMES):
            return await self._chat("chatcmpl-", request, asked, arrival, ChatFormat)

    async def chat_batch(self, request: Request) -> Response:
        """vLLM's: a choice, or `n` of them, for each of several conversations."""
        arrival = time.monotonic()
        batch = await self._calls.parse(ChatBatch.parse, request)
        with renaming(CHAT_NAMES):
            return await self._converse("chatcmpl-", request, batch, arrival, ChatFormat)

    async def responses(self, request: Request) -> Response:
        """OpenAI's Responses, of which none is stored."""
        arrival = time.monotonic()
        asked = await self._calls.parse(ResponsesRequest.parse, request)
        with renaming(responses_request.NAMES):
            return await self._chat("resp_", request, asked.chat, arrival, partial(ResponsesFormat, asked))

    async def messages(self, request: Request) -> Response:
        """Anthropic's messages."""
        arrival = time.monotonic()
        asked = await self._calls.parse(MessagesBody.parse, request)
        with renaming(messages_request.NAMES):
            return await self._chat("msg_", request, asked, arrival, MessagesFormat)

    async def _chat(
        self, prefix: str, request: Request, asked: ChatCompletionRequest, arrival: float, make_format: MakeFormat
    ) -> Response:
        return await self._converse(prefix, request, ChatBatch(asked, [asked.conversation()]), arrival, make_format)

    async def _converse(
        self, prefix: str, request: Request, batch: ChatBatch, arrival: float, make_format: MakeFormat
    ) -> Response:
        asked, context = batch.asked, self._worker.model.max_model_len
        self._calls.check(request, asked, len(batch.conversations))
        most = self._calls.most_tokens(asked)
        encoded = [await self._tokenizer.encode_chat(one, most) for one in batch.conversations]
        prompts = [asked.cut(prompt, context) for prompt in encoded]
        generation = await self._calls.make(prefix, request, asked, prompts, arrival, "messages")
        return await self._answers.to(request, asked, generation, make_format, batch.begun if asked.echo else ())


def _conversation_or_prompt(body: bytes, limits: RequestLimits) -> ChatCompletionRequest | CompletionRequest:
    check_json(body, limits.max_json_values)
    return (ChatCompletionRequest if has_messages(body) else CompletionRequest).parse(body, limits)
