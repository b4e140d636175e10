"""The routes that generate: from an HTTP request to the engine and back."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ...core.requests.grammar import Grammar
from ...core.requests.grammars import InvalidGrammar, grammars_of
from ...core.requests.request import Request as EngineRequest
from ...core.requests.sampling_params import AdapterPaused, InvalidRequest, NotServed, Seeds
from ...core.scheduling.overload import Overloaded
from ...memory.adapters.store import UnknownAdapter
from ..access.grants import NOWHERE
from ..access.limits import RequestLimits
from ..engine.backend import Backend
from ..engine.generation import Choice, Generation
from ..engine.sourced_adapters import SourcedAdapters
from ..engine.telemetry import Telemetry
from ..errors import ApiError, as_api_error, client_gone, no_model, read_body, too_long
from ..executors import DaemonPool
from ..settings import Settings
from ..text.call_formats import AnswerSyntax
from ..text.tokenizer import Tokenizer
from . import generate_request, messages_request, responses_request
from .adapter_header import ADAPTER, adapter_header
from .chat_request import ChatBatch, ChatCompletionRequest
from .completion_request import CompletionRequest
from .generate_format import GenerateFormat
from .generate_request import GenerateRequest
from .json_text import dumps, encode
from .logprobs import LogprobFormat
from .messages_format import MessagesFormat
from .messages_request import MessagesRequest
from .openai import GenerationRequest, names_of
from .price import check_steering, unasked_limit
from .responses import AnswerFormat, ChatFormat, CompletionFormat, Echo, Extras
from .responses_format import ResponsesFormat
from .responses_request import ResponsesRequest
from .sampling_defaults import SamplingDefaults
from .sse import EventStream, event, long_event, while_connected
from .translation import renaming

log = logging.getLogger(__name__)
access = logging.getLogger("chorus.access")

T = TypeVar("T")
MakeFormat = Callable[[Generation, LogprobFormat, Extras], AnswerFormat]

CHAT_NAMES = {"prompt": "messages"}
"""What a chat request's prompt comes from."""

IGNORED = "x-ignored-fields"
"""Header of an answer: fields that it does not depend on, because the model's chat template does not know them."""

LOAD, LOAD_FORMAT = "endpoint-load-metrics", "endpoint-load-metrics-format"
"""ORCA's headers: an answer's with the server's load, for balancers, and a request's that asks for it."""

MARK_TOKENS = 32
"""Tokens that the mark of reasoning, and a line break, have at most."""

THREAD_BODY = 16 << 10
"""Bytes of a request's body above which it is read beside the event loop."""

THREAD_SCORES = 500
"""Log-probabilities of an answer, or of a part of one, above which it is written beside the event loop."""


