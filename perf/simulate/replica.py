"""One replica in virtual time: its engine, the step that it is in, and what routers may know of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from ...core.config import EngineConfig
from ...core.costs.profile import Profile
from ...core.executors.sim import MODEL, SimAdapters, simulated_engine
from ...core.executors.sim_adapters import VirtualClock
from ...core.request import Request
from ...core.sampling_params import InvalidRequest, SamplingParams
from ...core.types import RequestOutput, StepPlan
from ..workload.request import TraceRequest
from .records import Served

DEFAULT_BLOCK_TOKENS = 16


class Replica:
    """Takes requests at any time and ends its steps when their time has come.

    A request that comes during a step is seen when the step ends, as in the server. Between `wake`s nothing changes
    here but the lengths of the answers, so a replica costs nothing while others have events.
    """

    def __init__(
        self,
        profile: Profile,
        adapters: SimAdapters,
        config: EngineConfig | None = None,
        *,
        index: int = 0,
        stream: bool = True,
        max_repeat: int = 1 << 20,
        read_threads: int = 2,
    ) -> None:
        """adapters: shared by all replicas; adapters that requests name are registered when they first come.

        The other arguments are those of `simulated_engine`.
        """
        self.index = index
        self.clock = VirtualClock()
        self.engine, self.executor = simulated_engine(
            profile, adapters, config or EngineConfig(model=MODEL, prefix_cache=False), self.clock, stream=stream,
            max_repeat=max_repeat, read_threads=read_threads,
        )  # fmt: skip
        self.wake = math.inf
        self.num_requests = 0
        self.ranks: Counter[int] = Counter()  # of requests here, waiting and running; 0 is the base model
        self.num_failed = 0
        self._adapters = adapters
        self._inbox: list[Request] = []
        self._plan: StepPlan | None = None
        self._open: dict[str, tuple[Request, float, float]] = {}  # with stalled seconds at arrival, and first token
        self._params: dict[int, SamplingParams] = {}

    @property
    def max_rank(self) -> int:
        return max(self.ranks, default=0)

    @property
    def sum_ranks(self) -> int:
        return sum(rank * count for rank, count in self.ranks.items())

    def is_resident(self, adapter: str) -> bool:
        """Whether the adapter is in the arena now."""
        store = self.engine.store
        return adapter in store and bool(store.get(adapter).pages)

    def give(self, item: TraceRequest, prompt: list[int] | None = None) -> None:
        """A request comes, at its arrival; time there must be past all earlier `wake`s.

        prompt: its token ids; made up without. Where prompts are made up the prefix cache must be off.
        """
        now = item.arrival
        if item.adapter is not None and item.adapter not in self.engine.store:
            self.engine.store.register(item.adapter, self._adapters.path(item.adapter))
        params = self._params.get(item.output_tokens)
        if params is None:
            params = SamplingParams(max_tokens=item.output_tokens, temperature=0.0, seed=0, ignore_eos=True)
            self._params[item.output_tokens] = params
        tokens = [0] * item.prompt_tokens if prompt is None else prompt
        request = Request(str(item.id), tokens, params, item.adapter, now)
        self._open[request.id] = (request, self.executor.stalled_seconds, math.nan)
        self._count(request, 1)
        self._inbox.append(request)
        if self._plan is None:
            self.wake = min(self.wake, max(now, self.clock.now))
        elif len(self._inbox) == 1 and self._plan.repeat > 1:
            self.executor.horizon = now
            self.wake = self.executor.end(self._plan)

    def advance(self, done: Callable[[Served], None]) -> None:
        """`wake` has come: end the step, take what came, begin the next. done: told of every request that ended."""
        engine, clock = self.engine, self.clock
        if self._plan is not None:
            self._read(engine.end_step(self._plan), done)
        clock.now = max(clock.now, self.wake)
        for request in self._inbox:
            try:
                engine.add_request(request)
            except InvalidRequest:
                self._fail(request.id)
        self._inbox.clear()
        self.executor.horizon = math.inf
        self._plan = plan = engine.begin_step()
        if plan is not None:
            self.wake = self.executor.end(plan)
            return
        self._read(engine.end_step(None), done)
        self.wake = clock.now if engine.has_work() else math.inf

    def _read(self, outputs: list[RequestOutput], done: Callable[[Served], None]) -> None:
        now, requests = self.clock.now, self._open
        for output in outputs:
            if output.error is not None:
                self._fail(output.request_id)
                continue
            request, stalled, first = requests[output.request_id]
            if first != first:  # NaN: no token yet
                first = now
                requests[output.request_id] = (request, stalled, now)
            if output.finish_reason is not None:
                del requests[output.request_id]
                self._count(request, -1)
                arrival = request.arrival_time
                done(
                    Served(
                        arrival, first - arrival, now - arrival, request.start_time - arrival,
                        self.executor.stalled_seconds - stalled, request.num_output_tokens, self.index,
                    )
                )  # fmt: skip

    def _fail(self, request_id: str) -> None:
        self._count(self._open.pop(request_id)[0], -1)
        self.num_failed += 1

    def _count(self, request: Request, by: int) -> None:
        rank = 0 if request.adapter_name is None else self._adapters.rank(request.adapter_name)
        self.num_requests += by
        left = self.ranks[rank] + by
        if left:
            self.ranks[rank] = left
        else:
            del self.ranks[rank]
