"""Estimates that policies price a request by.

Tests: tests/server/cluster/router/test_answer_lengths.py
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from ....core.costs.models import CostModel
from ....core.costs.profile import load_profile
from ....core.scheduling.output_lengths import OutputLengths
from .replicas import ReplicaState

ENOUGH = 8
"""Answers of an adapter from which on its own mean counts, and not that of all."""

MAX_ADAPTERS = 1024
"""Adapters with remembered answers: the adapters with the latest ends."""


GUESS = 256.0
"""Tokens of an answer before any has ended, as the scheduler guesses."""


class AnswerLengths:
    """Mean length of an adapter's latest answers, of all answers where it has given few.

    An answer that its limit cut off counts with the tokens that it had: for so long it took its replica's time.
    """

    def __init__(self, guess: float = GUESS) -> None:
        """guess: tokens of an answer before any has ended; infinite where prompts are to count for nothing."""
        self._guess = guess
        self._all = OutputLengths()
        self._own: OrderedDict[str | None, OutputLengths] = OrderedDict()

    def end(self, adapter: str | None, num_tokens: int) -> None:
        """Record an answer that has ended. adapter: None is the base model."""
        own = self._own.setdefault(adapter, OutputLengths())
        self._own.move_to_end(adapter)
        if len(self._own) > MAX_ADAPTERS:
            self._own.popitem(last=False)
        for lengths in (own, self._all):
            lengths.end(num_tokens, was_cut=False)

    def expected(self, adapter: str | None) -> float:
        """Return the tokens that a new answer is expected to have."""
        own = self._own.get(adapter)
        lengths = self._all if own is None or len(own) < ENOUGH else own
        return lengths.mean if len(lengths) else self._guess


PRIOR = "h200-llama3.1-8b"
"""Profile by datasheet rates, nothing of it measured: its costs stand in until replicas report their own."""

_MOST_QUEUES = 1 << 16

SLO_STEPS = 1.5
"""Decode steps of one request without an adapter that a token may take, where no SLO is set (CaraServe, §7.5)."""


class Estimates:
    """Costs of a replica and lengths of answers; the owner keeps them up to date, all policies of a router share them.

    slo: seconds per token. answers: expected lengths. adapter_bytes: size of an adapter by its name. mix: prompts share
    steps with requests that decode, as in Chorus; otherwise they interrupt them, as in CaraServe (§2.2).
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
        """costs: default: `PRIOR`'s costs. slo: default: `SLO_STEPS` by the costs."""
        self._given_slo = slo
        self.answers = AnswerLengths() if answers is None else answers
        self.adapter_bytes = adapter_bytes
        self.mix = mix
        self.set_costs(_prior() if costs is None else costs)

    def set_costs(self, costs: CostModel) -> None:
        """Price by other costs from now on."""
        self.costs = costs
        self._queues: dict[tuple[int, int, int, int], float] = {}  # seconds of queues; most are as at the last decision
        self.slo = SLO_STEPS * costs.decode_seconds((0,)) if self._given_slo is None else self._given_slo

    def queue_seconds(self, replica: ReplicaState) -> float:
        """Seconds of the step of prompts alone that prefills a replica's queue; it must not be empty."""
        queue = (replica.pending_tokens, replica.num_waiting, replica.pending_token_ranks, replica.pending_max_rank)
        seconds = self._queues.get(queue)
        if seconds is None:
            if len(self._queues) == _MOST_QUEUES:
                self._queues.clear()
            seconds = self._queues[queue] = self.costs.queue_seconds(*queue)
        return seconds

    def load_of(self, adapter: str | None) -> AdapterLoad:
        """The load of an adapter, which is priced once for a decision among several replicas."""
        if adapter is None:
            return AdapterLoad("", 0.0, 0.0)
        num_bytes = self.adapter_bytes(adapter)
        return AdapterLoad(adapter, self.costs.disk.seconds(num_bytes), self.costs.link.seconds(num_bytes))


class AdapterLoad(NamedTuple):
    """An adapter, and the seconds that its read and its copy over the link take by themselves; "": the base model."""

    adapter: str
    read: float
    copy: float

    def seconds(self, replica: ReplicaState) -> float:
        """Seconds until a replica that has not got it has the adapter in its arena: the read, unless it is in host
        memory, and the copy over the link, each behind what is under way there.
        """
        adapter, read, copy = self
        there = 0.0 if adapter in replica.on_host else replica.disk_seconds + read
        return max(there, replica.link_seconds) + copy


@cache
def _prior() -> CostModel:
    return load_profile(PRIOR).costs()
