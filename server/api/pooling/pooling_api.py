"""Routes that return vectors and scores in place of text, with OpenAI's and vLLM's bodies and responses.

Tests: tests/server/api/pooling/test_pooling_api.py
"""

from __future__ import annotations

import base64
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ....core.requests.pooling import to_bytes
from ...engine.generation import Generation
from ..caller import Caller
from ..generation_builder import GenerationBuilder
from ..logprobs import Body
from ..responder import Responder
from ..translation import renaming
from .pooling_builder import PoolingBuilder
from .pooling_request import ClassifyBody, EmbeddingsBody, PoolingBody, RerankBody, ScoreBody
from .pooling_scores import Scores

NAMES = {"prompt": "input"}
"""The client's names of fields, for errors."""

RANK_NAMES = {"prompt": "documents", "messages": "documents"}

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

    @property
    def scores(self) -> Scores:
        return Scores(self.pooling, self.responder.sourced.bring)

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
            generation, classes = await self.scores.classified("classify-", Caller.of(request), asked, arrival)

            def body() -> Body:
                data: list[Body] = [
                    {"index": index, "label": label, "probs": values.tolist(), "num_classes": len(values)}
                    for index, (label, values) in enumerate(classes())
                ]
                return _listed(generation, data)

            return await self.responder.pooled(request, generation, body)

    async def score(self, request: Request) -> Response:
        """vLLM's score: how well two texts fit, for each pair."""
        arrival, asked = time.monotonic(), await self.builder.parse(ScoreBody.read, request)
        _, second = asked.names()
        with renaming({"prompt": second, "messages": second}):
            pairs = asked.pairs(self.pooling.limits)
            generation, scores = await self.scores.scored(
                "score-", Caller.of(request), asked, pairs, arrival, activates=asked.activates
            )

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
            generation, scores = await self.scores.scored(
                "rerank-", Caller.of(request), asked, pairs, arrival, activates=asked.activates
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
