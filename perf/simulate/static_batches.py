"""A server without continuous batching, which Chorus' engine does not model; steps in closed form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...core.costs.models import CostModel, StepWork
from ..workload import WorkloadSpec
from ..workload.request import TraceRequest
from .serving import changed_profile
from .setup import Setup


def static_batches(setup: Setup) -> dict[str, float]:
    """Metrics of a server without continuous batching; all requests are there from the start.

    As in HuggingFace Transformers, DeepSpeed and FasterTransformer (Punica §5.4, §7.2): consecutive requests of one
    adapter make a batch, which is padded to its longest prompt and decodes until its longest answer has ended.
    """
    costs = changed_profile(setup.profile, setup.terms).costs()
    most = setup.engine["max_num_seqs"]
    seconds = tokens = steps = 0.0
    for batch in _batches(WorkloadSpec.parse(setup.workload), most):
        took, count = _seconds(batch, costs)
        seconds += took
        steps += count
        tokens += sum(request.output_tokens for request in batch)
    return {"tokens_per_second": tokens / seconds, "simulated_seconds": seconds, "busy_batch": tokens / steps}


def _batches(requests: Iterable[TraceRequest], most: int) -> Iterator[list[TraceRequest]]:
    batch: list[TraceRequest] = []
    for request in requests:
        if batch and (len(batch) == most or request.adapter != batch[0].adapter):
            yield batch
            batch = []
        batch.append(request)
    if batch:
        yield batch


def _seconds(batch: list[TraceRequest], costs: CostModel) -> tuple[float, int]:
    """Seconds of a batch, and its steps."""
    rows, prompt = len(batch), max(request.prompt_tokens for request in batch)
    steps = max(request.output_tokens for request in batch) - 1
    rank = batch[0].rank or 0
    # a decode step's price is linear in its KV: the total is that of the middle step times their number
    middle = decode_seconds(costs, rows, prompt + (steps + 1) / 2, rank, 1)
    return prefill_seconds(costs, rows, prompt, rank) + steps * middle, steps + 1


def decode_seconds(costs: CostModel, rows: int, context: float, rank: int, adapters: int) -> float:
    """A decode step of `rows` requests that each have `context` tokens in their KV cache, one token each.

    rank: of all requests' adapters, `adapters` of which are distinct; 0 is the base model.
    """
    ranks, kv = rows * rank, round(rows * context)
    return costs.step.seconds(
        StepWork(
            rows,
            rows,
            kv_tokens=kv,
            longest=round(context),
            row_ranks=ranks,
            token_ranks=ranks,
            adapter_ranks=adapters * rank,
        )
    )


def prefill_seconds(costs: CostModel, prompts: int, tokens: int, rank: int) -> float:
    """A step of `prompts` prompts of `tokens` tokens each, all for one adapter."""
    total, pairs = prompts * tokens, prompts * tokens * (tokens + 1) / 2
    return costs.step.seconds(
        StepWork(
            total,
            prompts,
            kv_tokens=total,
            longest=0,
            row_ranks=prompts * rank,
            token_ranks=total * rank,
            adapter_ranks=rank,
            pairs=pairs,
            ragged=True,
        )
    )
