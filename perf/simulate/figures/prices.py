"""Prices of a profile in closed form: steps without what the host takes beside them, loads and sizes."""

from __future__ import annotations

from ....core.costs.models import CostModel, StepWork
from ..serving import changed_profile
from .figure import Price, profile_path


def price(wanted: Price) -> float:
    """Return seconds or bytes, as `Price` says."""
    profile = changed_profile(profile_path(wanted.profile), {})
    costs, geometry = profile.costs(), profile.geometry
    adapters = wanted.rows if wanted.adapters is None else wanted.adapters
    match wanted.of:
        case "decode":
            found = decode_seconds(costs, wanted.rows, wanted.context, wanted.rank, adapters)
        case "lora":
            found = decode_seconds(costs, wanted.rows, wanted.context, wanted.rank, adapters)
            found -= decode_seconds(costs, wanted.rows, wanted.context, 0, 1)
        case "prefill":
            found = prefill_seconds(costs, wanted.rows, wanted.context, wanted.rank)
        case "load":
            found = costs.link.seconds(geometry.adapter_bytes(wanted.rank, tuple(wanted.targets)))
        case "adapter":
            found = float(geometry.adapter_bytes(wanted.rank, tuple(wanted.targets)))
        case "kv":
            found = float(geometry.page_layout(1).page_bytes * wanted.context)
    return found * wanted.share


def decode_seconds(costs: CostModel, rows: int, context: float, rank: int, adapters: int) -> float:
    """A decode step of `rows` requests that each have `context` tokens in their KV cache, one token each.

    rank: of all rows' adapters, of which `adapters` are distinct; 0 is the base model.
    """
    ranks, kv = rows * rank, round(rows * context)
    return costs.step.seconds(StepWork(rows, rows, kv, round(context), ranks, ranks, adapters * rank))


def prefill_seconds(costs: CostModel, prompts: int, tokens: int, rank: int) -> float:
    """A step of `prompts` prompts of `tokens` tokens each, all for one adapter."""
    total, pairs = prompts * tokens, prompts * tokens * (tokens + 1) / 2
    return costs.step.seconds(StepWork(total, prompts, total, 0, prompts * rank, total * rank, rank, pairs, True))
