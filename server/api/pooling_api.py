"""Routes that return vectors and scores in place of text, with OpenAI's and vLLM's bodies and responses.

Tests: tests/server/api/test_pooling_api.py
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ...core.requests.pooling import to_bytes
from ...core.requests.request_params import InvalidRequest, RequestParams
from ...memory.adapters.store import UnknownAdapter
from ..engine.generation import Generation
from ..errors import ApiError
from .caller import Caller
from .generation_builder import GenerationBuilder
from .logprobs import Body
from .pooling_builder import VECTOR, PoolingBuilder, results, unit
from .pooling_request import ClassifyBody, EmbeddingsBody, PairBody, PoolingBody, RerankBody, ScoreBody
from .responder import Responder
from .translation import renaming

NAMES = {"prompt": "input"}
"""The client's names of fields, for errors."""

RANK_NAMES = {"prompt": "documents", "messages": "documents"}

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
    """Embeddings, classes, scores and rankings. The responder is that of generated text."""

    pooling: PoolingBuilder
    responder: Responder

    @property
    def builder(self) -> GenerationBuilder:
        return self.pooling.builder

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
        with renaming(NAMES):
            generation, vectors = await self.pooling.embedded(Caller.of(request), asked, "embd-", arrival)

            def body() -> Body:
                data = [
                    {"index": index, "object": "embedding", "embedding": _encoded_vector(each, asked.encoding_format)}
                    for index, each in enumerate(vectors())
                ]
                return _listed(generation, data)

            return await self.responder.pooled(request, generation, body)

    async def classify(self, request: Request) -> Response:
        """vLLM's classify: the probabilities of a head's labels for each text."""
        arrival, asked = time.monotonic(), await self.builder.parse(ClassifyBody.read, request)
        with renaming(NAMES):
            prompts = await self.pooling.prompts(Caller.of(request), asked)
            generation = self.pooling.generation(
                "classify-", Caller.of(request), asked, prompts, params=CLASSES, arrival=arrival
            )
            is_base = generation.choices[0].request.adapter_name is None

            def body() -> Body:
                data = []
                for index, scores in enumerate(results(generation)):
                    values = self._activated(scores, is_base=is_base) if asked.activates else scores
                    best = int(np.argmax(values))
                    label = self.pooling.config.labels.get(best) if is_base else None
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
        _, second = asked.names()
        with renaming({"prompt": second, "messages": second}):
            pairs = asked.pairs(self.pooling.limits)
            generation, scores = await self._scored("score-", request, asked, pairs, arrival, activates=asked.activates)

            def body() -> Body:
                data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores())]
                return _listed(generation, data)

            return await self.responder.pooled(request, generation, body)

    async def rerank(self, request: Request) -> Response:
        """vLLM's, Jina's and Cohere's rerank: documents by how well they fit a query, best first."""
        arrival, asked = time.monotonic(), await self.builder.parse(RerankBody.read, request)
        with renaming(RANK_NAMES):
            texts = asked.texts(self.pooling.limits)
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

    # --- scores

    async def _scored(
        self,
        prefix: str,
        request: Request,
        asked: PairBody,
        pairs: Sequence[tuple[str, str]],
        arrival: float,
        *,
        activates: bool,
    ) -> tuple[Generation, Callable[[], list[float]]]:
        """The generation that scores pairs of texts, and a function that returns the scores at its end."""
        params = await self._scorer(Caller.of(request), asked)
        if params is None:
            self.pooling.check_vectors()
            asked.refuse_variables("the scores are similarities of vectors, for which no template is used")
            texts = list(dict.fromkeys(chain.from_iterable(pairs)))
            prompts = await self.pooling.encoded(Caller.of(request), asked, texts)
            vector = self.pooling.vector()
            generation = self.pooling.generation(
                prefix, Caller.of(request), asked, prompts, params=vector, arrival=arrival
            )
            return generation, partial(_similarities, generation, texts, pairs)
        prompts = await self.pooling.encoded_pairs(Caller.of(request), asked, pairs)
        generation = self.pooling.generation(prefix, Caller.of(request), asked, prompts, params=params, arrival=arrival)
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
        if self.pooling.config.is_classifier:
            return CLASSES
        tokens = self.pooling.config.classifier_tokens
        if tokens is None:
            return None
        tokenizer = await self.pooling.tokenizer_of(caller, asked)
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

    # --- results

    def _head_scores(self, generation: Generation, *, activates: bool) -> list[float]:
        is_base = generation.choices[0].request.adapter_name is None
        found = []
        for scores in results(generation):
            if len(scores) > 1:
                message = f"the model has a head with {len(scores)} labels, scores need one with 1; ask POST /classify"
                raise ApiError(400, message, param="model")
            found.append(float((self._activated(scores, is_base=is_base) if activates else scores)[0]))
        return found

    def _activated(self, scores: np.ndarray, *, is_base: bool) -> np.ndarray:
        """Probabilities of labels, as transformers' `problem_type` says; without one, of one label or of several."""
        problem = self.pooling.config.problem_type if is_base else None
        if problem == "regression":
            return scores
        if problem == "multi_label_classification" or len(scores) == 1:
            return _sigmoid(scores)
        powers = np.exp(scores.astype(np.float64) - scores.max())
        return powers / powers.sum()


def _similarities(generation: Generation, texts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[float]:
    """The cosine similarity of each pair's vectors."""
    units: Mapping[str, np.ndarray] = {
        text: unit(vector.astype(np.float64)) for text, vector in zip(texts, results(generation), strict=True)
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
