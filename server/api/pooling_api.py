"""Routes that return vectors and scores in place of text, with OpenAI's and vLLM's bodies and responses.

Tests: tests/server/api/test_pooling_api.py
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ...core.model.pooling_config import PoolingConfig
from ...core.requests.pooling import from_bytes, to_bytes
from ...core.requests.request import Request as EngineRequest
from ...core.requests.request_params import InvalidRequest, RequestParams
from ...memory.adapters.store import UnknownAdapter
from ..access.limits import RequestLimits
from ..engine.generation import Choice, Generation
from ..errors import ApiError, too_long
from ..text.tokenizer import Tokenizer
from .caller import Caller
from .generation_builder import GenerationBuilder
from .logprobs import Body
from .pooling_request import (
    ClassifyBody,
    EmbeddingsBody,
    Input,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from .responder import Responder
from .translation import renaming

NAMES = {"prompt": "input"}
"""The client's names of fields, for errors."""

PAIR_NAMES = {"prompt": "text_2"}
RANK_NAMES = {"prompt": "documents"}

VECTOR = RequestParams(max_tokens=1, temperature=0.0, pooling="last")
CLASSES = replace(VECTOR, classify=True)

_BODIES: dict[str, type[PoolingBody]] = {
    "embeddings": EmbeddingsBody,
    "classify": ClassifyBody,
    "score": ScoreBody,
    "rerank": RerankBody,
}

ROUTES: dict[str, str] = {
    "/v1/embeddings": "embeddings",
    "/classify": "classify",
    "/v1/classify": "classify",
    "/score": "score",
    "/v1/score": "score",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
}
"""Paths, and what each of them returns."""

BODIES: dict[str, type[BaseModel]] = {path: _BODIES[what] for path, what in ROUTES.items()}


