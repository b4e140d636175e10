"""Builds the engine's requests for vectors and scores, for the HTTP API and the library.

Tests: tests/server/api/pooling/test_pooling_api.py, tests/server/test_llm_embed.py
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ....core.model.pooling_config import PoolingConfig
from ....core.requests.media import MediaItem
from ....core.requests.pooling import from_bytes
from ....core.requests.request_params import InvalidRequest, RequestParams
from ...access.limits import RequestLimits
from ...engine.generation import Choice, Generation, some_at_once
from ...errors import ApiError, too_long
from ...text.tokenizer import Tokenizer
from ..caller import Caller
from ..engine_requests import EngineRequests
from ..generation_builder import GenerationBuilder, check_whole
from .pooling_request import EmbeddingsBody, Input, InputBody, PairBody, PoolingBody

SEND_TEXTS = (
    "send texts, or ids of this model's tokenizer (langchain's OpenAIEmbeddings sends OpenAI's ids unless "
    "check_embedding_ctx_length=False)"
)

MOST_CUT = 3
"""Token ids at an end of a text that was cut within a character, which its tokenizer writes otherwise."""

VECTOR = RequestParams(max_tokens=1, temperature=0.0, pooling="last")


@dataclass(slots=True)
class PoolingBuilder:
    """Turns texts into requests for vectors and scores. builder: that of generated text."""

    builder: GenerationBuilder
    config: PoolingConfig

    async def embedded(
        self, caller: Caller, asked: EmbeddingsBody, prefix: str, arrival: float
    ) -> tuple[Generation, Callable[[], list[np.ndarray]]]:
        """The generation of a vector for each input, and a function that returns them at its end. Raises an ApiError,
        InvalidRequest or Overloaded.
        """
        self.check_vectors()
        self.check_dimensions(asked.dimensions)
        normalises = self.config.normalises if asked.normalises is None else asked.normalises
        prompts, media = await self.prompts(caller, asked)
        vector = self.vector()
        generation = await self.generation(prefix, caller, asked, prompts, params=vector, arrival=arrival, media=media)

        def vectors() -> list[np.ndarray]:
            return [cut(each, asked.dimensions, normalises=normalises) for each in results(generation)]

        return generation, vectors

    async def prompts(self, caller: Caller, asked: InputBody) -> tuple[list[list[int]], list[tuple[MediaItem, ...]]]:
        """The tokens of each input, or of a conversation, truncated, and the images of each. Raises InvalidRequest."""
        conversation = asked.conversation(self.limits)
        if conversation is None:
            prompts = await self.encoded(caller, asked, asked.inputs(self.limits))
            return prompts, [()] * len(prompts)
        tokenizer = await self.builder.tokenizer_of(caller, asked.model, asked.lora_path)
        tokens, media = await self.builder.encode_chat(caller, asked, tokenizer, conversation, self._most_read(asked))
        kept = truncated(tokens, tokens, self._most(asked), left=self._left(asked))
        check_whole(tokens, kept, media)
        return [kept], [media]

    @property
    def limits(self) -> RequestLimits:
        return self.builder.settings

    def vector(self) -> RequestParams:
        return replace(VECTOR, pooling=self.config.pooling)

    def check_vectors(self) -> None:
        """Raises an ApiError if the checkpoint's vectors are of a kind that is not served."""
        if self.config.refusal is not None:
            raise ApiError(501, f"the model's vectors can't be made: {self.config.refusal}", code="not_supported")

    def check_dimensions(self, dimensions: int | None) -> None:
        config = self.config
        if dimensions is None:
            return
        if config.dimensions is not None and dimensions not in config.dimensions:
            lengths = ", ".join(map(str, config.dimensions))
            raise ApiError(400, f"dimensions is {dimensions}; the model has {lengths}", param="dimensions")
        if config.hidden_size is not None and dimensions > config.hidden_size:
            message = f"dimensions is {dimensions}; the model's vectors have {config.hidden_size}: give at most that"
            raise ApiError(400, message, param="dimensions")

    async def tokenizer_of(self, caller: Caller, asked: PoolingBody) -> Tokenizer:
        return await self.builder.tokenizer_of(caller, asked.model, asked.lora_path, chat=False)

    async def encoded(self, caller: Caller, asked: PoolingBody, given: Sequence[Input]) -> list[list[int]]:
        """The tokens of each input, truncated."""
        tokenizer, limit = await self.tokenizer_of(caller, asked), self._most(asked)
        await self._check_ids(tokenizer, given)
        texts = [each for each in given if isinstance(each, str)]
        encode = partial(tokenizer.encode, most=self._most_read(asked))
        whole = await encode(texts, add_special_tokens=asked.add_special_tokens)
        bare = whole
        if asked.add_special_tokens and limit is not None and any(len(each) > limit for each in whole):
            bare = await encode(texts, add_special_tokens=False)
        encoded = (truncated(*each, limit, left=self._left(asked)) for each in zip(whole, bare, strict=True))
        return [
            next(encoded) if isinstance(each, str) else truncated(each, each, limit, left=self._left(asked))
            for each in given
        ]

    async def _check_ids(self, tokenizer: Tokenizer, given: Sequence[Input]) -> None:
        """Raises InvalidRequest for token ids of another tokenizer: a vector of them would be of some other text."""
        vocab, own = self.builder.worker.model.vocab_size, tokenizer.own.values()
        inputs = {index: each for index, each in enumerate(given) if not isinstance(each, str)}
        for index, ids in inputs.items():
            if bad := next((each for each in ids if not 0 <= each < vocab and each not in own), None):
                said = f"token id {bad} is outside the model's vocabulary of {vocab}"
                raise InvalidRequest(f"input[{index}]", f"input[{index}]: {said}; {SEND_TEXTS}")
        own_ids = await tokenizer.rewritten(list(inputs.values()))
        for (index, ids), written in zip(inputs.items(), own_ids, strict=True):
            foreign = (Counter(ids) - Counter(written)).total()
            if foreign > max(MOST_CUT, len(ids) // 4):
                said = f"{foreign} of {len(ids)} token ids are others than this model's tokenizer gives for their text"
                raise InvalidRequest(f"input[{index}]", f"input[{index}]: {said}; {SEND_TEXTS}")

    async def encoded_pairs(self, caller: Caller, asked: PairBody, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """The tokens of each pair of a query and a document, truncated: as the chat template of a reranker writes
        them, or as the tokenizer joins texts. Raises InvalidRequest.
        """
        limit, left, most = self._most(asked), self._left(asked), self._most_read(asked)
        adds, variables = asked.add_special_tokens, asked.variables()
        tokenizer = await self.builder.tokenizer_of(caller, asked.model, asked.lora_path)
        if tokenizer.scores_pairs:
            conversations = [tokenizer.pair(*pair, variables, add_special_tokens=adds) for pair in pairs]
            encoded = await tokenizer.encode_chats(conversations, most)
        else:
            message = "the model's chat template has no roles query and document: give one that has by --chat-template"
            asked.refuse_variables(message)
            tokenizer = await self.tokenizer_of(caller, asked)
            encoded = await tokenizer.encode_pairs(pairs, add_special_tokens=adds, most=most)
        return [truncated(each, each, limit, left=left) for each in encoded]

    def _most(self, asked: PoolingBody) -> int | None:
        """Tokens that a text is cut to; None: it is not cut."""
        most = asked.truncate_prompt_tokens
        return self.builder.worker.model.max_model_len if most == -1 else most

    def _most_read(self, asked: PoolingBody) -> int:
        """Most tokens of a text before it is cut."""
        limit = self.builder.worker.model.max_model_len
        return limit if asked.truncate_prompt_tokens is None else max(limit, self.limits.max_call_tokens)

    def _left(self, asked: PoolingBody) -> bool:
        if asked.truncation_side is None:
            return self.builder.tokenizer.cuts_left
        return asked.truncation_side == "left"

    async def generation(
        self,
        prefix: str,
        caller: Caller,
        asked: PoolingBody,
        prompts: Sequence[list[int]],
        params: RequestParams,
        arrival: float,
        media: Sequence[tuple[MediaItem, ...]] = (),
    ) -> Generation:
        """The generation of one result for each prompt. media: each prompt's images; empty: there are none.

        Raises an ApiError, InvalidRequest or Overloaded.
        """
        builder = self.builder
        model, adapter = builder.names(caller, asked.model, asked.lora_path)
        limit, total = builder.worker.model.max_model_len, sum(map(len, prompts))
        most = limit if params.pooling is not None else limit - 1
        for prompt in prompts:
            if len(prompt) > most:
                raise too_long(most, "prompt", f"{len(prompt)} tokens", builder.worker.model.window)
        if total > self.limits.max_call_tokens:
            message = f"the texts have {total} tokens, this server accepts {self.limits.max_call_tokens} per request"
            raise InvalidRequest("prompt", f"{message}; send fewer or shorter ones")
        with builder.telemetry.counting_rejections():
            builder.worker.check_room(caller.tenant, adapter, len(prompts))
        call_id = prefix + uuid.uuid4().hex
        requests = EngineRequests(
            call_id=call_id,
            caller=caller,
            adapter=adapter,
            arrival=arrival,
            cache_salt=asked.cache_salt,
            is_alone=len(prompts) == 1,
        )
        choices: list[Choice] = []
        params, stream = builder.seeds.fill(params), builder.tokenizer.text_stream()  # nothing is sampled, or written
        async for prompt, images in some_at_once(zip(prompts, media or [()] * len(prompts), strict=True)):
            engine_request = requests.next(prompt, params, images)
            choices.append(Choice(len(choices), engine_request, stream, prompt_token_ids=prompt, prompt_only=True))
        return Generation(
            builder.worker,
            choices,
            id=prefix + asked.request_id if asked.request_id else call_id,
            model=model,
            records=builder.telemetry.call(caller.headers, model, 1, caller.spend),
            in_bulk=True,
        )


def truncated(whole: list[int], bare: list[int], limit: int | None, *, left: bool) -> list[int]:
    """Tokens of a text cut to a limit; special tokens around it stay. bare: the tokens without them."""
    if limit is None or len(whole) <= limit:
        return whole
    specials = len(whole) - len(bare)
    begin = next((at for at in range(specials + 1) if whole[at : at + len(bare)] == bare), 0) if specials else 0
    room = max(0, limit - specials)
    kept = bare[len(bare) - room :] if left else bare[:room]
    return [*whole[:begin], *kept, *whole[begin + len(bare) :]][: max(limit, 1)]


def results(generation: Generation) -> list[np.ndarray]:
    """The vectors, or scores, of a finished generation."""
    return [from_bytes(choice.pooled) for choice in generation.choices if choice.pooled is not None]


def cut(vector: np.ndarray, dimensions: int | None, *, normalises: bool) -> np.ndarray:
    """The first `dimensions` values of a vector, which then has length 1 if it is normalised (Matryoshka)."""
    kept = vector[:dimensions].astype(np.float64)
    return (unit(kept) if normalises else kept).astype(np.float32)


def unit(vector: np.ndarray) -> np.ndarray:
    length = float(np.linalg.norm(vector))
    return vector / length if length else vector
