"""Loads that engine and simulator both serve: requests that are made up, and the first ones of a recorded workload."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from ...core.costs.models import CostModel
from ...core.costs.profile import Profile
from ..workload.request import TraceRequest

PROMPT_TOKENS = (16, 160)
OUTPUT_TOKENS = (12, 64)
FIRST_TOKEN_ID = 16
"""Ids below are special in most vocabularies."""

_PROMPT_SHARE = 0.75  # of the model's length, that a workload's prompt may take


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that keep a machine busy for a share of the time."""

    requests: int
    share: float
    seed: int = 0

    def trace(self, profile: Profile, rows: int, adapters: Sequence[str]) -> list[TraceRequest]:
        """Poisson arrivals; lengths evenly within PROMPT_TOKENS and OUTPUT_TOKENS; a tenth on the base model.

        rows: batch size at which the share holds.
        """
        source = random.Random(self.seed)
        prompt, output = sum(PROMPT_TOKENS) // 2, sum(OUTPUT_TOKENS) // 2
        rate = self.share / busy_seconds(profile.costs(), rows, prompt, output)
        now, found = 0.0, []
        for index in range(self.requests):
            now += source.expovariate(rate)
            name = None if source.random() < 0.1 else source.choice(list(adapters))
            found.append(TraceRequest(index, now, name, source.randint(*PROMPT_TOKENS), source.randint(*OUTPUT_TOKENS)))
        return found


@dataclass(frozen=True, slots=True)
class Recorded:
    """The first requests of a workload, at a load of ours.

    Each adapter that it names becomes one of the adapters that there are, always the same one.
    """

    workload: Sequence[TraceRequest]
    share: float
    most_tokens: int

    def trace(self, profile: Profile, rows: int, adapters: Sequence[str]) -> list[TraceRequest]:
        """Arrivals keep their pattern. rows: batch size at which the share holds."""
        costs, names = profile.costs(), sorted(adapters)
        most_prompt = int(_PROMPT_SHARE * self.most_tokens)
        first, last = self.workload[0].arrival, self.workload[-1].arrival
        cut, busy = [], 0.0
        for request in self.workload:
            prompt, output = request.prompt_tokens, request.output_tokens
            prompt, output = min(prompt, most_prompt), max(1, min(output, self.most_tokens - most_prompt))
            name = None if request.adapter is None else names[crc32(request.adapter.encode()) % len(names)]
            busy += busy_seconds(costs, rows, prompt, output)
            cut.append(request._replace(prompt_tokens=prompt, output_tokens=output, adapter=name))
        factor = busy / self.share / max(last - first, 1e-9)
        return [each._replace(id=index, arrival=(each.arrival - first) * factor) for index, each in enumerate(cut)]


def prompt_of(request: TraceRequest, vocab_size: int) -> list[int]:
    """Random token ids; no two requests share a beginning worth caching."""
    source = random.Random(request.id)
    return [source.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(request.prompt_tokens)]


def busy_seconds(costs: CostModel, rows: int, prompt: int, output: int) -> float:
    """Seconds that a request keeps the machine busy, at batches of `rows`; the engine's work between steps counts."""
    decode = costs.decode_seconds([16] * rows, int(rows * (prompt + output / 2))) + costs.overhead.seconds(rows)
    return costs.prefill_seconds(prompt, 16) + costs.overhead.seconds(1, 1) + output * decode / rows
