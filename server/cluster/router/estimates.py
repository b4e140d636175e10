"""Estimates by which policies price a request.

Tests: tests/server/cluster/router/test_answer_lengths.py
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from ....core.costs.models import CostModel
from ....core.costs.profile import load_profile
from ....core.scheduling.service import OutputLengths
from .replicas import ReplicaState

ENOUGH = 8
"""Completions of an adapter from which its own mean replaces the mean of all."""

MAX_ADAPTERS = 1024
"""Adapters whose completions are remembered: those with the latest ends."""


GUESS = 256.0
"""Tokens of a completion before any has ended; the scheduler assumes the same."""


class AnswerLengths:
    """Mean length of an adapter's latest completions, or of all completions if it has few.

    A completion that its limit truncated counts with its tokens: it used its replica for so long.
    """

    def __init__(self, guess: float = GUESS) -> None:
        """guess: tokens of a completion before any has ended; infinite to make prompts count for nothing."""
        self._guess = guess
        self._all = OutputLengths()
        self._own: OrderedDict[str | None, OutputLengths] = OrderedDict()

    def end(self, adapter: str | None, num_tokens: int) -> None:
        """Record a finished completion. adapter: None is the base model."""
        own = self._own.setdefault(adapter, OutputLengths())
        self._own.move_to_end(adapter)
        if len(self._own) > MAX_ADAPTERS:
            self._own.popitem(last=False)
        for lengths in (own, self._all):
            lengths.end(num_tokens, was_cut=False)

    def expected(self, adapter: str | None) -> float:
        """Return the expected tokens of a new completion."""
        own = self._own.get(adapter)
        lengths = self._all if own is None or len(own) < ENOUGH else own
        return lengths.mean if len(lengths) else self._guess


PRIOR = "h200-llama3.1-8b"
"""Profile by datasheet rates, none measured: its costs serve until replicas report their own."""

_MOST_QUEUES = 1 << 16

SLO_STEPS = 1.5
"""Without an SLO, a token may take so many decode steps of one base request (CaraServe, §7.5)."""


class Estimates:
    """Costs of a replica and lengths of completions; the owner keeps them up to date, all policies of a router share
    them.

    slo: seconds per token. answers: expected lengths. adapter_bytes: size of an adapter by its name. mix: prompts share
    steps with decoding requests, as in Chorus; otherwise they interrupt them, as in CaraServe (§2.2).
    """

    def __init__(
        self,
        costs: CostModel | None = None,
        slo: float | None = None,
        answers: AnswerLengths | None = None,
        adapter_bytes: Callable[[str], int] = lambda name: 0,
        *,
        mix: bool = True,
    ) -> None:
        """costs: default: those of `PRIOR`. slo: default: `SLO_STEPS` by the costs."""
        self._given_slo = slo
        self.answers = AnswerLengths() if answers is None else answers
        self.adapter_bytes = adapter_bytes
        self.mix = mix
        self.set_costs(_prior() if costs is None else costs)

    def set_costs(self, costs: CostModel) -> None:
        """Price by other costs from now on."""
        self.costs = costs
        # seconds of queues; most are unchanged since the last decision
        self._queues: dict[tuple[int, int, int, int], float] = {}
        self.slo = SLO_STEPS * costs.decode_seconds((0,)) if self._given_slo is None else self._given_slo

    def queue_seconds(self, replica: ReplicaState) -> float:
        """Seconds of the prefill-only step for a replica's queue; the queue must not be empty."""
        queue = (replica.pending_tokens, replica.num_waiting, replica.pending_token_ranks, replica.pending_max_rank)
        seconds = self._queues.get(queue)
        if seconds is None:
            if len(self._queues) == _MOST_QUEUES:
                self._queues.clear()
            seconds = self._queues[queue] = self.costs.queue_seconds(*queue)
        return seconds

    def load_of(self, adapter: str | None) -> AdapterLoad:
        """The load of an adapter, priced once for a decision among several replicas."""
        if adapter is None:
            return AdapterLoad("", 0.0, 0.0)
        num_bytes = self.adapter_bytes(adapter)
        return AdapterLoad(adapter, self.costs.disk.seconds(num_bytes), self.costs.link.seconds(num_bytes))


class AdapterLoad(NamedTuple):
    """An adapter, and the seconds of its read and of its copy over the link by themselves; "": the base model."""

    adapter: str
    read: float
    copy: float

    def seconds(self, replica: ReplicaState) -> float:
        """Seconds until a replica without the adapter has it resident: the read, unless it is in host memory, and the
        copy over the link, each after the transfers in progress there.
        """
        adapter, read, copy = self
        there = 0.0 if adapter in replica.on_host else replica.disk_seconds + read
        return max(there, replica.link_seconds) + copy


@cache
def _prior() -> CostModel:
    return load_profile(PRIOR).costs()
