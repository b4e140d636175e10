"""One replica in virtual time: its engine, its current step, and the state that routers may see.

Tests: tests/perf/simulate/test_cluster.py
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

from ...core.config import EngineConfig
from ...core.costs.profile import Profile
from ...core.requests.request_params import InvalidRequest, RequestParams
from ...core.requests.types import RequestOutput, StepPlan
from ...memory.adapters.adapter import Tier
from ...memory.adapters.store import AdapterStore
from ...memory.pages.pool import OutOfPages
from ...server.cluster.router import ReplicaState
from ..workload.request import TraceRequest
from .adapters import SimAdapters
from .engine import MODEL, simulated_engine
from .link import Urgency, VirtualClock
from .records import Served
from .scheduler import TOKEN, RepeatedPlan, SimRequest

FIRST_TOKEN_ID = 16
"""Ids below are special in most vocabularies."""

_BEFORE = 1e5  # seconds that a replica has existed when it begins to serve


class Phase(StrEnum):
    """The phase of a replica's existence."""

    BOOTING = "booting"
    SERVING = "serving"
    DRAINING = "draining"  # takes no more requests, and finishes its own
    GONE = "gone"


class Progress(NamedTuple):
    """Progress of a request elsewhere: its tokens so far, and the times of the first of them and of its admission."""

    tokens: int = 0
    first_token: float | None = None
    start: float | None = None
    cold: float = 0.0
    """Seconds of its time there in which steps waited for adapters."""


NOTHING = Progress()


class Left(NamedTuple):
    """A request that a replica has given up, to continue elsewhere."""

    request: TraceRequest
    progress: Progress
    to: int | None = None
    """The target replica; None: it is routed again."""
    seconds: float = 0.0
    """Seconds until it arrives there."""


class Held(NamedTuple):
    """A request that has come and not ended."""

    request: TraceRequest
    num_tokens: int
    """Tokens of the prompt and of the completion so far."""
    has_begun: bool
    """It has KV."""