@dataclass(slots=True)
class PoolingApi:
    """Embeddings, classes, scores and rankings. The builder and the responder are those of generated text."""

    builder: GenerationBuilder
    responder: Responder
    config: PoolingConfig

    def endpoint(self, path: str) -> Callable[[Request], Awaitable[Response]]:
        """The handler of a path of `ROUTES`."""
        answer: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "embeddings": self.embeddings,
            "classify": self.classify,
            "score": self.score,
            "rerank": self.rerank,
        }
        return answer[ROUTES[path]]

    async def embeddings(self, request: Request) -> Response:
        """OpenAI's embeddings: a vector for each text."""
        arrival, asked = time.monotonic(), await self.builder.parse(EmbeddingsBody.read, request)
        self._check_vectors()
        self._check_dimensions(asked.dimensions)
        normalises = self.config.normalises if asked.normalises is None else asked.normalises
        with renaming(NAMES):
            prompts = await self._encoded(Caller.of(request), asked, asked.inputs(self._limits))
            generation = self._generation("embd-", request, asked, prompts, self._vector(), arrival)

            def body() -> Body:
                vectors = (_cut(each, asked.dimensions, normalises=normalises) for each in _results(generation))
                data = [
                    {"index": index, "object": "embedding", "embedding": _encoded_vector(each, asked.encoding_format)}
                    for index, each in enumerate(vectors)
                ]
                return _listed(generation, data)

            return await self.responder.pooled(request, generation, body)

    async def classify(self, request: Request) -> Response:
        """vLLM's classify: the probabilities of a head's labels for each text."""
        arrival, asked = time.monotonic(), await self.builder.parse(ClassifyBody.read, request)
        with renaming(NAMES):
            prompts = await self._encoded(Caller.of(request), asked, asked.inputs(self._limits))
            generation = self._generation("classify-", request, asked, prompts, CLASSES, arrival)
            is_base = generation.choices[0].request.adapter_name is None

            def body() -> Body:
                data = []
                for index, scores in enumerate(_results(generation)):
                    values = self._activated(scores, is_base=is_base) if asked.activates else scores
                    best = int(np.argmax(values))
                    label = self.config.labels.get(best) if is_base else None
                    data.append(
                        {
                            "index": index,
                            "label": label or f"LABEL_{best}",
                            "probs": values.tolist(),
                            "num_classes": len(values),
                        }
                    )
                return _listed(generation, data)

            return await self.responder.pooled(request, generation, body)

    async def score(self, request: Request) -> Response:
        """vLLM's score: how well two texts fit, for each pair."""
        arrival, asked = time.monotonic(), await self.builder.parse(ScoreBody.read, request)
        with renaming(PAIR_NAMES):
            pairs = asked.pairs(self._limits)
            generation, scores = await self._scored("score-", request, asked, pairs, arrival, activates=asked.activates)

            def body() -> Body:
                data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores())]
                return _listed(generation, data)

            return await self.responder.pooled(request, generation, body)

    async def rerank(self, request: Request) -> Response:
        """vLLM's, Jina's and Cohere's rerank: documents by how well they fit a query, best first."""
        arrival, asked = time.monotonic(), await self.builder.parse(RerankBody.read, request)
        with renaming(RANK_NAMES):
            texts = asked.texts(self._limits)
            pairs = [(asked.query, text) for text in texts]
            generation, scores = await self._scored(
                "rerank-", request, asked, pairs, arrival, activates=asked.activates
            )

            def body() -> Body:
                found = [
                    {
                        "index": index,
                        **({"document": {"text": texts[index]}} if asked.return_documents else {}),
                        "relevance_score": score,
                    }
                    for index, score in enumerate(scores())
                ]
                found.sort(key=lambda each: -each["relevance_score"])
                results = found[: asked.top_n or None]
                return {"id": generation.id, "model": generation.model, "usage": _usage(generation), "results": results}

            return await self.responder.pooled(request, generation, body)

    # --- what is asked

    @property
    def _limits(self) -> RequestLimits:
        return self.builder.settings

    def _vector(self) -> RequestParams:
        return replace(VECTOR, pooling=self.config.pooling)

    def _check_vectors(self) -> None:
        """Raises an ApiError if the checkpoint's vectors are of a kind that is not served."""
        if self.config.refusal is not None:
            raise ApiError(501, f"the model's vectors can't be made: {self.config.refusal}", code="not_supported")

    def _check_dimensions(self, dimensions: int | None) -> None:
        config = self.config
        if dimensions is None:
            return
        if config.dimensions is not None and dimensions not in config.dimensions:
            lengths = ", ".join(map(str, config.dimensions))
            raise ApiError(400, f"dimensions is {dimensions}; the model has {lengths}", param="dimensions")
        if config.hidden_size is not None and dimensions > config.hidden_size:
            message = f"dimensions is {dimensions}; the model's vectors have {config.hidden_size}: give at most that"
            raise ApiError(400, message, param="dimensions")

    async def _scored(
        self,
        prefix: str,
        request: Request,
        asked: PoolingBody,
        pairs: Sequence[tuple[str, str]],
        arrival: float,
        *,
        activates: bool,
    ) -> tuple[Generation, Callable[[], list[float]]]:
        """The generation that scores pairs of texts, and a function that returns the scores at its end."""
        params = await self._scorer(Caller.of(request), asked)
        if params is None:
            self._check_vectors()
            texts = list(dict.fromkeys(chain.from_iterable(pairs)))
            prompts = await self._encoded(Caller.of(request), asked, texts)
            generation = self._generation(prefix, request, asked, prompts, self._vector(), arrival)
            return generation, partial(_similarities, generation, texts, pairs)
        prompts = await self._encoded_pairs(Caller.of(request), asked, pairs)
        generation = self._generation(prefix, request, asked, prompts, params, arrival)
        if params.classify:
            return generation, partial(self._head_scores, generation, activates=activates)
        return generation, partial(_token_scores, generation, params.logprob_token_ids, activates=activates)

    async def _scorer(self, caller: Caller, asked: PoolingBody) -> RequestParams | None:
        """Parameters that score a pair in one prompt; None if its texts' vectors are compared.

        A head comes first, then the tokens of a generator that answers with one of two.
        """
        _, adapter = self.builder.names(caller, asked.model, asked.lora_path)
        num_labels = await self._num_labels(adapter)
        if num_labels is not None:
            if num_labels > 1:
                message = f"it has a head with {num_labels} labels, scores need one with 1; ask POST /classify"
                raise InvalidRequest("model", message)
            return CLASSES
        if self.config.is_classifier:
            return CLASSES
        tokens = self.config.classifier_tokens
        if tokens is None:
            return None
        tokenizer = await self._tokenizer_of(caller, asked)
        ids = [tokenizer.backend.token_to_id(token) for token in tokens]
        if None in ids:
            message = f"classifier_from_token names {tokens[ids.index(None)]!r}, which is no token of the model"
            raise ApiError(501, message, code="not_supported")
        known = tuple(id_ for id_ in ids if id_ is not None)
        return RequestParams(max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=known)

    async def _num_labels(self, adapter: str | None) -> int | None:
        """Labels of an adapter's own head; None if it has none, or is not known yet: then the engine decides."""
        if adapter is None:
            return None
        adapters = self.builder.worker.adapters
        try:
            state = await asyncio.wrap_future(adapters.state(adapter))
        except UnknownAdapter:
            if not await self.responder.sourced.bring(adapter):
                return None
            state = await asyncio.wrap_future(adapters.state(adapter))
        head = state.manifest.head
        return None if head is None else head.num_labels

    # --- prompts

    async def _tokenizer_of(self, caller: Caller, asked: PoolingBody) -> Tokenizer:
        return await self.builder.tokenizer_of(caller, asked.model, asked.lora_path, chat=False)

    async def _encoded(self, caller: Caller, asked: PoolingBody, given: Sequence[Input]) -> list[list[int]]:
        """The tokens of each input, truncated."""
        tokenizer, limit = await self._tokenizer_of(caller, asked), self._most(asked)
        texts = [each for each in given if isinstance(each, str)]
        encode = partial(tokenizer.encode, most=self._most_read(asked))
        whole = await encode(texts, add_special_tokens=asked.add_special_tokens)
        bare = whole
        if asked.add_special_tokens and limit is not None and any(len(each) > limit for each in whole):
            bare = await encode(texts, add_special_tokens=False)
        encoded = (_truncated(*each, limit, left=self._left(asked)) for each in zip(whole, bare, strict=True))
        return [
            next(encoded) if isinstance(each, str) else _truncated(each, each, limit, left=self._left(asked))
            for each in given
        ]

    async def _encoded_pairs(
        self, caller: Caller, asked: PoolingBody, pairs: Sequence[tuple[str, str]]
    ) -> list[list[int]]:
        tokenizer, limit, left = await self._tokenizer_of(caller, asked), self._most(asked), self._left(asked)
        encoded = await tokenizer.encode_pairs(
            pairs, add_special_tokens=asked.add_special_tokens, most=self._most_read(asked)
        )
        return [_truncated(each, each, limit, left=left) for each in encoded]

    def _most(self, asked: PoolingBody) -> int | None:
        """Tokens that a text is cut to; None: it is not cut."""
        most = asked.truncate_prompt_tokens
        return self.builder.worker.model.max_model_len if most == -1 else most

    def _most_read(self, asked: PoolingBody) -> int:
        """Most tokens of a text before it is cut."""
        limit = self.builder.worker.model.max_model_len
        return limit if asked.truncate_prompt_tokens is None else max(limit, self._limits.max_call_tokens)

    def _left(self, asked: PoolingBody) -> bool:
        if asked.truncation_side is None:
            return self.builder.tokenizer.cuts_left
        return asked.truncation_side == "left"

    def _generation(
        self,
        prefix: str,
        request: Request,
        asked: PoolingBody,
        prompts: Sequence[list[int]],
        params: RequestParams,
        arrival: float,
    ) -> Generation:
        """The generation of one result for each prompt. Raises an ApiError, InvalidRequest or Overloaded."""
        builder, caller = self.builder, Caller.of(request)
        model, adapter = builder.names(caller, asked.model, asked.lora_path)
        limit, total = builder.worker.model.max_model_len, sum(map(len, prompts))
        most = limit if params.pooling is not None else limit - 1
        for prompt in prompts:
            if len(prompt) > most:
                raise too_long(most, "prompt", f"{len(prompt)} tokens", builder.worker.model.window)
        if total > self._limits.max_call_tokens:
            message = f"the texts have {total} tokens, this server accepts {self._limits.max_call_tokens} per request"
            raise InvalidRequest("prompt", f"{message}; send fewer or shorter ones")
        with builder.telemetry.counting_rejections():
            builder.worker.check_room(caller.tenant, adapter, len(prompts))
        call_id = prefix + uuid.uuid4().hex
        choices: list[Choice] = []
        for prompt in prompts:
            engine_request = EngineRequest(
                f"{call_id}-{len(choices)}",
                prompt,
                builder.seeds.fill(params),
                adapter,
                arrival,
                tenant=caller.tenant,
                cache_salt=asked.cache_salt,
                choice_group=call_id if len(prompts) > 1 else "",
                sibling=choices[0].request if choices else None,
            )
            stream = builder.tokenizer.text_stream()
            choices.append(Choice(len(choices), engine_request, stream, prompt_token_ids=prompt, prompt_only=True))
        return Generation(
            builder.worker,
            choices,
            id=prefix + asked.request_id if asked.request_id else call_id,
            model=model,
            records=builder.telemetry.call(caller.headers, model, 1, caller.spend),
            in_bulk=True,
        )

    # --- results

    def _head_scores(self, generation: Generation, *, activates: bool) -> list[float]:
        is_base = generation.choices[0].request.adapter_name is None
        found = []
        for scores in _results(generation):
            if len(scores) > 1:
                message = f"the model has a head with {len(scores)} labels, scores need one with 1; ask POST /classify"
                raise ApiError(400, message, param="model")
            found.append(float((self._activated(scores, is_base=is_base) if activates else scores)[0]))
        return found

    def _activated(self, scores: np.ndarray, *, is_base: bool) -> np.ndarray:
        """Probabilities of labels, as transformers' `problem_type` says; without one, of one label or of several."""
        problem = self.config.problem_type if is_base else None
        if problem == "regression":
            return scores
        if problem == "multi_label_classification" or len(scores) == 1:
            return _sigmoid(scores)
        powers = np.exp(scores.astype(np.float64) - scores.max())
        return powers / powers.sum()


