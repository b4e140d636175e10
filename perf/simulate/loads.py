"""A workload's requests at a load that an engine and its simulation can both serve."""

from __future__ import annotations

import random
from collections.abc import Sequence
from zlib import crc32

from ...core.costs.models import CostModel
from ...core.costs.profile import Profile
from ..workload.request import TraceRequest

FIRST_TOKEN_ID = 16
"""Ids below are special in most vocabularies."""

_PROMPT_SHARE = 0.75  # of the model's length, that a workload's prompt may take


def at_load(
    workload: Sequence[TraceRequest], share: float, profile: Profile, rows: int, adapters: Sequence[str]
) -> list[TraceRequest]:
    """A workload's requests, squeezed or stretched in time until they keep a machine busy for a share of it.

    Arrivals keep their pattern; lengths are cut to the model's context. Each adapter that the workload names becomes
    one of the adapters that there are, always the same one. rows: batch size at which the share holds.
    """
    costs, names, most_tokens = profile.costs(), sorted(adapters), profile.geometry.max_model_len
    most_prompt = int(_PROMPT_SHARE * most_tokens)
    first, last = workload[0].arrival, workload[-1].arrival
    cut, busy = [], 0.0
    for request in workload:
        prompt = min(request.prompt_tokens, most_prompt)
        output = max(1, min(request.output_tokens, most_tokens - most_prompt))
        name = None if request.adapter is None else names[crc32(request.adapter.encode()) % len(names)]
        busy += busy_seconds(costs, rows, prompt, output)
        cut.append(request._replace(prompt_tokens=prompt, output_tokens=output, adapter=name))
    factor = busy / share / max(last - first, 1e-9)
    return [each._replace(id=index, arrival=(each.arrival - first) * factor) for index, each in enumerate(cut)]


def prompt_of(request: TraceRequest, vocab_size: int) -> list[int]:
    """Random token ids; no two requests share a beginning worth caching."""
    source = random.Random(request.id)
    return [source.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(request.prompt_tokens)]


def busy_seconds(costs: CostModel, rows: int, prompt: int, output: int) -> float:
    """Seconds that a request keeps the machine busy, at batches of `rows`; the engine's work between steps counts."""
    decode = costs.decode_seconds([16] * rows, int(rows * (prompt + output / 2))) + costs.overhead.seconds(rows)
    return costs.prefill_seconds(prompt, 16) + costs.overhead.seconds(1, 1) + output * decode / rows