class Replica:
    """Takes requests at any time and ends its steps at their times.

    As in the server, requests and orders of the cluster that come during a step are seen when the step ends. Between
    `wake`s nothing changes here but the lengths of completions, so a replica costs nothing while others have events.
    """

    def __init__(
        self,
        profile: Profile,
        adapters: SimAdapters,
        config: EngineConfig | None = None,
        *,
        index: int = 0,
        keep_idle: bool = True,
        tells_tenants: bool = True,
        told_rank: int | None = None,
        now: float = 0.0,
        **options: Any,
    ) -> None:
        """adapters: shared by all replicas; adapters that requests name are registered when they first come.

        keep_idle: adapters that no request uses stay resident until their pages are needed, instead of being dropped at
        once. tells_tenants: the engine knows each request's tenant. told_rank: rank of every adapter in reports to
        routers, instead of its own. now: when it begins to serve. options: `simulated_engine`'s.
        """
        self.index = index
        self.phase = Phase.SERVING
        self.clock = VirtualClock(now - _BEFORE)
        self.engine, self.executor = simulated_engine(
            profile,
            adapters,
            config or EngineConfig(model=MODEL, prefix_cache=False, max_waiting=None),
            self.clock,
            **options,
        )
        self.clock.now = now
        self.wake = math.inf
        store, self._registered = self.engine.store, set[str]()
        self.state = ReplicaState(
            self.engine.config.max_num_seqs,
            resident=_Adapters(store, _ARENA, self._registered),
            on_host=_Adapters(store, _HOST, self._registered),
            name=f"replica-{index}",
        )
        self.failures: list[float] = []  # arrivals of requests that were refused or ended with an error
        self.ended: list[TraceRequest] = []  # by the last step, failures included
        self.left: list[Left] = []  # requests that the last step's end gave up
        self._reads = self.executor.adapters.reads
        self._adapters = adapters
        self._keep_idle = keep_idle
        self._tells_tenants = tells_tenants
        self._told_rank = told_rank
        self.block_tokens = self.executor.layout.block_tokens
        self._inbox: list[SimRequest | Callable[[], object]] = []
        self._open: dict[str, _Open] = {}
        self._queue: dict[str, _Open] = {}  # requests that have not begun
        self._plan: StepPlan | None = None
        self._kv_tokens = self._free_tokens = 0
        self._growth = 0.0  # KV tokens per second, while a plan repeats
        self._tell(None)

    def give(self, item: TraceRequest, now: float | None = None, progress: Progress = NOTHING) -> None:
        """A request comes, at its arrival or, after waiting at the router or running elsewhere, at `now`; no `wake` may
        be before that.
        """
        now = item.arrival if now is None else now
        if item.adapter is not None:
            self._register(item.adapter)
        params = _params(item.output_tokens)
        has_cache, vocab_size = self.engine.config.prefix_cache, self.executor.model.vocab_size
        tokens = prompt_of(item, vocab_size) if has_cache else [0] * item.prompt_tokens
        request = SimRequest(str(item.id), tokens, params, item.adapter, item.arrival)
        request.tenant = (item.tenant or "") if self._tells_tenants else ""
        request.token_ids += [TOKEN] * progress.tokens
        rank = 0 if item.adapter is None else self._told_rank or self._adapters.rank(item.adapter)
        self._open[request.id] = self._queue[request.id] = _Open(
            item, request, rank=rank, stalled=self._stalled(), before=progress, first_token=progress.first_token
        )
        self.state.add(rank)
        self.state.add_waiting(request.num_tokens, rank)
        self._send(request, now)

    def order(self, action: Callable[[], object], now: float) -> None:
        """Have a function called between two steps, when the current one ends."""
        self._send(action, now)

    def _send(self, message: SimRequest | Callable[[], object], now: float) -> None:
        self._inbox.append(message)
        if self._plan is None:
            self.wake = min(self.wake, max(now, self.clock.now))
        elif len(self._inbox) == 1 and isinstance(self._plan, RepeatedPlan):
            self.executor.horizon = now
            self.wake = self.executor.end(self._plan)

    def advance(self, done: Callable[[Served], None]) -> None:
        """`wake` has come: end the step, take new requests, begin the next. done: called with every request that
        ended.
        """
        engine, clock = self.engine, self.clock
        self.ended.clear()
        self.left.clear()
        if self._plan is not None:
            self.executor.held_until = self.wake
            self._read(engine.end_step(self._plan), done)
            self._plan = None
        if clock.now < self.wake:
            clock.now = self.wake
        for message in self._inbox:
            if not isinstance(message, SimRequest):
                message()
                continue
            try:
                if message.id in self._open:  # it may have been taken out again
                    engine.add_request(message)
            except InvalidRequest:
                self._fail(message.id)
        self._inbox.clear()
        self.executor.horizon = math.inf
        if not self._keep_idle:
            engine.reclaimer.reclaim_all()
        self._plan = plan = engine.begin_step()
        self._tell(plan)
        if plan is not None:
            self.wake = self.executor.end(plan)
            return
        self._read(engine.end_step(None), done)
        self.wake = clock.now if engine.has_work() else math.inf

    def look(self, now: float) -> ReplicaState:
        """Return `state`, after updating the parts that change with time alone."""
        state = self.state
        grown = int(self._growth * (now - self.clock.now)) if self._growth else 0
        state.kv_tokens = self._kv_tokens + grown
        state.free_tokens = self._free_tokens - grown
        state.link_seconds = max(0.0, self.executor.adapters.link.free_at - now)
        state.disk_seconds = max(0.0, self._reads.free_at - now)
        return state

    # -- orders of the cluster, between two steps

    def held(self) -> list[Held]:
        """Return a planner's view of the requests that have come and not ended."""
        return [
            Held(each.item, each.request.num_tokens, each.request.start_time is not None)
            for each in self._open.values()
        ]

    def take_out(self, request_id: str, to: int | None = None, seconds: float = 0.0) -> None:
        """Give a request up; it continues elsewhere, by recomputing its KV. Nothing happens if it has ended."""
        each = self._open.pop(request_id, None)
        if each is None:
            return
        self._queue.pop(request_id, None)
        self.engine.abort(request_id)
        self.state.remove(each.rank)
        self.left.append(Left(each.item, each.progress_at(self._stalled()), to, seconds))

    def preload(self, adapter: str) -> bool:
        """Read an adapter and load it over the link, after urgent transfers; False if it finds no free pages."""
        store = self.engine.store
        self._register(adapter)
        found = store.get(adapter)
        if found.pages:
            return True
        backend = self.executor.adapters
        backend.urgency = Urgency.AHEAD
        try:
            store.prefetch(found)
        except OutOfPages:
            return False
        finally:
            backend.urgency = Urgency.LOAD
        return True

    def place(self, adapters: list[str]) -> list[str]:
        """Make adapters resident before the first request comes; return the adapters that find no room.

        It takes no time: it happens long before the replica begins to serve.
        """
        now, self.clock.now = self.clock.now, self.clock.now - _BEFORE
        left = [adapter for adapter in adapters if not self.preload(adapter)]
        self.clock.now = self.executor.adapters.link.free_at
        self.engine.store.poll()
        self.clock.now = now
        self._tell(None)
        return left

    def _register(self, adapter: str) -> None:
        if adapter not in self._registered:
            self.engine.store.register(adapter, self._adapters.path(adapter))
            self._registered.add(adapter)

    def _stalled(self) -> float:
        return self.executor.stalled_seconds

    def _tell(self, plan: StepPlan | None) -> None:
        """Bring `state` up to date. A plan that may be repeated began nothing."""
        state = self.state
        self._free_tokens = state.free_tokens = self.engine.num_available_pages * self.block_tokens
        self._growth = 0.0
        if plan is None:
            self._kv_tokens = state.longest_tokens = 0
        else:
            starts = [row.start for row in plan.sequences]
            self._kv_tokens, state.longest_tokens = plan.num_tokens + sum(starts), max(starts)
            if isinstance(plan, RepeatedPlan):
                self._growth = len(plan.sequences) / self.executor.price(plan).first
        state.kv_tokens = self._kv_tokens
        if self._queue and not isinstance(plan, RepeatedPlan):
            self._queue = {key: each for key, each in self._queue.items() if each.request.start_time is None}
            state.set_waiting([(each.request.num_tokens, each.rank) for each in self._queue.values()])

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
                item, request = each.item, each.request
                self.state.remove(each.rank)
                self.ended.append(item)
                found = each.progress_at(self.executor.stalled_seconds)
                started = now if found.start is None else found.start
                done(
                    Served(
                        item.arrival,
                        each.first_token - item.arrival,
                        e2e=now - item.arrival,
                        queue=started - item.arrival,
                        cold=found.cold,
                        tokens=request.num_output_tokens,
                        replica=self.index,
                        tenant=item.tenant,
                    )
                )

    def _fail(self, request_id: str) -> None:
        each = self._open.pop(request_id)
        self.state.remove(each.rank)
        self._queue.pop(request_id, None)
        self.ended.append(each.item)
        self.failures.append(each.item.arrival)


