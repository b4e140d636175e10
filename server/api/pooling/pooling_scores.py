"""Classes of texts, and scores of pairs of texts: by a head, by a generator's tokens, or by vectors.

Tests: tests/server/api/pooling/test_pooling_api.py, tests/server/library/test_library_scores.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np

from ....core.requests.request_params import InvalidRequest, RequestParams
from ....memory.adapters.store import UnknownAdapter
from ...engine.generation import Generation
from ...errors import ApiError
from ..caller import Caller
from .pooling_builder import VECTOR, PoolingBuilder, results, unit
from .pooling_request import ClassifyBody, PairBody, PoolingBody

CLASSES = replace(VECTOR, classify=True)


@dataclass(slots=True)
class Scores:
    """Turns texts into requests for classes and scores. bring: fetches an adapter by its rule; False without one."""

    pooling: PoolingBuilder
    bring: Callable[[str], Awaitable[bool]]

    async def classified(
        self, prefix: str, caller: Caller, asked: ClassifyBody, arrival: float
    ) -> tuple[Generation, Callable[[], list[tuple[str, np.ndarray]]]]:
        """The generation that classifies texts, and a function that returns each text's label and values at its end."""
        prompts, media = await self.pooling.prompts(caller, asked)
        generation = await self.pooling.generation(
            prefix, caller, asked, prompts, params=CLASSES, arrival=arrival, media=media
        )
        is_base = generation.choices[0].request.adapter_name is None

        def classes() -> list[tuple[str, np.ndarray]]:
            found = []
            for scores in results(generation):
                values = self._activated(scores, is_base=is_base) if asked.activates else scores
                best = int(np.argmax(values))
                label = self.pooling.config.labels.get(best) if is_base else None
                found.append((label or f"LABEL_{best}", values))
            return found

        return generation, classes

    async def scored(
        self,
        prefix: str,
        caller: Caller,
        asked: PairBody,
        pairs: Sequence[tuple[str, str]],
        arrival: float,
        *,
        activates: bool,
    ) -> tuple[Generation, Callable[[], list[float]]]:
        """The generation that scores pairs of texts, and a function that returns the scores at its end."""
        params = await self._scorer(caller, asked)
        if params is None:
            self.pooling.check_vectors()
            asked.refuse_variables("the scores are similarities of vectors, for which no template is used")
            texts = list(dict.fromkeys(chain.from_iterable(pairs)))
            prompts = await self.pooling.encoded(caller, asked, texts)
            vector = self.pooling.vector()
            generation = await self.pooling.generation(prefix, caller, asked, prompts, params=vector, arrival=arrival)
            return generation, partial(_similarities, generation, texts, pairs)
        prompts = await self.pooling.encoded_pairs(caller, asked, pairs)
        generation = await self.pooling.generation(prefix, caller, asked, prompts, params=params, arrival=arrival)
        if params.classify:
            return generation, partial(self._head_scores, generation, activates=activates)
        return generation, partial(_token_scores, generation, params.logprob_token_ids, activates=activates)

    async def _scorer(self, caller: Caller, asked: PoolingBody) -> RequestParams | None:
        """Parameters that score a pair in one prompt; None if its texts' vectors are compared.

        A head comes first, then the tokens of a generator that answers with one of two.
        """
        _, adapter = self.pooling.builder.names(caller, asked.model, asked.lora_path)
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
        adapters = self.pooling.builder.worker.adapters
        try:
            state = await asyncio.wrap_future(adapters.state(adapter))
        except UnknownAdapter:
            if not await self.bring(adapter):
                return None
            state = await asyncio.wrap_future(adapters.state(adapter))
        head = state.manifest.head
        return None if head is None else head.num_labels

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
