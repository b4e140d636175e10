"""One replica in virtual time: its engine, the step that it is in, and what routers may know of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from ...core.config import EngineConfig
from ...core.costs.profile import Profile
from ...core.requests.sampling_params import InvalidRequest, SamplingParams
from ...core.requests.types import RequestOutput, StepPlan
from ...memory.adapters.store import AdapterStore
from ...server.cluster.router import ReplicaState
from ..workload.request import TraceRequest
from .adapters import SimAdapters, VirtualClock
from .engine import MODEL, simulated_engine
from .records import Served
from .repeats import RepeatedPlan
from .scheduler import SimRequest

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
        mix: bool = True,
        most_prompts: int | None = None,
        read_threads: int = 2,
        keep_idle: bool = True,
    ) -> None:
        """adapters: shared by all replicas; adapters that requests name are registered when they first come.

        keep_idle: adapters that nobody uses stay in the arena until their pages are wanted, instead of being dropped at
        once. The other arguments are those of `simulated_engine`.
        """
        self.index = index
        self.clock = VirtualClock()
        self.engine, self.executor = simulated_engine(
            profile, adapters, config or EngineConfig(model=MODEL, prefix_cache=False, max_waiting=None), self.clock,
            stream=stream, mix=mix, most_prompts=most_prompts, read_threads=read_threads,
        )  # fmt: skip
        self.wake = math.inf
        self.state = ReplicaState(self.engine.config.max_num_seqs, resident=_Resident(self.engine.store))
        self.num_failed = 0
        self.ended: list[tuple[str | None, int]] = []  # adapters, and their ranks, of requests that the last step ended
        self._adapters = adapters
        self._keep_idle = keep_idle
        self._block_tokens = self.executor.layout.block_tokens
        self._inbox: list[SimRequest] = []
        self._open: dict[str, _Open] = {}
        self._queue: dict[str, _Open] = {}  # those that have not begun
        self._plan: StepPlan | None = None

    def give(self, item: TraceRequest, prompt: list[int] | None = None, now: float | None = None) -> None:
        """A request comes, at its arrival or, after waiting at the router, at `now`; no `wake` may be before that.

        prompt: its token ids; made up without. Where prompts are made up the prefix cache must be off.
        """
        now = item.arrival if now is None else now
        if item.adapter is not None and item.adapter not in self.engine.store:
            self.engine.store.register(item.adapter, self._adapters.path(item.adapter))
        params = _params(item.output_tokens)
        tokens = [0] * item.prompt_tokens if prompt is None else prompt
        request = SimRequest(str(item.id), tokens, params, item.adapter, item.arrival)
        rank = 0 if item.adapter is None else self._adapters.rank(item.adapter)
        self._open[request.id] = self._queue[request.id] = _Open(request, rank, self.executor.stalled_seconds)
        self.state.add(rank)
        self.state.add_waiting(len(tokens), rank)
        self._inbox.append(request)
        if self._plan is None:
            self.wake = min(self.wake, max(now, self.clock.now))
        elif len(self._inbox) == 1 and isinstance(self._plan, RepeatedPlan):
            self.executor.horizon = now
            self.wake = self.executor.end(self._plan)

    def advance(self, done: Callable[[Served], None]) -> None:
        """`wake` has come: end the step, take what came, begin the next. done: told of every request that ended."""
        engine, clock = self.engine, self.clock
        self.ended.clear()
        if self._plan is not None:
            self._read(engine.end_step(self._plan), done)
        if clock.now < self.wake:
            clock.now = self.wake
        for request in self._inbox:
            try:
                engine.add_request(request)
            except InvalidRequest:
                self._fail(request.id)
        self._inbox.clear()
        self.executor.horizon = math.inf
        if not self._keep_idle:
            engine.reclaim_idle()
        self._plan = plan = engine.begin_step()
        self._tell(plan)
        if plan is not None:
            self.wake = self.executor.end(plan)
            return
        self._read(engine.end_step(None), done)
        self.wake = clock.now if engine.has_work() else math.inf

    def _tell(self, plan: StepPlan | None) -> None:
        """Bring `state` up to date. A plan that may be repeated began nothing."""
        state = self.state
        state.free_tokens = self.engine.num_available_pages * self._block_tokens
        if self._queue and not isinstance(plan, RepeatedPlan):
            self._queue = {key: each for key, each in self._queue.items() if each.request.start_time is None}
            state.set_waiting([(each.request.num_prompt_tokens, each.rank) for each in self._queue.values()])

    def _read(self, outputs: list[RequestOutput], done: Callable[[Served], None]) -> None:
        now, requests = self.clock.now, self._open
        for output in outputs:
            if output.error is not None:
                self._fail(output.request_id)
                continue
            each = requests[output.request_id]
            if each.first_token is None:
                each.first_token = now
            if output.finish_reason is not None:
                del requests[output.request_id]
                request, arrival = each.request, each.request.arrival_time
                self.state.remove(each.rank)
                self.ended.append((request.adapter_name, each.rank))
                done(
                    Served(
                        arrival, each.first_token - arrival, now - arrival, request.start_time - arrival,
                        self.executor.stalled_seconds - each.stalled, request.num_output_tokens, self.index,
                    )
                )  # fmt: skip

    def _fail(self, request_id: str) -> None:
        self.state.remove(self._open.pop(request_id).rank)
        self._queue.pop(request_id, None)
        self.num_failed += 1


class _Open:
    """A request that has come and not ended. stalled: the replica's stalled seconds when it came."""

    __slots__ = ("first_token", "rank", "request", "stalled")

    def __init__(self, request: SimRequest, rank: int, stalled: float) -> None:
        self.request = request
        self.rank = rank
        self.stalled = stalled
        self.first_token: float | None = None  # when it was drawn


@lru_cache(maxsize=1 << 14)  # replicas share them: their number doesn't grow with the run
def _params(output_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=output_tokens, temperature=0.0, seed=0, ignore_eos=True)


class _Resident:
    """The names of the adapters in the arena."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store

    def __contains__(self, adapter: object) -> bool:
        store = self._store
        return adapter in store and bool(store.get(adapter).pages)
