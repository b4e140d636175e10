"""Cost models: seconds as sums of a few terms, so that evaluating one takes about a microsecond.

Rank terms follow CaraServe §5: a kernel that pads every request to the largest rank of its batch costs
`α·|S|·max rank + β`, one that does not costs `α·Σ rank + β`. Punica's Fig. 8 adds that requests of one
adapter share its bytes, so Σ rank is taken twice: over requests (arithmetic) and over distinct adapters (bytes).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Kernel(StrEnum):
    """LoRA kernel for a batch of mixed ranks: BGMV pads to the largest rank, SGMV does not."""

    BGMV = "bgmv"
    SGMV = "sgmv"

    def rank_work(self, tokens: int, token_ranks: int, max_rank: int) -> int:
        """Rank-rows computed for `tokens` tokens that use adapters. token_ranks: sum over these of their ranks."""
        return tokens * max_rank if self is Kernel.BGMV else token_ranks


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of a step in which every row computes one token.

    per_row: per row computed, padding to the bucket included. per_kv_token: per token in the rows' KV cache.
    lora: once when any row uses an adapter. per_rank: per rank-row of work (`Kernel.rank_work`).
    per_adapter_rank: per rank-row of the distinct adapters.
    per_row_beyond: what each row beyond `knee` costs more. Up to so many rows it takes longer to read the weights than
    to multiply with them, as in a roofline.
    """

    base: float = 0.0
    per_row: float = 0.0
    per_kv_token: float = 0.0
    lora: float = 0.0
    per_rank: float = 0.0
    per_adapter_rank: float = 0.0
    per_row_beyond: float = 0.0
    knee: float = 0.0

    def seconds(self, rows: int, kv_tokens: int, rank_work: int = 0, adapter_ranks: int = 0) -> float:
        """rows: bucket size. adapter_ranks: sum of the distinct adapters' ranks, 0 when none is used."""
        seconds = self.base + self.per_row * rows + self.per_kv_token * kv_tokens
        if rows > self.knee:
            seconds += self.per_row_beyond * (rows - self.knee)
        if adapter_ranks:
            seconds += self.lora + self.per_rank * rank_work + self.per_adapter_rank * adapter_ranks
        return seconds


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of a step that holds prefill chunks, beside which decode rows may run.

    floor: the step never takes less, however few tokens it has: one pass over the weights.
    per_token: per token computed. per_pair: per (token, token that it attends to): grows with a prompt's square.
    per_row: per row, each of which computes logits. The rank terms are `DecodeCost`'s.
    per_kv_token: per token in the rows' KV cache, which is read however few tokens attend to it.
    """

    floor: float = 0.0
    base: float = 0.0
    per_token: float = 0.0
    per_row: float = 0.0
    per_pair: float = 0.0
    lora: float = 0.0
    per_rank: float = 0.0
    per_adapter_rank: float = 0.0
    per_kv_token: float = 0.0

    def seconds(
        self, tokens: int, rows: int, pairs: float, rank_work: int = 0, adapter_ranks: int = 0, kv_tokens: int = 0
    ) -> float:
        seconds = self.base + self.per_token * tokens + self.per_row * rows + self.per_pair * pairs
        seconds += self.per_kv_token * kv_tokens
        if adapter_ranks:
            seconds += self.lora + self.per_rank * rank_work + self.per_adapter_rank * adapter_ranks
        return seconds if seconds > self.floor else self.floor


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Seconds to move bytes over a link."""

    latency: float = 0.0
    per_byte: float = 0.0

    def seconds(self, num_bytes: int) -> float:
        return self.latency + self.per_byte * num_bytes


@dataclass(frozen=True, slots=True)
class DiskCost(TransferCost):
    """Seconds to read bytes from a file into host memory, beside steps.

    contention: by how much the steps beside a read take longer, as a share of the read's time: both want the memory's
    bandwidth, and on a CPU the cores.
    """

    contention: float = 0.0

    def delay(self, seconds: float, left: float) -> float:
        """Return the extra time of a step of `seconds` beside a read that takes `left` seconds more."""
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
    """Seconds that the engine itself takes per step, beside its executor.

    per_prompt: per prompt in the step, or chunk of one: what a request's coming and going take.
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
    prefill: PrefillCost
    decode: DecodeCost
    disk: DiskCost
    link: TransferCost
    overhead: OverheadCost = OverheadCost()
    merge: MergeCost | None = None
    network: TransferCost | None = None
    all_reduce: AllReduceCost | None = None
    cpu_lora: CpuLoraCost | None = None

    def decode_seconds(self, ranks: Iterable[int], kv_tokens: int = 0) -> float:
        """A decode step of one request per rank, each with an adapter of its own; rank 0 is the base model.

        CaraServe's Perf(S), with which a router compares replicas.
        """
        rows = tokens = total = largest = 0
        for rank in ranks:
            rows += 1
            if rank:
                tokens += 1
                total += rank
                largest = max(largest, rank)
        return self.decode.seconds(rows, kv_tokens, self.kernel.rank_work(tokens, total, largest), total)

    def prefill_seconds(self, num_tokens: int, rank: int = 0) -> float:
        """One prompt of `num_tokens` tokens, alone in its step."""
        pairs = num_tokens * (num_tokens + 1) / 2
        return self.prefill.seconds(num_tokens, 1, pairs, num_tokens * rank, rank, num_tokens)

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


@dataclass(frozen=True, slots=True)
class CpuLoraCost:
    """Seconds to compute x·A·B of all layers of one adapter on the CPU, activations' way there and back included
    (CaraServe §4).

    per_token: per token, whatever the rank. per_token_rank: per token and rank-row.
    """

    base: float = 0.0
    per_token: float = 0.0
    per_token_rank: float = 0.0

    def seconds(self, tokens: int, rank: int) -> float:
        return self.base + tokens * (self.per_token + self.per_token_rank * rank)
