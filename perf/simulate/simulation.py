"""A simulation before its first request: identical replicas, the adapters that they share, and their router's
estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from ...core.config import EngineConfig
from ...core.costs.profile import Profile
from ...core.policies import Policies
from ...server.cluster.router import AnswerLengths, Estimates, Policy
from ..workload.fields import WorkloadError
from ..workload.request import TraceRequest
from .adapters import SimAdapters
from .cluster import Controller, simulate
from .records import Records
from .replica import Replica


class Simulation:
    """Replicas of one profile and configuration; adapters are added to their catalogue when requests name them.

    num_prompt_tokens: of the requests so far.
    """

    def __init__(
        self,
        profile: Profile,
        config: EngineConfig,
        replicas: int,
        *,
        targets: Collection[str] | None = None,
        adapters: SimAdapters | None = None,
        policies: Callable[[], Policies] = Policies,
        now: float = 0.0,
        **options: Any,
    ) -> None:
        """adapters: a catalogue; by default one of adapters on `targets`, or on all projections. policies: makes the
        stateful policies of a replica. now: when replicas begin to serve. options: `Replica`'s.
        """
        self.profile, self.config = profile, config
        self.adapters = adapters or SimAdapters(profile.geometry, config.block_tokens, targets)
        self.num_prompt_tokens = 0
        self._policies, self._options = policies, options
        self.replicas = [self.make(index, now) for index in range(replicas)]

    def make(self, index: int, now: float) -> Replica:
        """A replica that begins to serve at a time."""
        return Replica(
            self.profile, self.adapters, self.config, index=index, now=now, policies=self._policies(), **self._options
        )

    def estimates(
        self, slo: float | None = None, answers: AnswerLengths | None = None, *, mix: bool = True
    ) -> Estimates:
        return Estimates(self.profile.costs(), slo, answers, self.adapters.num_bytes, mix=mix)

    def run(
        self,
        requests: Iterable[TraceRequest],
        route: Policy,
        controllers: Iterable[Controller | None] = (),
        **options: Any,
    ) -> Records:
        """Serve requests. controllers: each is called with every event. options: of `cluster.simulate`."""
        control = [each for each in controllers if each is not None]

        def controller(event: Any, cluster: Any) -> None:
            for each in control:
                each(event, cluster)

        return simulate(
            self.known(requests),
            self.replicas,
            route,
            make=self.make,
            controller=controller if control else None,
            **options,
        )

    def known(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """The same requests; their adapters are in the catalogue."""
        for request in requests:
            self.num_prompt_tokens += request.prompt_tokens
            if request.adapter is not None and request.adapter not in self.adapters:
                self.add(request.adapter, request.rank)
            yield request

    def add(self, adapter: str, rank: int | None) -> None:
        """Add an adapter to the catalogue. Raises WorkloadError without a rank."""
        if rank is None:
            raise WorkloadError("workload.adapters.ranks: the adapters have no rank; set it")
        self.adapters.add(adapter, rank)
