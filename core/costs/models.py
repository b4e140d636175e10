"""Cost models: seconds as sums of a few terms, so that evaluating one takes about a microsecond.

A step has one price, whatever its mixture of prefill chunks and decode rows: a roofline of its matrix products, which
all its tokens share, plus the work of each sequence (attention, LoRA, logits). More of anything never makes it cheaper.

Rank terms follow CaraServe §5: a kernel that pads every request to the largest rank of its batch costs
`α·|S|·max rank + β`, one that does not costs `α·Σ rank + β`. Punica's Fig. 8 adds that requests of one
adapter share its bytes, so ranks are summed over requests, over tokens (arithmetic) and over distinct adapters (bytes).

Tests: tests/core/costs/test_costs.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ..cold_start import CpuLoraCost
from ..expert_share import share_of_experts


class Kernel(StrEnum):
    """LoRA kernel for a batch of mixed ranks: BGMV pads to the largest rank, SGMV does not."""

    BGMV = "bgmv"
    SGMV = "sgmv"

    def rank_work(self, count: int, ranks: int, max_rank: int) -> int:
        """Rank-rows computed for `count` rows, or tokens, that use adapters. ranks: the sum of theirs."""
        return count * max_rank if self is Kernel.BGMV else ranks


@dataclass(slots=True)
class StepWork:
    """Amount of work in a step: counts over its rows.

    tokens: computed tokens, with the padding of a bucket; a step with a prompt has no padding, but with more than 64
    rows it counts at least the padded number of rows, since products are computed in tiles of about an eighth of them,
    and a prompt of few tokens makes no step cheaper. rows: without padding. kv_tokens: tokens in the rows' KV cache
    after the step. longest: most KV tokens of a row before the step. row_ranks, token_ranks: rank-rows computed, once
    per row and once per token. adapter_ranks: sum of the distinct adapters' ranks. pairs: (token, token that it attends
    to) of the ragged rows. ragged: there are rows that compute more than one token; without them,
    tokens above the number of rows are padding.
    """

    tokens: int
    rows: int
    kv_tokens: int = 0
    longest: int = 0
    row_ranks: int = 0
    token_ranks: int = 0
    adapter_ranks: int = 0
    pairs: float = 0.0
    ragged: bool = False


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: prefill chunks, decode rows, or both.

    base: launches and whatever else every step takes. ragged: once where a row computes more than one token: such a
    step is not one that was captured.
    weights, per_token: the projections take the longer of reading them once and multiplying every token with them.
    head, per_logits: likewise the LM head, which every row is multiplied with once. per_row: all else that a row takes.
    per_padding: per padding token of a bucket, apart from its share of the GEMMs.
    per_kv_token: per token in the rows' KV cache, which is read however few tokens attend to it. per_pair: per (token,
    token that it attends to) of the rows that compute more than one: their attention is arithmetic.
    per_longest: per token that the longest row has in its KV cache already, where attention reads a row's with few
    processors.
    lora: once where any row uses an adapter. per_rank, per_token_rank: per rank-row of work (`Kernel.rank_work`) over
    the rows and over the tokens. per_adapter_rank: per rank-row of the distinct adapters.
    experts: all experts of a mixture, of which a step takes the share that its tokens go to: each token goes to
    expert_share of them, and all are equally likely.
    """

    base: float = 0.0
    ragged: float = 0.0
    weights: float = 0.0
    per_token: float = 0.0
    head: float = 0.0
    per_logits: float = 0.0
    per_row: float = 0.0
    per_padding: float = 0.0
    per_kv_token: float = 0.0
    per_pair: float = 0.0
    per_longest: float = 0.0
    lora: float = 0.0
    per_rank: float = 0.0
    per_token_rank: float = 0.0
    per_adapter_rank: float = 0.0
    experts: float = 0.0
    expert_share: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Of the executor; the engine's overhead comes on top."""
        tokens, rows = work.tokens, work.rows
        products, head = self.per_token * tokens, self.per_logits * rows
        seconds = (
            self.base
            + (products if products > self.weights else self.weights)
            + (head if head > self.head else self.head)
            + self.per_row * rows
            + self.per_kv_token * work.kv_tokens
            + self.per_longest * work.longest
        )
        if self.experts:
            seconds += self.experts * share_of_experts(self.expert_share, tokens)
        if work.adapter_ranks:
            seconds += self.lora + self.per_rank * work.row_ranks + self.per_token_rank * work.token_ranks
            seconds += self.per_adapter_rank * work.adapter_ranks
        if work.ragged:
            return seconds + self.ragged + self.per_pair * work.pairs
        return seconds + self.per_padding * (tokens - rows)

    def with_prompt(self, tokens: int, rows: int, prompt: int) -> tuple[float, float]:
        """`seconds` of rows without KV and adapters, and with one more row of `prompt` tokens; neither is ragged."""
        products, head, base = self.per_token * tokens, self.per_logits * rows, self.base
        before = base + (products if products > self.weights else self.weights)
        before += head if head > self.head else self.head
        products, head = self.per_token * (tokens + prompt), self.per_logits * (rows + 1)
        after = base + (products if products > self.weights else self.weights)
        after += head if head > self.head else self.head
        if self.experts:
            before += self.experts * share_of_experts(self.expert_share, tokens)
            after += self.experts * share_of_experts(self.expert_share, tokens + prompt)
        return before + self.per_row * rows, after + self.per_row * (rows + 1)

    def growth(self, rows: int) -> float:
        """Return by how much a decode step of `rows` requests takes longer than the one before it."""
        return self.per_kv_token * rows + self.per_longest


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Seconds to move bytes over a link."""

    latency: float = 0.0
    per_byte: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        return self.latency + self.per_byte * num_bytes


@dataclass(frozen=True, slots=True)
class DiskCost(TransferCost):
    """Seconds to read bytes from a file into host memory, concurrently with steps.

    contention: by how much steps take longer during a read, as a share of the read's time: both want the memory's
    bandwidth, and on a CPU the cores.
    """

    contention: float = 0.0

    def delay(self, seconds: float, left: float) -> float:
        """Return the extra time of a step of `seconds` during a read that takes `left` seconds more."""
        if not self.contention:
            return 0.0
        return min(seconds * self.contention / (1.0 - self.contention), left * self.contention)


@dataclass(frozen=True, slots=True)
class MergeCost:
    """Seconds to write `W + scale·B·A` over the targeted weights: every weight once, and arithmetic per rank."""

    base: float = 0.0
    per_rank: float = 0.0

    def seconds(self, rank: int) -> float:
        return self.base + self.per_rank * rank


@dataclass(frozen=True, slots=True)
class OverheadCost:
    """Seconds that the engine itself takes per step, without its executor.

    per_prompt: per prompt in the step, or chunk of one: for a request's start and end.
    """

    base: float = 0.0
    per_row: float = 0.0
    per_prompt: float = 0.0

    def seconds(self, rows: int, prompts: int = 0) -> float:
        return self.base + self.per_row * rows + self.per_prompt * prompts


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost models of one device with one base model.

    disk: from an adapter's file to its host image. link: from the host image to the device; a swapped-out request's KV
    pages take it too. network: a request's way to another replica. all_reduce: of one tensor among devices that are
    tensor parallel. cpu_lora: x·A·B of an adapter on the CPU. None: not known here.
    """

    kernel: Kernel
    step: StepCost
    disk: DiskCost
    link: TransferCost
    overhead: OverheadCost = OverheadCost()
    merge: MergeCost | None = None
    network: TransferCost | None = None
    all_reduce: AllReduceCost | None = None
    cpu_lora: CpuLoraCost | None = None

    def decode_seconds(self, ranks: Iterable[int], kv_tokens: int = 0, longest: int = 0) -> float:
        """A decode step of one request per rank, each with an adapter of its own; rank 0 is the base model.

        CaraServe's Perf(S), with which a router compares replicas.
        """
        rows = users = total = largest = 0
        for rank in ranks:
            rows += 1
            if rank:
                users += 1
                total += rank
                largest = max(largest, rank)
        return self.batch_seconds(rows, users, total, largest, kv_tokens=kv_tokens, longest=longest)

    def batch_seconds(
        self, rows: int, users: int, ranks: int, max_rank: int, kv_tokens: int = 0, longest: int = 0
    ) -> float:
        """A decode step of `rows` requests, of which `users` have an adapter each; ranks: the sum of theirs."""
        work = self.kernel.rank_work(users, ranks, max_rank)
        return self.step.seconds(StepWork(rows, rows, kv_tokens, longest, work, token_ranks=work, adapter_ranks=ranks))

    def queue_seconds(self, tokens: int, prompts: int, token_ranks: int, max_rank: int) -> float:
        """The prompts of a queue in one step; token_ranks: the sum of ranks over their tokens.

        Attention is left out, because the queue's lengths are unknown; prompts are taken as equally long, and to
        share an adapter of the largest rank.
        """
        ranks = self.kernel.rank_work(prompts, token_ranks * prompts // max(1, tokens), max_rank)
        work = self.kernel.rank_work(tokens, token_ranks, max_rank)
        return self.step.seconds(
            StepWork(tokens, prompts, 0, 0, ranks, token_ranks=work, adapter_ranks=max_rank, ragged=True)
        )

    def prefill_seconds(self, num_tokens: int, rank: int = 0) -> float:
        """One prompt of `num_tokens` tokens, alone in its step."""
        pairs = num_tokens * (num_tokens + 1) / 2
        work = StepWork(
            num_tokens,
            1,
            num_tokens,
            0,
            rank,
            token_ranks=num_tokens * rank,
            adapter_ranks=rank,
            pairs=pairs,
            ragged=True,
        )
        return self.step.seconds(work)

    def swap_seconds(self, num_bytes: int) -> float:
        """KV of `num_bytes` out to the host, or back in."""
        return self.link.seconds(num_bytes)

    def migrate_seconds(self, num_tokens: int, rank: int = 0) -> float:
        """A request moves to another replica, which computes its `num_tokens` tokens' KV again (Punica §5.3)."""
        network = 0.0 if self.network is None else self.network.latency
        return network + self.prefill_seconds(num_tokens, rank)


@dataclass(frozen=True, slots=True)
class AllReduceCost:
    """Seconds to sum a tensor over devices in a ring: each sends and receives 2·(n − 1) parts of 1/n of it.

    latency: per part. per_byte: of the link between two devices.
    """

    latency: float = 0.0
    per_byte: float = 0.0

    def seconds(self, num_bytes: int, degree: int) -> float:
        """num_bytes: of the whole tensor. degree: number of devices."""
        return 2 * (degree - 1) * (self.latency + self.per_byte * num_bytes / degree)
