"""Builds the engine's requests and the `Generation` for a parsed API request.

Tests: tests/server/test_sampling_fields.py, tests/server/test_choices.py
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from starlette.requests import Request

from ...core.requests.grammar import Grammar
from ...core.requests.grammars import InvalidGrammar, grammars_of
from ...core.requests.media import MediaItem
from ...core.requests.request_params import InvalidRequest, Seeds
from ...memory.adapters.composition import Composition, InvalidComposition, read_composition
from ...memory.adapters.store import UnknownAdapter
from ..access.grants import NOWHERE
from ..access.limits import RequestLimits
from ..engine.adapter_tokenizers import AdapterTokenizers
from ..engine.backend import Backend
from ..engine.generation import Choice, Generation, some_at_once
from ..engine.telemetry import Telemetry
from ..errors import ApiError, clipped, not_served, read_body, too_long
from ..executors import DaemonPool
from ..log_lines import note_request
from ..settings import Settings
from ..text.conversation import Conversation
from ..text.output_syntax import OutputSyntax
from ..text.tokenizer import Tokenizer
from .adapters.numbered_adapters import numbered
from .caller import Caller
from .chat_request import ChatBatch
from .completion_request import CompletionRequest
from .engine_requests import EngineRequests
from .images.image_fetch import ImageFetcher
from .images.image_parts import images_in
from .images.request_images import RequestImages, items_of
from .near import no_model_like
from .openai import GenerationRequest, names_of
from .price import check_steering, unasked_limit
from .sampling_defaults import SamplingDefaults
from .sse import while_connected

T = TypeVar("T")

MARK_TOKENS = 32
"""Most tokens of the mark of reasoning and a line break."""

THREAD_BODY = 16 << 10
"""Bytes of a request's body above which a thread parses it."""


class AsksAModel(Protocol):
    """A request's fields that say which model or adapter it is for."""

    @property
    def model(self) -> str | None: ...
    @property
    def lora_path(self) -> str | None: ...


