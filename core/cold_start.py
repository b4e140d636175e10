"""How to begin a prompt whose adapter is being copied to the device, and the costs (CaraServe §4).

*Wait*: the step begins when the whole adapter is there. *Stream*: it begins now, and each layer waits for its own part.
*Offload*: it begins now, and other processors compute x·A·B of a layer that is not there. Their results come over the
link that the adapter comes over: of L tokens L·Σout values a layer, where an adapter of rank r has r·Σ(in + out). So
nothing is left to gain from `link_tokens` = r·Σ(in + out)/Σout tokens on, whatever the processors: 1.84 r of a layer of
Llama-2-7B, 2 r where in and out are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class ColdStart(StrEnum):
    """Ways to begin."""

    WAIT = "wait"
    STREAM = "stream"
    OFFLOAD = "offload"


def link_tokens(rank: int, dims: Iterable[tuple[int, int]]) -> float:
    """Tokens from which x·A·B is as much to bring over as the adapter itself. dims: (in, out) of its projections."""
    dims = list(dims)
    return rank * sum(a + b for a, b in dims) / sum(b for _, b in dims)


@dataclass(frozen=True, slots=True)
class Arrival:
    """An adapter on its way: seconds until its next layer is there and until its last one is, evenly in between.

    ahead: layers that are there.
    """

    layers: int
    first: float
    last: float
    ahead: int = 0

    def of(self, layer: int) -> float:
        """Seconds until a layer is there."""
        if layer < self.ahead:
            return 0.0
        coming = self.layers - self.ahead - 1
        return self.last if coming <= 0 else self.first + (self.last - self.first) * (layer - self.ahead) / coming


@dataclass(frozen=True, slots=True)
class Stalls:
    """By how many seconds a step with a prompt takes longer than if its adapter were there, for each way to begin.

    offloaded_layers: layers that are offloaded, if the prompt is.
    """

    wait: float
    stream: float
    offload: float
    offloaded_layers: int

    @property
    def best(self) -> ColdStart:
        """The least; without the offload workers where they gain nothing."""
        if self.offload < min(self.stream, self.wait):
            return ColdStart.OFFLOAD
        return ColdStart.STREAM if self.stream <= self.wait else ColdStart.WAIT

    def of(self, cold_start: ColdStart) -> float:
        return {ColdStart.WAIT: self.wait, ColdStart.STREAM: self.stream, ColdStart.OFFLOAD: self.offload}[cold_start]

    def regret(self, cold_start: ColdStart) -> float:
        """By how much a way is worse than the best one."""
        return self.of(cold_start) - self.of(self.best)


def stalls(arrival: Arrival, prefill: float, cpu: float, returned: float = 0.0) -> Stalls:
    """Price the ways to begin.

    prefill: seconds of the step without a stall. cpu: seconds that the offload workers take for all layers, exchanges
    included; a layer's GEMMs run in parallel to the base model's. returned: seconds of the link that x·A·B of all
    layers takes, for which the adapter's later layers, and the layer itself, wait.
    """
    each = prefill / arrival.layers
    offloaded_each, link_each = max(each, (cpu + returned) / arrival.layers), returned / arrival.layers
    streamed = offloaded = 0.0
    offloaded_layers = 0
    for layer in range(arrival.layers):
        there = arrival.of(layer)
        streamed = max(streamed, there) + each
        if there + offloaded_layers * link_each <= offloaded:
            offloaded += each
        else:
            offloaded += offloaded_each
            offloaded_layers += 1
    return Stalls(arrival.last, streamed - prefill, offloaded - prefill, offloaded_layers)


@dataclass(slots=True)
class ColdStarts:
    """How prompts with an adapter on its way have begun; `LoadPolicy` and the executor count here.

    num_waited: adapters that a request waited for to the end of the read. regret_seconds: by how much the steps of the
    others were longer than the best way would have made them, by the times that were known afterwards.
    """

    num_waited: int = 0
    num_streamed: int = 0
    num_offloaded: int = 0
    regret_seconds: float = 0.0

    def count(self, cold_start: ColdStart) -> None:
        if cold_start is ColdStart.WAIT:
            self.num_waited += 1
        elif cold_start is ColdStart.STREAM:
            self.num_streamed += 1
        else:
            self.num_offloaded += 1


@dataclass(frozen=True, slots=True)
class CpuLoraCost:
    """Seconds to compute x·A·B of all layers of one adapter on the CPU (CaraServe §4).

    base: exchanges. per_rank: per rank-row, which every core reads. per_token: per token, whatever the rank: x's way
    to the host. per_token_rank: per token and rank-row, on one core. cores: that there are. tokens_each: that one core
    computes before another one pays.
    """

    base: float = 0.0
    per_rank: float = 0.0
    per_token: float = 0.0
    per_token_rank: float = 0.0
    cores: float = 1.0
    tokens_each: float = 1.0

    def seconds(self, tokens: int, rank: int) -> float:
        cores = max(1, min(int(self.cores), -(-tokens // max(1, int(self.tokens_each)))))
        share = -(-tokens // cores)
        return self.base + tokens * self.per_token + rank * (self.per_rank + share * self.per_token_rank)