@dataclass(slots=True)
class _Open:
    """A request that has come and not ended."""

    item: TraceRequest
    request: SimRequest
    rank: int
    stalled: float
    """The replica's stalled seconds when it came."""
    before: Progress
    first_token: float | None
    """When its first token came."""

    def progress_at(self, stalled: float) -> Progress:
        """stalled: the replica's stalled seconds now."""
        before = self.before
        start = self.request.start_time if before.start is None else before.start
        cold = before.cold + stalled - self.stalled
        return Progress(self.request.num_output_tokens, self.first_token, start, cold)


def prompt_of(request: TraceRequest, vocab_size: int) -> list[int]:
    """Random token ids; no two requests share a beginning worth caching."""
    source = random.Random(request.id)
    return [source.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(request.prompt_tokens)]


@lru_cache(maxsize=1 << 14)  # replicas share them: their number doesn't grow with the run
def _params(output_tokens: int) -> RequestParams:
    return RequestParams(max_tokens=output_tokens, temperature=0.0, seed=0, ignore_eos=True)


_ARENA = frozenset({Tier.DEVICE})
_HOST = frozenset({Tier.DEVICE, Tier.HOST})


class _Adapters:
    """The names of the adapters in some tiers, or being loaded."""

    def __init__(self, store: AdapterStore, tiers: frozenset[Tier], registered: Container[object]) -> None:
        """registered: names of the adapters that the store knows; most routers ask for others, often."""
        self._store = store
        self._tiers = tiers
        self._registered = registered

    def __contains__(self, adapter: object) -> bool:
        store = self._store
        if adapter not in self._registered:
            return False
        found = store.get(str(adapter))
        return bool(found.pages) or store.tier(found) in self._tiers