@dataclass(slots=True)
class GenerationBuilder:
    """Checks an API request and builds the engine's requests for it."""

    worker: Backend
    tokenizer: Tokenizer
    settings: Settings
    defaults: SamplingDefaults
    telemetry: Telemetry
    threads: DaemonPool
    """Pool for parsing long bodies and compiling grammars."""
    tokenizers: AdapterTokenizers
    """Those of adapters that bring their own."""
    seeds: Seeds = field(init=False)
    images: RequestImages = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        most, fetcher = settings.limit_mm_per_prompt.get("image", 0), ImageFetcher(settings.allowed_media_domains)
        bounds = settings.max_body_bytes, settings.max_image_tokens
        self.images = RequestImages(settings.model, most, *bounds, fetcher=fetcher)
        self.seeds = Seeds(self.settings.seed)

    async def parse(self, read: Callable[[bytes, RequestLimits], T], request: Request) -> T:
        """Read a request's body; raises an ApiError that names the field."""
        async with read_body(request, self.settings.max_body_bytes) as body:
            if len(body) > THREAD_BODY:
                return await self.threads.run(read, body, self.settings)
            return read(body, self.settings)

    def most_tokens(self, asked: GenerationRequest) -> int:
        """Most tokens of a text: the context length, or the request limit if the text is to be truncated."""
        limit = self.worker.model.max_model_len
        return limit if asked.truncate_prompt_tokens is None else max(limit, self.settings.max_call_tokens)

    async def complete(
        self, caller: Caller, asked: CompletionRequest, prefix: str, arrival: float
    ) -> tuple[Generation, list[str | list[int]]]:
        """The generation for a completion request, and its prompts for echo.

        prefix: of its id. arrival: its time by the monotonic clock.
        """
        await self._number(caller, asked)
        given = asked.prompts(self.settings.max_prompts)
        self.check(caller, asked, len(given))
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        most, specials = self.most_tokens(asked), asked.add_special_tokens
        tokenizer = await self.tokenizer_of(caller, asked.model, asked.lora_path, chat=False)
        encoded = iter(await tokenizer.encode(texts, add_special_tokens=specials, most=most))
        prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt in given]
        doubled = next((d for pair in zip(given, prompts, strict=True) if (d := _doubled(tokenizer, *pair))), None)
        kept = [asked.cut(prompt, self.worker.model.max_model_len) for prompt in prompts]
        generation = await self.make(prefix, caller, asked, kept, arrival=arrival, tokenizer=tokenizer)
        if doubled is not None:
            generation.warnings = [
                f"the prompt begins with {doubled} twice: it has one, and one is added; "
                "set add_special_tokens to false for a prompt that a chat template made"
            ]
        shown = [one if after is before else after for one, before, after in zip(given, prompts, kept, strict=True)]
        return generation, shown

    async def converse(self, caller: Caller, batch: ChatBatch, prefix: str, arrival: float) -> Generation:
        """The generation for conversations; prefix, arrival: as for `complete`."""
        asked, context = batch.asked, self.worker.model.max_model_len
        await self._number(caller, asked)
        self.check(caller, asked, len(batch.conversations))
        most = self.most_tokens(asked)
        tokenizer = await self.tokenizer_of(caller, asked.model, asked.lora_path)
        prompts, media = list[list[int]](), list[tuple[MediaItem, ...]]()
        for one in batch.conversations:
            tokens, items = await self.encode_chat(caller, asked, tokenizer, one, most)
            prompts.append(cut := asked.cut(tokens, context))
            media.append(items)
            check_whole(tokens, cut, items)
        return await self.make(prefix, caller, asked, prompts, arrival=arrival, tokenizer=tokenizer, media=media)

    async def encode_chat(
        self, caller: Caller, asked: AsksAModel, tokenizer: Tokenizer, conversation: Conversation, most: int
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """The tokens of a conversation's prompt, at most `most`, and its images. Nothing of an image is decoded before
        the caller may use the model.
        """
        images = images_in(conversation.messages)
        if not images:
            return await tokenizer.encode_chat(conversation, most), ()
        await self.require(caller, asked.model, asked.lora_path)
        model = self.worker.model
        settings, salt = getattr(asked, "mm_processor_kwargs", None), getattr(asked, "cache_salt", None) or ""
        preparing = self.images.prepared(images, model, caller.tenant, settings, salt)
        found = await (preparing if caller.receive is None else while_connected(caller.receive, preparing))
        texts = tuple(image.text for image in found)
        conversation = replace(conversation, places=self.images.places(), image_texts=texts)
        tokens = await tokenizer.encode_chat(conversation, most)
        assert model.image_token is not None, "the model sees"
        return tokens, items_of(tokens, found, model.image_token, model.image_marks)

    async def _number(self, caller: Caller, asked: GenerationRequest) -> None:
        """Name the adapters that a request gives by numbers. Raises an ApiError for one that the caller may not use,
        whatever its scale.
        """
        if asked.has_numbers:
            found = await numbered(self.worker, self.threads, caller.grant)
            asked.name_adapters({number: one.name for number, one in found.items()})
        for name in asked.named:
            if not caller.grant.allows(name):
                base, adapters = self.settings.base_name, self.worker.adapters
                raise await no_model_like(name, adapters, base, caller.grant, self.threads)

    async def tokenizer_of(
        self, caller: Caller, model: str | None, lora_path: str | None, *, chat: bool = True
    ) -> Tokenizer:
        """The tokenizer of a model, which may have its own tokens, and for conversations its own template."""
        _, adapter = self.names(caller, model, lora_path)
        return await self.tokenizers.tokenizer_of(adapter, chat=chat)

    def check(self, caller: Caller, asked: GenerationRequest, num_prompts: int) -> None:
        """Raise InvalidRequest for too many choices, and Overloaded if the queue has no room for them."""
        limit = self.settings.max_prompts
        if num_prompts * asked.n > limit:
            count = f"got {asked.n} for each of {num_prompts} prompts" if num_prompts > 1 else f"n is {asked.n}"
            raise InvalidRequest("n", f"at most {limit} choices are allowed in one request, {count}")
        check_steering(asked, num_prompts * asked.n, self.settings)
        _, adapter = self.names(caller, asked.model, asked.lora_path)
        with self.telemetry.counting_rejections():
            self.worker.check_room(caller.tenant, adapter, num_prompts * asked.n)

    async def require(self, caller: Caller, model: str | None, lora_path: str | None = None) -> None:
        """Raises an ApiError, like a generation request, unless the key may use such a model."""
        model, asked = self.names(caller, model, lora_path)
        composition = None if asked is None else _composition_of(asked)
        if composition is None:
            await self._require(caller, model, asked)
            return
        for name, _ in composition.terms:
            await self._require(caller, name, name)

    async def _require(self, caller: Caller, model: str, asked: str | None) -> None:
        """The same of one adapter. model: its name for the client."""
        if asked is None:
            return
        try:
            await asyncio.wrap_future(self.worker.adapters.state(asked))
        except UnknownAdapter:
            aside = await asyncio.wrap_future(self.worker.adapters.quarantined())
            for one in aside:
                if one.name == asked:
                    raise not_served(f"adapter {asked!r} is not served: {one.reason}") from None
            base, adapters = self.settings.base_name, self.worker.adapters
            raise await no_model_like(model, adapters, base, caller.grant, self.threads) from None

    def names(self, caller: Caller, model: str | None, lora_path: str | None) -> tuple[str, str | None]:
        """The model's name in the response, and the adapter's; `NOWHERE` for a model that the caller may not use: the
        request then behaves in all respects as for an adapter that does not exist.
        """
        model, adapter = names_of(self.settings.base_name, model, lora_path)
        note_request(model=clipped(model))
        composition = None if adapter is None else _composition_of(adapter)
        if composition is not None:
            adapter = composition.model
        named = [adapter] if composition is None or adapter is None else composition.named
        if not all(caller.grant.allows(each) for each in named):
            return model, NOWHERE
        return model, self.worker.adapters.as_base if adapter is None else adapter

    async def make(
        self,
        prefix: str,
        caller: Caller,
        asked: GenerationRequest,
        prompts: list[list[int]],
        *,
        arrival: float,
        tokenizer: Tokenizer,
        media: Sequence[tuple[MediaItem, ...]] = (),
    ) -> Generation:
        """The generation for prompts. tokenizer: the one that made them. media: the images of each; empty: of none."""
        what = "prompt" if isinstance(asked, CompletionRequest) else "messages"
        limit = self.worker.model.max_model_len
        for prompt in prompts:
            if len(prompt) >= limit:
                raise too_long(limit, what, f"{len(prompt)} tokens", self.worker.model.window)
            asked.check_room(len(prompt), limit)
        model, adapter = self.names(caller, asked.model, asked.lora_path)
        self._note_base(caller, adapter)
        unasked = unasked_limit(asked, prompts, self.settings, limit)
        defaults = self.defaults
        if unasked is None or (defaults.max_tokens is not None and defaults.max_tokens < unasked):
            unasked = defaults.max_tokens
        bad_words = await self._bad_words(asked, tokenizer)
        stop = asked.stop_or(defaults)
        syntax = asked.syntax(tokenizer)
        if syntax.reasoning is not None:
            tail = tokenizer.decode(prompts[0][-MARK_TOKENS:], skip_special_tokens=False)
            syntax = replace(syntax, reasons_already=tail.rstrip().endswith(syntax.reasoning.open.rstrip()))
        grammar = await self._grammar(asked, syntax, tokenizer)
        prediction = await self._prediction(asked, tokenizer)
        call_id = prefix + uuid.uuid4().hex
        requests = EngineRequests(
            call_id=call_id,
            caller=caller,
            adapter=adapter,
            arrival=arrival,
            cache_salt=asked.cache_salt,
            is_alone=len(prompts) * asked.n == 1,
            prediction=prediction,
        )
        own_end = self._own_end(asked, tokenizer)
        choices = []
        made = (
            (prompt, items, params)
            for prompt, items in zip(prompts, media or [()] * len(prompts), strict=True)
            for params in asked.sampling_params(limit - len(prompt), defaults, bad_words, unasked, grammar)
        )
        async for prompt, items, params in some_at_once(made):
            if own_end is not None:
                params = replace(params, stop_token_ids=(*params.stop_token_ids, own_end))
            engine_request = requests.next(prompt, self.seeds.fill(params), items)
            text_stream = tokenizer.text_stream(
                stop,
                skip_special_tokens=asked.skip_special_tokens,
                include_stop=asked.include_stop_str_in_output,
                min_tokens=params.min_tokens,
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
                    reader=asked.reader(syntax),
                )
            )
            choices[-1].own_end = own_end
        generation = Generation(
            self.worker,
            choices,
            id=prefix + asked.request_id if asked.request_id else call_id,
            model=model,
            records=self.telemetry.call(caller.headers, model, asked.n, caller.spend),
            per_prompt=asked.n,
            in_bulk=not asked.stream and not stop,
        )
        generation.tokenizer = tokenizer
        generation.ignored = self._ignored(asked, tokenizer)
        return generation

    def _note_base(self, caller: Caller, adapter: str | None) -> None:
        """Note a request that the base model itself answers."""
        if adapter is None and self.telemetry.metrics is not None:
            latest = self.worker.adapters.loaded_names.latest(caller.grant)
            self.telemetry.metrics.base_after_load.asked(caller.tenant, latest)

    def _ignored(self, asked: GenerationRequest, tokenizer: Tokenizer) -> list[str]:
        """Fields without an effect."""
        has_no_use = asked.prediction is not None and not self.worker.model.speculates
        return [*asked.ignored(tokenizer), *(["prediction"] if has_no_use else [])]

    async def _bad_words(self, asked: GenerationRequest, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
        if "bad_words" in asked.model_fields_set:
            return await tokenizer.encode_words(asked.bad_words)
        return self.defaults.bad_words_of(self.worker.model.vocab_size)

    async def _prediction(self, asked: GenerationRequest, tokenizer: Tokenizer) -> list[int]:
        """The tokens of the predicted answer; none without speculation, which is what they are for."""
        if asked.prediction is None or not self.worker.model.speculates:
            return []
        most = self.worker.model.max_model_len
        texts = [asked.prediction.content]
        (tokens,) = await tokenizer.encode(texts, add_special_tokens=False, most=most, what="prediction")
        if len(tokens) > most:
            raise too_long(most, "prediction", f"{len(tokens)} tokens", self.worker.model.window)
        return tokens

    def _own_end(self, asked: GenerationRequest, tokenizer: Tokenizer) -> int | None:
        """The adapter's own end-of-sequence token, unless it ends the answer anyway, or shall not."""
        end = tokenizer.own_end
        if end is None or asked.ignore_eos or end in self.worker.model.eos_token_ids or end in asked.stop_token_ids:
            return None
        return end

    async def _grammar(self, asked: GenerationRequest, syntax: OutputSyntax, tokenizer: Tokenizer) -> Grammar | None:
        """The grammar of the output, compiled on a thread. Raises InvalidRequest if it can't be compiled."""
        content, model = asked.asked_grammar(self.settings), self.worker.model
        asked_for = asked.output_grammars(content, syntax, tokenizer, self.settings)
        grammar = None
        for name, grammar in asked_for:
            _check_spelt(name, grammar, syntax, tokenizer)
            grammars = grammars_of(self.settings.tokenizer_dir, model.vocab_size, tuple(model.eos_token_ids))
            try:
                await self.threads.run(grammars.compile, grammar)
            except InvalidGrammar as error:
                message = asked.explained(str(error)) if name == "tools" else str(error)
                raise InvalidRequest(name, f"{name} can't be enforced: {message}") from None
        return grammar


def check_whole(tokens: Sequence[int], kept: Sequence[int], media: Sequence[MediaItem]) -> None:
    """Raise InvalidRequest if a prompt with images was cut."""
    if media and len(kept) < len(tokens):
        what = "truncate_prompt_tokens"
        raise InvalidRequest(what, f"{what} would cut a prompt with images; send fewer messages or images")


def _doubled(tokenizer: Tokenizer, prompt: str | list[int], tokens: list[int]) -> str | None:
    """The text of the token that a prompt begins with and that was added before it once more."""
    if not isinstance(prompt, str) or len(tokens) < 2 or tokens[0] != tokens[1]:
        return None
    first = tokenizer.decode(tokens[:1], skip_special_tokens=False)
    return first if first and prompt.startswith(first) and not prompt.startswith(first * 2) else None


def _check_spelt(field: str, grammar: Grammar, syntax: OutputSyntax, tokenizer: Tokenizer) -> None:
    """Raise InvalidRequest for a grammar with an adapter's own token: grammars know the model's tokens only."""
    text = f"{grammar.text}\n{grammar.around}\n{syntax.marks}"
    for token in tokenizer.own:
        if token in text:
            message = f"it has {clipped(repr(token))}, a token of the adapter's own, which grammars don't know"
            raise InvalidRequest(field, f"{field} can't be enforced: {message}; leave it out")


def _composition_of(model: str) -> Composition | None:
    """Several adapters that a model's name means. Raises an ApiError for scales that can't be served."""
    try:
        return read_composition(model)
    except InvalidComposition as error:
        raise ApiError(400, f"model: {error}", param="model") from None
