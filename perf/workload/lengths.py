"""Lengths of prompts and completions, in tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from .fields import Strict
from .seeds import stream
from .trace import Csv


class ConstantTokens(Strict):
    """Always `tokens`."""

    law: Literal["constant"]
    tokens: PositiveInt

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return np.full(n, self.tokens, np.int64)


class UniformTokens(Strict):
    """Any number from `low` to `high`, both included."""

    law: Literal["uniform"]
    low: PositiveInt
    high: PositiveInt

    @model_validator(mode="after")
    def _in_order(self) -> UniformTokens:
        if self.high < self.low:
            raise ValueError(f"low is {self.low} and high {self.high}; high must not be below low")
        return self

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return self.low + (rng.random(n) * (self.high - self.low + 1)).astype(np.int64)


class LognormalTokens(Strict):
    """A lognormal distribution, truncated at `most`."""

    law: Literal["lognormal"]
    mean: float = Field(gt=1)
    """Mean after truncation."""
    sigma: PositiveFloat
    """Standard deviation of its logarithm."""
    most: PositiveInt

    @model_validator(mode="after")
    def _reachable(self) -> LognormalTokens:
        if self.mean >= 0.95 * self.most:
            raise ValueError(f"mean is {self.mean:g} and most {self.most}; most must be well above the mean")
        return self

    @property
    def mu(self) -> float:
        """Mean of the logarithm, for which E[min(X, most)] is the mean."""
        low, high = -math.log(self.most) - 20 * self.sigma, math.log(self.most) + 20 * self.sigma
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if self.mean_at(middle) < self.mean else (low, middle)
        return low

    def mean_at(self, mu: float) -> float:
        """E[min(X, most)] where the logarithm has the mean `mu`."""
        top = (math.log(self.most) - mu) / self.sigma
        below = math.exp(mu + self.sigma**2 / 2) * _normal_cdf(top - self.sigma)
        return below + self.most * (1 - _normal_cdf(top))

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        tokens = np.exp(self.mu + self.sigma * rng.standard_normal(n))
        return np.rint(np.clip(tokens, 1, self.most)).astype(np.int64)


def _cut_lognormal(mean: float, sigma: float) -> LognormalTokens:
    return LognormalTokens(law="lognormal", mean=mean, sigma=sigma, most=2048)


#: Distributions of prompt and completion lengths.
_PUBLISHED = {
    "sharegpt": (_cut_lognormal(161.31, 1.97), _cut_lognormal(337.99, 1.44)),
    "alpaca": (_cut_lognormal(19.31, 0.565), _cut_lognormal(58.45, 0.997)),
}

Tokens = Annotated[ConstantTokens | UniformTokens | LognormalTokens, Field(discriminator="law")]


#: Prompt and completion tokens of the next n requests, int64 [n] each; fewer if a trace ends.
Take = Callable[[int], tuple[np.ndarray, np.ndarray]]


class GivenLengths(Strict):
    """Prompt and completion, each with its own distribution."""

    kind: Literal["laws"]
    prompt: Tokens
    output: Tokens

    def take(self, seed: int) -> Take:
        prompts, outputs = stream(seed, "prompt lengths"), stream(seed, "output lengths")
        return lambda n: (self.prompt.draw(prompts, n), self.output.draw(outputs, n))


class PublishedLengths(Strict):
    """Lengths as in a published data set, prompt and answer drawn independently.

    sharegpt: lognormal, cut at the context of 2048 tokens. Means 161.31 and 337.99: the vLLM paper (SOSP 2023), Fig.
    11a. Spread: dLoRA (§2, load imbalance across replicas) reports that the longest prompt and answer are 636.7 and
    163.9 times the average; of 10⁵ lognormal values the largest is e^(4.265σ − σ²/2) times the mean, which gives σ =
    1.97 and 1.44.

    alpaca: lognormal, cut at 2048 tokens. Means 19.31 and 58.45: the same paper, Fig. 11b. Spread: σ = 0.565 and 0.997
    as of 6400 instructions and answers of Dolly under Llama 2's tokenizer (means 17.8 and 63.2), which is similar data.
    """

    kind: Literal["sharegpt", "alpaca"]

    def take(self, seed: int) -> Take:
        prompt, output = _PUBLISHED[self.kind]
        return GivenLengths(kind="laws", prompt=prompt, output=output).take(seed)


class TraceLengths(Strict):
    """Lengths of a trace: request i has those of row i."""

    kind: Literal["trace"]
    trace: Csv

    def take(self, seed: int) -> Take:
        for field in ("prompt_tokens", "output_tokens"):
            self.trace.needs(field, "lengths")
        rows = iter(self.trace.rows())

        def take(n: int) -> tuple[np.ndarray, np.ndarray]:
            taken = list(itertools.islice(rows, n))
            prompt = np.array([row.prompt_tokens for row in taken], np.int64)
            return prompt, np.array([row.output_tokens for row in taken], np.int64)

        return take


AnyLengths = Annotated[GivenLengths | PublishedLengths | TraceLengths, Field(discriminator="kind")]


def _normal_cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2