def _truncated(whole: list[int], bare: list[int], limit: int | None, *, left: bool) -> list[int]:
    """Tokens of a text cut to a limit; special tokens around it stay. bare: the tokens without them."""
    if limit is None or len(whole) <= limit:
        return whole
    specials = len(whole) - len(bare)
    begin = next((at for at in range(specials + 1) if whole[at : at + len(bare)] == bare), 0) if specials else 0
    room = max(0, limit - specials)
    kept = bare[len(bare) - room :] if left else bare[:room]
    return [*whole[:begin], *kept, *whole[begin + len(bare) :]][: max(limit, 1)]


def _results(generation: Generation) -> list[np.ndarray]:
    """The vectors, or scores, of a finished generation."""
    return [from_bytes(choice.pooled) for choice in generation.choices if choice.pooled is not None]


def _similarities(generation: Generation, texts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[float]:
    """The cosine similarity of each pair's vectors."""
    units: Mapping[str, np.ndarray] = {
        text: _unit(vector.astype(np.float64)) for text, vector in zip(texts, _results(generation), strict=True)
    }
    return [float(units[first] @ units[second]) for first, second in pairs]


def _token_scores(generation: Generation, tokens: Sequence[int], *, activates: bool) -> list[float]:
    """For each prompt the probability of the second token, where only it and the first may come; or its logit less the
    first's.
    """
    false, true = tokens
    found = []
    for choice in generation.choices:
        logprobs = dict(choice.discarded[0].top)
        difference = np.array(logprobs[true] - logprobs[false])
        found.append(float(_sigmoid(difference) if activates else difference))
    return found


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0.0, -values.astype(np.float64)))


def _unit(vector: np.ndarray) -> np.ndarray:
    length = float(np.linalg.norm(vector))
    return vector / length if length else vector


def _cut(vector: np.ndarray, dimensions: int | None, *, normalises: bool) -> np.ndarray:
    """The first `dimensions` values of a vector, which then has length 1 if it is normalised (Matryoshka)."""
    kept = vector[:dimensions].astype(np.float64)
    return (_unit(kept) if normalises else kept).astype(np.float32)


def _encoded_vector(vector: np.ndarray, form: str) -> str | list[float]:
    return base64.b64encode(to_bytes(vector)).decode() if form == "base64" else vector.tolist()


def _usage(generation: Generation) -> Body:
    tokens = generation.num_prompt_tokens
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }


def _listed(generation: Generation, data: list[Body]) -> Body:
    return {
        "id": generation.id,
        "object": "list",
        "created": int(time.time()),
        "model": generation.model,
        "data": data,
        "usage": _usage(generation),
    }