class GenerationApi:
    """Completions and chat completions; the engine is only reached through the worker."""

    def __init__(
        self,
        worker: Backend,
        tokenizer: Tokenizer,
        settings: Settings,
        defaults: SamplingDefaults,
        telemetry: Telemetry,
        threads: DaemonPool,
        sourced: SourcedAdapters,
    ) -> None:
        """threads: read long bodies and write long answers. sourced: brings adapters that are not registered."""
        self._worker = worker
        self._tokenizer = tokenizer
        self._settings = settings
        self._defaults = defaults
        self._telemetry = telemetry
        self._threads = threads
        self._sourced = sourced
        self._seeds = Seeds(settings.seed)

    async def completions(self, request: Request) -> Response:
        arrival = time.monotonic()
        asked = await self.parse(CompletionRequest.parse, request)
        return await self._complete(request, asked, arrival, CompletionFormat)

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
        asked = await self.parse(partial(GenerateRequest.parse, stream=stream), request)
        with renaming(generate_request.NAMES):
            return await self._complete(request, asked.completion, arrival, partial(GenerateFormat, asked))

    async def _complete(
        self, request: Request, asked: CompletionRequest, arrival: float, make_format: MakeFormat
    ) -> Response:
        given = asked.prompts(self._settings.max_prompts)
        self._check_choices(request, asked, len(given))
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        most, specials = self._most_tokens(asked), asked.add_special_tokens
        encoded = iter(await self._tokenizer.encode(texts, add_special_tokens=specials, most=most))
        prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt in given]
        kept = [asked.cut(prompt, self._worker.model.max_model_len) for prompt in prompts]
        generation = await self._generation("cmpl-", request, asked, kept, arrival, "prompt")
        shown = [one if after is before else after for one, before, after in zip(given, prompts, kept, strict=True)]
        return await self._answer(request, asked, generation, make_format, shown if asked.echo else ())

    async def chat_completions(self, request: Request) -> Response:
        arrival = time.monotonic()
        asked = await self.parse(ChatCompletionRequest.parse, request)
        with renaming(CHAT_NAMES):
            return await self._chat("chatcmpl-", request, asked, arrival, ChatFormat)

    async def chat_batch(self, request: Request) -> Response:
        """vLLM's: a choice, or `n` of them, for each of several conversations."""
        arrival = time.monotonic()
        batch = await self.parse(ChatBatch.parse, request)
        with renaming(CHAT_NAMES):
            return await self._converse("chatcmpl-", request, batch, arrival, ChatFormat)

    async def responses(self, request: Request) -> Response:
        """OpenAI's Responses, of which none is stored."""
        arrival = time.monotonic()
        asked = await self.parse(ResponsesRequest.parse, request)
        with renaming(responses_request.NAMES):
            return await self._chat("resp_", request, asked.chat, arrival, partial(ResponsesFormat, asked))

    async def messages(self, request: Request) -> Response:
        """Anthropic's messages."""
        arrival = time.monotonic()
        asked = await self.parse(MessagesRequest.parse, request)
        with renaming(messages_request.NAMES):
            return await self._chat("msg_", request, asked.chat, arrival, MessagesFormat)

    async def _chat(
        self, prefix: str, request: Request, asked: ChatCompletionRequest, arrival: float, make_format: MakeFormat
    ) -> Response:
        return await self._converse(prefix, request, ChatBatch(asked, [asked.conversation()]), arrival, make_format)

    async def _converse(
        self, prefix: str, request: Request, batch: ChatBatch, arrival: float, make_format: MakeFormat
    ) -> Response:
        asked, context = batch.asked, self._worker.model.max_model_len
        self._check_choices(request, asked, len(batch.conversations))
        most = self._most_tokens(asked)
        encoded = [await self._tokenizer.encode_chat(one, most) for one in batch.conversations]
        prompts = [asked.cut(prompt, context) for prompt in encoded]
        generation = await self._generation(prefix, request, asked, prompts, arrival, "messages")
        return await self._answer(request, asked, generation, make_format)

    async def parse(self, read: Callable[[bytes, RequestLimits], T], request: Request) -> T:
        """Reads a request's body; raises an ApiError that names the field."""
        async with read_body(request, self._settings.max_body_bytes) as body:
            if len(body) > THREAD_BODY:
                return await self._threads.run(read, body, self._settings)
            return read(body, self._settings)

    async def beside(self, function: Callable[..., T], /, *args: Any) -> T:
        """Calls a function beside the event loop."""
        return await self._threads.run(function, *args)

    def _most_tokens(self, asked: GenerationRequest) -> int:
        """Most tokens of a text: the context's, or a call's if it is to be cut."""
        limit = self._worker.model.max_model_len
        return limit if asked.truncate_prompt_tokens is None else max(limit, self._settings.max_call_tokens)

    def _check_choices(self, request: Request, asked: GenerationRequest, num_prompts: int) -> None:
        limit = self._settings.max_prompts
        if num_prompts * asked.n > limit:
            count = f"these are {asked.n} to each of {num_prompts} prompts" if num_prompts > 1 else f"n is {asked.n}"
            raise InvalidRequest("n", f"at most {limit} answers are given in one call, {count}")
        check_steering(asked, num_prompts * asked.n, self._settings)
        _, adapter = self._names(request, asked)
        with self._counting_rejections():
            self._worker.check_room(request.state.tenant, adapter, num_prompts * asked.n)

    @contextmanager
    def _counting_rejections(self) -> Iterator[None]:
        try:
            yield
        except Overloaded:
            self._telemetry.metrics.rejected()
            raise

    async def require(self, request: Request, model: str | None, lora_path: str | None = None) -> None:
        """Raises an ApiError, as a request for an answer would, unless there is a model that the key may use."""
        model, adapter = names_of(self._settings.base_name, model, lora_path)
        asked = adapter if request.state.identity.grant.allows(adapter) else NOWHERE
        if asked is None:
            return
        try:
            await asyncio.wrap_future(self._worker.adapters.state(asked))
        except UnknownAdapter:
            aside = await asyncio.wrap_future(self._worker.adapters.quarantined())
            for one in aside:
                if one.name == asked:
                    raise _not_served(f"adapter {asked!r} is not served: {one.reason}") from None
            raise no_model(model) from None

    def _names(self, request: Request, asked: GenerationRequest) -> tuple[str, str | None]:
        """The name that the answer goes by, and the adapter's; `NOWHERE` for what the request's key may not use: the
        request then fares in all as one for an adapter that does not exist.
        """
        model, adapter = asked.names(self._settings.base_name)
        return model, adapter if request.state.identity.grant.allows(adapter) else NOWHERE

    async def _generation(
        self,
        prefix: str,
        request: Request,
        asked: GenerationRequest,
        prompts: list[list[int]],
        arrival: float,
        what: str,
    ) -> Generation:
        limit = self._worker.model.max_model_len
        for prompt in prompts:
            if len(prompt) >= limit:
                raise too_long(limit, what, f"{len(prompt)} tokens")
        model, adapter = self._names(request, asked)
        unasked = unasked_limit(asked, prompts, self._settings, limit)
        defaults = self._defaults
        if unasked is None or (defaults.max_tokens is not None and defaults.max_tokens < unasked):
            unasked = defaults.max_tokens
        bad_words = await self._tokenizer.encode_words(asked.bad_words)
        syntax = asked.syntax(self._tokenizer)
        reasons_already = False
        if syntax.reasoning is not None:
            tail = self._tokenizer.decode(prompts[0][-MARK_TOKENS:], skip_special_tokens=False)
            reasons_already = tail.rstrip().endswith(syntax.reasoning.open)
        grammar = await self._grammar(asked, syntax, reasons_already=reasons_already)
        call_id = prefix + uuid.uuid4().hex
        several = len(prompts) * asked.n > 1
        choices = []
        for prompt in prompts:
            for params in asked.sampling_params(limit - len(prompt), defaults, bad_words, unasked, grammar):
                engine_request = EngineRequest(
                    f"{call_id}-{len(choices)}",
                    prompt,
                    self._seeds.fill(params),
                    adapter,
                    arrival,
                    tenant=request.state.tenant,
                    cache_salt=asked.cache_salt,
                    call=call_id if several else "",
                    sibling=choices[0].request if choices else None,
                )
                text_stream = self._tokenizer.text_stream(
                    asked.stop,
                    skip_special_tokens=asked.skip_special_tokens,
                    include_stop=asked.include_stop_str_in_output,
                    min_tokens=asked.min_tokens,
                    marks=syntax.marks,
                )
                choices.append(
                    Choice(
                        len(choices),
                        engine_request,
                        text_stream,
                        prompt_token_ids=prompt,
                        prompt_only=asked.prompt_only,
                        keeps_all=not asked.stream,
                        reader=asked.reader(syntax, reasons_already=reasons_already),
                    )
                )
        return Generation(
            self._worker,
            choices,
            id=prefix + asked.request_id if asked.request_id else call_id,
            model=model,
            records=self._telemetry.call(request.headers, model, asked.n, request.state.spend),
            per_prompt=asked.n,
            in_bulk=not asked.stream and not asked.stop,
        )

    async def _grammar(
        self, asked: GenerationRequest, syntax: AnswerSyntax, *, reasons_already: bool
    ) -> Grammar | None:
        """What the answer must match, compiled beside the event loop. Raises InvalidRequest for what can't be."""
        content, model = asked.asked_grammar(self._settings), self._worker.model
        asked_for = asked.answer_grammars(
            content, syntax, self._tokenizer, self._settings, reasons_already=reasons_already
        )
        grammar = None
        for field, grammar in asked_for:
            grammars = grammars_of(self._settings.model, model.vocab_size, tuple(model.eos_token_ids))
            try:
                await self._threads.run(grammars.compile, grammar)
            except InvalidGrammar as error:
                raise InvalidRequest(field, f"{field} can't be obeyed: {error}") from None
        return grammar

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
        make_format: MakeFormat,
        echoed: Sequence[str | list[int]] = (),
    ) -> Response:
        try:
            with self._counting_rejections():
                await self._start(request, generation)
        except ClientDisconnect:
            return client_gone()
        except NotServed as error:
            raise _not_served(str(error)) from None
        except AdapterPaused as error:
            raise ApiError(503, str(error), param="model", code="adapter_paused", retry_after=1) from None
        except InvalidRequest as error:
            raise no_model(generation.model) if error.field == "model" else error from None
        try:  # now the engine has found the prompts to be such that they can be decoded
            echoes = await self._threads.run(self._echoes, asked, echoed, generation) if echoed else ()
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
        scores = LogprobFormat(self._tokenizer.vocabulary, as_token_ids=asked.return_tokens_as_token_ids)
        answer = make_format(generation, scores, extras)
        ignored = asked.ignored(self._tokenizer)
        headers = {IGNORED: ", ".join(ignored)} if ignored else {}
        headers |= self._load_report(request.headers.get(LOAD_FORMAT, ""))
        if versions := _versions(generation):
            headers[ADAPTER] = versions
            if self._settings.access_log:
                access.info("%s is answered by adapter %s", request.state.request_id, versions)
        if asked.stream:
            return EventStream(self._events(generation, answer), generation.close, headers)
        try:
            await while_connected(request.receive, _read(generation, answer))
            body = await self._written(answer)
        except ClientDisconnect:
            return client_gone()
        finally:
            generation.close()
        return Response(body, media_type="application/json", headers=headers)

    async def _start(self, request: Request, generation: Generation) -> None:
        """Have the engine accept a call, once its adapter has been brought if it is not registered."""
        name = generation.choices[0].request.adapter_name
        try:
            await generation.start()
        except (NotServed, AdapterPaused):
            raise
        except InvalidRequest as error:
            if error.field != "model" or name is None:
                raise
            if not await while_connected(request.receive, self._sourced.bring(name)):
                raise
            await generation.start()
        self._sourced.note_use(name)

    def _load_report(self, form: str) -> dict[str, str]:
        """The server's load as a header in ORCA's form, under vLLM's names; nothing unless the client asks for one."""
        if (kind := form.upper()) not in ("TEXT", "JSON"):
            return {}
        stats = self._worker.stats
        load = {
            "kv_cache_usage_perc": stats.kv_usage,
            "num_requests_waiting": float(stats.num_waiting),
            "num_requests_running": float(stats.num_running),
        }
        text = json.dumps({"named_metrics": load})
        if kind == "TEXT":
            text = ", ".join(f"named_metrics.{name}={value}" for name, value in load.items())
        return {LOAD: f"{kind} {text}"}

    async def _written(self, answer: AnswerFormat) -> bytes:
        """The whole answer; a long one is written beside the event loop, which must not make way for others there."""
        if answer.num_scores > THREAD_SCORES:
            return await self._threads.run(lambda: encode(answer.answer()))
        return dumps(answer.answer())

    async def _events(self, generation: Generation, answer: AnswerFormat) -> AsyncIterator[bytes]:
        """A call's deltas as events; what is there together is sent together.

        The status line is gone by now, so an error is an event, too.
        """
        ready = list(map(event, answer.opening()))
        try:
            async for delta in generation:
                heavy = answer.scores_of(delta) > THREAD_SCORES
                if heavy:
                    ready += [await self._threads.run(long_event, chunk) for chunk in answer.chunks(delta)]
                else:
                    ready += map(event, answer.chunks(delta))
                if ready and (heavy or not generation.goes_on):
                    yield b"".join(ready)
                    ready.clear()
            ready += map(event, answer.closing())
        except Exception as error:
            answer_to_error = as_api_error(error)
            if answer_to_error.unforeseen:
                log.exception("a stream failed")
            ready.append(event(answer.failed(answer_to_error)))
        yield b"".join((*ready, answer.end))


def _not_served(message: str) -> ApiError:
    return ApiError(424, message, param="model", code="adapter_quarantined")


def _versions(generation: Generation) -> str:
    """The versions of an adapter that a call's answers are computed with: one, unless a swap fell between them."""
    bound = [choice.request.bound for choice in generation.choices]
    told = [adapter_header(one.name, one.label, one.manifest.content_hash) for one in bound if one is not None]
    return ", ".join(dict.fromkeys(told))


async def _read(generation: Generation, answer: AnswerFormat) -> None:
    async for delta in generation:
        answer.note(delta)
