"""Token-budget continuous batching with chunked prefill.

A step takes from every running request the tokens whose KV is missing (one for a decoding request), then admits
waiting requests in queue order while tokens, seats and pages last. No tensors here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..graphs.buckets import DecodeBuckets
from ..memory.adapter_store import AdapterStore
from ..memory.pages import PageKind
from .admission import Admission, load_error
from .load_ahead import LoadAhead
from .load_policy import LoadPolicy
from .output_lengths import OutputLengths
from .overload import Overloaded
from .queue_policy import EvenShares, QueuePolicy
from .repeats import Repeats
from .request import Request, RequestState
from .request_memory import RequestMemory
from .running import Running, group_by_adapter
from .scheduler_limits import SchedulerLimits
from .step_planner import plan_step
from .tell import tell
from .types import FinishReason, RequestOutput, StepInfo, StepPlan, StepResult
from .victim_policy import NewestFirst, VictimPolicy
from .waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class Policies:
    """What may be decided otherwise than by default."""

    queue: QueuePolicy
    victim: VictimPolicy

    @classmethod
    def default(cls) -> Policies:
        return cls(EvenShares(), NewestFirst())


class Scheduler:
    """Owns the queues; what requests hold is given and taken by `RequestMemory`."""

    def __init__(
        self,
        limits: SchedulerLimits,
        store: AdapterStore,
        memory: RequestMemory,
        loads: LoadPolicy,
        buckets: DecodeBuckets,
        clock: Callable[[], float],
        policies: Policies | None = None,
    ) -> None:
        self._limits = limits
        self._store = store
        self._memory = memory
        self._buckets = buckets
        self._ahead = LoadAhead(limits, store, memory)
        self._clock = clock
        self._policies = policies or Policies.default()
        self._waiting = WaitingQueue()
        self._lengths = OutputLengths(limits.block_tokens)
        self._admission = Admission(
            limits, self._waiting, self._policies.queue, store, memory, loads, self._lengths, clock, self._fail
        )
        self._repeats = Repeats(limits, store, memory, self._ahead, clock)
        self._requests: dict[str, Request] = {}
        self._running = Running()
        self._failed: list[RequestOutput] = []
        self._loading: list[Request] = []  # run while their adapter's bytes are still coming
        self._ends: deque[float] = deque(maxlen=64)  # when the latest requests ended
        #: Those that lack a page for it, where all that every running request has to compute is its new token.
        self._short: list[Request] | None = None
        self._num_steps = 0
        self.last_step: StepInfo | None = None
        self.num_generated_tokens = 0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running_adapters(self) -> set[str]:
        """Names of adapters that running requests use."""
        return {request.adapter_name for request in self._running if request.adapter_name is not None}

    @property
    def waiting_adapters(self) -> set[str]:
        """Names of adapters that waiting requests will use."""
        return {request.adapter_name for request in self._waiting if request.adapter_name is not None}

    @property
    def num_cold_starts(self) -> int:
        """Requests whose adapter was not all there when they could begin."""
        return self._admission.num_cold_starts

    def has_work(self) -> bool:
        return bool(self._requests or self._failed)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def get(self, request_id: str) -> Request:
        """A request in progress; KeyError when it is not here (any more)."""
        return self._requests[request_id]

    def check_room(self, tenant: str) -> None:
        """Raise Overloaded when one more request of `tenant` is not to wait.

        A tenant that is known may fill only as much of the queue as it leaves to others, so that whoever comes anew
        finds room.
        """
        most, waiting = self._limits.max_waiting, len(self._waiting)
        if most is None or waiting < most // 2:
            return
        if waiting >= most:
            text = f"{waiting} generations wait, the queue holds {most}"
        elif tenant and (own := self._waiting.count(tenant)) >= most - waiting:
            text = f"{own} of your generations wait, and the queue has room for {most - waiting} of all clients"
        else:
            return
        raise Overloaded(f"{text}; try again later", self._seconds_to_drain(waiting / 4))

    def _seconds_to_drain(self, count: float) -> float:
        """How long, by the rate of late, until so many of the waiting requests have begun; from 1 to 60 seconds."""
        ends = self._ends
        if len(ends) < 2:
            return 1.0
        rate = (len(ends) - 1) / max(1e-9, self._clock() - ends[0])
        return min(60.0, max(1.0, count / rate))

    def add(self, request: Request) -> None:
        params, limits = request.params, self._limits
        request.max_length = min(request.num_prompt_tokens + params.max_tokens, limits.max_model_len)
        if not params.ignore_eos:
            request.end_ids = limits.eos_token_ids
        if params.stop_token_ids:
            request.end_ids = request.end_ids.union(params.stop_token_ids)
        self._requests[request.id] = request
        if request.tenant not in self._waiting.tenants:
            self._policies.queue.arrive(request.tenant)
        self._waiting.append(request)
        if request.adapter is not None:
            self._store.hold(request.adapter)
            if len(self._waiting) <= limits.lookahead:
                self._ahead.read(self._waiting)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its pages; False when it is not here (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, FinishReason.ABORT)
        return True

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None when nothing can run. Block tables of its rows already cover its tokens."""
        if self._loading or self._store.has_transfers:
            self._settle_loads()
        self._admission.settle()
        chosen, budget, preempted = self._decode_all() or self._schedule_running()
        admitted: dict[Request, int] = {}
        if self._waiting:
            self._fail_hopeless()
            if not preempted:
                admitted = self._admission.admit(self._running, budget)
                self._loading += [request for request in admitted if request.state is RequestState.LOADING]
            self._ahead.read(request for request in self._waiting if not self._is_awaited(request))
            if self._limits.prefetch:
                self._ahead.load(self._waiting)
        if chosen is None:
            groups, counts = self._running.by_adapter(), admitted
        else:
            counts = chosen | admitted
            groups = group_by_adapter(counts)
        if not groups:
            return None
        self._num_steps += 1
        plan = plan_step(self._num_steps, groups, counts, self._buckets)
        if chosen is None and not admitted and self._limits.max_repeat > 1 and not self._admission.awaits_growth:
            plan.repeat = self._repeats.count(plan, self._running, self._waiting)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take a step's result: advance, append drawn tokens, finish what is done."""
        info = self.last_step = StepInfo(plan.step_id, len(plan.rows), len(plan.adapters), plan.num_tokens)
        outputs: list[RequestOutput] = []
        if result.count > 1:
            self._catch_up(plan, result)
        requests, tokens = self._requests, result.tokens
        special = result.unready or result.errors or result.logprobs or result.prompt_logprobs
        num_drawn, num_ended = len(plan.rows), 0
        short: list[Request] = []
        for row in plan.rows:
            request = requests.get(row.request_id)
            if request is None or (special and not self._take_special(request, result, info, outputs)):
                num_drawn -= 1
                continue
            token_ids, samples = request.token_ids, row.samples
            computed = request.num_computed_tokens = len(token_ids) if samples else row.start + len(row.tokens)
            if computed < request.quiet_until:
                token = row.tokens[0] = tokens[row.request_id]
                row.start = computed
                token_ids.append(token)
                if computed >= request.room:
                    short.append(request)
                continue
            if request.caching:
                self._memory.remember(request)
            if not samples:
                num_drawn -= 1
                continue
            token = tokens[row.request_id]
            token_ids.append(token)
            reason = None
            if token in request.end_ids:
                reason = FinishReason.STOP
            elif computed + 1 >= request.max_length:
                reason = FinishReason.LENGTH
            if reason is not None or not request.is_quiet:
                outputs.append(tell(request, token, result.count, info, reason))
            if reason is not None:
                self._finish(request, reason)
                num_ended += 1
                continue
            if computed >= request.room:
                short.append(request)
            if request.row is not None:  # the one of the next step
                row.tokens, row.start = [token], computed
                if request.is_quiet and not (request.end_ids or request.caching):
                    request.quiet_until = request.max_length - 1
        self.num_generated_tokens += num_drawn * result.count
        self._short = short if num_drawn - num_ended == len(self._running) else None
        if result.unready:
            self._send_back_late(plan, result)
        return outputs

    def take_failed(self) -> list[RequestOutput]:
        """Outputs of requests that failed before they could run."""
        failed, self._failed = self._failed, []
        return failed

    def holders(self) -> Iterator[tuple[PageKind, list[int]]]:
        """The KV pages that requests hold, for `PagePool.check_integrity`."""
        for request in self._requests.values():
            if request.is_running:
                yield PageKind.KV, request.block_table.pages

    # -- choosing

    def _settle_loads(self) -> None:
        """End the requests whose adapter will never come; nothing of it stays."""
        for adapter, error in self._store.poll():
            for request in [request for request in self._running if request.adapter is adapter]:
                self._finish(request, FinishReason.ERROR)
                self._failed.append(RequestOutput(request.id, (), FinishReason.ERROR, error=load_error(request, error)))
            self._store.evict(adapter)
        still = []
        for request in self._loading:
            if request.state is RequestState.LOADING:
                if request.adapter.transfer is None:
                    request.state = RequestState.RUNNING
                else:
                    still.append(request)
        self._loading = still

    def _is_awaited(self, request: Request) -> bool:
        """True if a request's adapter was late and is still being read: it takes no place among the next to read."""
        return request.state is RequestState.LATE and self._store.is_requested(request.adapter)

    def _fail_hopeless(self) -> None:
        """End the requests that wait for an adapter that can't be had."""
        for request, error in self._ahead.hopeless(self._waiting):
            self._waiting.remove(request)
            self._fail(request, load_error(request, error))

    def _decode_all(self) -> tuple[None, int, bool] | None:
        """What `_schedule_running` would do, in most steps: every running request computes its last token, no more.

        Then nothing is listed but those that are admitted; None when it takes more than that.
        """
        budget = self._limits.max_num_batched_tokens - len(self._running)
        short, self._short = self._short, None  # until the step's result is known, should it ever be
        if short is None or budget < 0:
            return None
        short = [request for request in short if request.is_running]  # they may have been aborted
        return (None, budget, False) if not short or self._memory.grow_each(short) else None

    def _schedule_running(self) -> tuple[dict[Request, int], int, bool]:
        """Running requests with their token counts, the budget left, and whether any had to be preempted.

        Decoding requests come first, so that a long prompt's chunks never take their turn; then order of admission.
        """
        budget, running = self._limits.max_num_batched_tokens, self._running
        chosen: dict[Request, int] = {}
        preempted = False
        for request in sorted(running, key=lambda r: len(r.token_ids) - r.num_computed_tokens > 1):
            if budget <= 0:
                break
            if not request.is_running:  # preempted for one before it
                continue
            start = request.num_computed_tokens
            count = min(budget, len(request.token_ids) - start)
            while request.room < start + count and not self._memory.grow(request, start + count):
                if self._store.give_up_loads():
                    continue
                preempted = True
                victim = self._policies.victim.choose(running)
                self._preempt(victim)
                budget += chosen.pop(victim, 0)
                if victim is request:
                    break
            else:
                chosen[request] = count
                budget -= count
        return chosen, budget, preempted

    def _preempt(self, request: Request) -> None:
        """Give back a running request's pages and pin; it recomputes prompt and output when it runs again.

        Draws depend on (seed, position) only, so what it already gave stays true.
        """
        self._send_back(request, RequestState.SWAPPED)
        self.num_preemptions += 1

    def _send_back(self, request: Request, state: RequestState) -> None:
        """Let a running request give all that it holds and wait again."""
        self._running.remove(request)
        self._give_back(request)
        request.state = state
        request.num_computed_tokens = 0
        request.prompt_logprobs.clear()
        self._waiting.append_first(request)

    def _send_back_late(self, plan: StepPlan, result: StepResult) -> None:
        """Let the requests of adapters that did not come in time wait again, until all of it is there.

        They keep neither seats nor pages; the adapter gives its pages back, too, as soon as they are wanted.
        """
        slots = {row.slot for row in plan.rows if row.request_id in result.unready}
        late = {plan.adapters[slot] for slot in slots}
        for request in [request for request in reversed(self._running) if request.adapter in late]:
            self._send_back(request, RequestState.LATE)
        for adapter in late:
            self._admission.note_late(adapter)

    def _give_back(self, request: Request) -> None:
        """Take what a running request holds, and settle what its tenant has been charged."""
        self._policies.queue.refund(request, request.charged - (request.num_computed_tokens - request.began_at))
        self._memory.release(request)

    def _take_special(self, request: Request, result: StepResult, info: StepInfo, outputs: list[RequestOutput]) -> bool:
        """Take what few rows bring beside a token. False where a row was computed in vain, or failed."""
        if request.id in result.unready:
            return False
        if error := result.errors.get(request.id):
            self._finish(request, FinishReason.ERROR)
            outputs.append(RequestOutput(request.id, (), FinishReason.ERROR, error=error, step=info))
            return False
        request.prompt_logprobs += result.prompt_logprobs.get(request.id, ())
        if logprobs := result.logprobs.get(request.id):
            request.logprobs.append(logprobs)
        return True

    def _catch_up(self, plan: StepPlan, result: StepResult) -> None:
        """Bring the requests of a plan that ran more than once to the last of its steps."""
        steps, tokens = result.count - 1, result.tokens
        requests = [self._requests[row.request_id] for row in plan.rows]
        for request in requests:
            request.token_ids += [tokens[request.id]] * steps
        self._memory.catch_up(requests, steps)
        self._num_steps += steps

    # -- finishing

    def _fail(self, request: Request, error: str) -> None:
        """End a request that is in no queue."""
        request.finish_reason, request.state = FinishReason.ERROR, RequestState.DONE
        self._forget(request)
        self._failed.append(RequestOutput(request.id, (), FinishReason.ERROR, error=error))

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.is_running:
            self._running.remove(request)
            self._give_back(request)
            self._ends.append(self._clock())
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                self._lengths.end(request.num_output_tokens, reason is FinishReason.LENGTH)
        else:
            self._waiting.remove(request)
        request.finish_reason, request.state = reason, RequestState.DONE
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.id]
        if request.adapter is not None:
            self._store.let_go(request.adapter)
