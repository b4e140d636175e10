"""Token-budget continuous batching with chunked prefill.

A step computes the tokens of every running request that have no KV yet (one of a decoding request), then admits
waiting requests in queue order while tokens, slots and pages last. No tensors here.

Tests: tests/core/scheduling/test_scheduling.py, tests/core/test_engine.py, tests/core/test_async_steps.py,
tests/simulation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, islice

from ...graphs.runner import DecodeBuckets
from ...memory.adapters.adapter import Adapter
from ...memory.adapters.store import AdapterStore
from ...memory.disk.tier import DiskTier
from ...memory.pages.pool import PageKind
from ..config import EngineConfig
from ..engine_stats import STEP_SIZES
from ..requests.draft_length import most_logits
from ..requests.request import Request, RequestState
from ..requests.request_params import InvalidRequest
from ..requests.types import FinishReason, RequestOutput, ScheduledSequence, StepInfo, StepPlan, StepResult
from ..speculation.speculation import Speculation
from .admission import Admission, is_loading
from .allocator import Allocator, is_eligible
from .lifecycle import Lifecycle, load_error
from .load_ahead import LoadAhead, LoadPolicy
from .queues import (
    Running,
    WaitingQueue,
    as_if_finished,
    group_by_adapter,
    num_missing,
    plan_step,
    split_prompts,
)
from .request_memory import RequestMemory
from .service import QueuePolicy, Service, TokenCounters
from .step_builder import StepBuilder
from .step_target import NO_PROMPTS, PromptWork, StepPrompts, StepTarget
from .step_time import ChoiceBudget, GrammarBudget


class Scheduler:
    """Plans steps of the running and the waiting requests, and applies their results.

    Its `lifecycle` adds and ends requests; `RequestMemory` allocates and frees their memory. A subclass, such as the
    simulator's, may override the public methods, and name its own `admission_type` and `lifecycle_type`.
    """

    admission_type: type[Admission] = Admission
    lifecycle_type: type[Lifecycle] = Lifecycle

    def __init__(
        self,
        limits: EngineConfig,
        store: AdapterStore,
        memory: RequestMemory,
        loads: LoadPolicy,
        clock: Callable[[], float],
        queue: QueuePolicy | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self._limits = limits
        self._max_tokens = limits.max_num_batched_tokens  # read in every step; a pydantic attribute is slow
        self._store = store
        self._memory = memory
        self._buckets = DecodeBuckets(limits.max_num_seqs)
        self._most_logits = most_logits(limits)
        self._load_ahead = LoadAhead(limits, store, memory)
        self.waiting = WaitingQueue()
        self.running = Running()
        policy = queue or TokenCounters(limits.weights)
        self._service = Service(limits, self.running, self.waiting, policy, lambda: (clock(), self.num_steps))
        self.lifecycle = self.lifecycle_type(
            limits=limits,
            waiting=self.waiting,
            running=self.running,
            service=self._service,
            store=store,
            memory=memory,
            clock=clock,
        )
        self._requests = self.lifecycle.requests
        self._allocator = Allocator(limits, self._service, self.running, self.waiting, memory, loads.costs)
        self._admission = self.admission_type(
            limits=limits,
            waiting=self.waiting,
            store=store,
            memory=memory,
            loads=loads,
            lifecycle=self.lifecycle,
            allocator=self._allocator,
            clock=clock,
        )
        self._clock = clock
        self._choices = ChoiceBudget(limits.max_num_seqs, clock)
        target = limits.target_step_ms if limits.chunked_prefill else 0.0
        self.target = StepTarget(None if target == "auto" else target / 1e3) if target else None
        """None: nothing bounds a step's prompts but `max_num_batched_tokens`."""
        self._plain: list[ScheduledSequence] = []  # of the last step without prompts
        self.grammars = GrammarBudget(clock)
        self._speculation = speculation
        self._loading: list[Request] = []  # running while their adapter is still being loaded
        self.eligible_adapters: Collection[Adapter | None] | None = None
        """Adapters (None: the base model) whose requests may run; other requests keep their pages. None: all.

        `schedule` resets it to None if none of their requests can run.
        """
        self.num_steps = 0
        self.step_sizes = [0] * (len(STEP_SIZES) + 1)
        self.num_step_tokens = 0
        self.last_step: StepInfo | None = None
        self.num_generated_tokens = 0
        self.num_proposed_tokens = self.num_accepted_tokens = 0
        """Numbers of verified and of accepted proposed tokens."""

    def has_work(self) -> bool:
        """True while a request is in progress, or while KV or an adapter is being copied, even for an ended request."""
        return any(
            (
                self._requests,
                self.lifecycle.ended_outside_steps,
                self._memory.swapped.copies,
                self._store.loads.under_way,
            )
        )

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def get(self, request_id: str) -> Request:
        """Return a request in progress; KeyError when it is unknown or done."""
        return self._requests[request_id]

    def check_room(self, tenant: str, count: int = 1) -> None:
        """Raise Overloaded when the queue has no room for `count` more requests of `tenant`."""
        self.lifecycle.room.check(self.waiting, tenant, count)

    def check_new(self, request_id: str) -> None:
        """Raise InvalidRequest if a request with this id is in progress."""
        if request_id in self._requests:
            raise InvalidRequest("request_id", f"request id {request_id!r} is in use; choose another")

    def add(self, request: Request) -> None:
        """Queue a validated request. One that has run on another engine goes first."""
        self.lifecycle.add(request)
        self._memory.read_ahead(request)
        adapter = request.adapter
        if adapter is not None and not adapter.pages and len(self.waiting) <= self._limits.lookahead:
            self._load_ahead.read(self._admission.read_order())

    def abort(self, request_id: str) -> bool:
        """End a request and free its pages; False when it is unknown or done."""
        request = self._requests.get(request_id)
        if request is not None:
            self.lifecycle.finish(request, FinishReason.ABORT)
        return request is not None

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when nothing can run. The block tables already cover the new tokens."""
        self._finish_ended()
        plan = self._plan_next(self.num_steps + 1)
        if plan is None and self.eligible_adapters is not None:
            self.eligible_adapters = None
            plan = self._plan_next(self.num_steps + 1)
        return plan

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan`, which still runs, before its tokens are known.

        It schedules as if `plan` had finished. A sequence that hits EOS is stale, and `update` discards it; one that
        reaches `max_length` is left out. `rollback` discards the new plan; requests that it admitted keep running.

        Returns None if the step depends on more than the tokens, if results of `plan` must be read first, or if a
        request would be preempted for the step.
        """
        memory = self._memory
        if self.eligible_adapters is not None or self._loading or memory.arriving or memory.swapped.copies:
            return None
        self._finish_ended()
        if self._all_continue(plan):
            ahead = self._build(plan.step_id + 1, self.running, all_decode=True, is_async=True)
        elif plan.bucket is None and any(sequence.wants_states for sequence in plan.sequences):
            return None  # they are read from buffers that the next step overwrites
        else:
            with as_if_finished(plan, self._find) as sampled:
                ends = [each for each in sampled if len(each.token_ids) >= each.max_length]
                if ends and self.waiting:
                    return None  # a waiting request should not wait for one more step
                ahead = self._plan_next(plan.step_id + 1, ends, is_async=True)
        if ahead is not None:
            ahead.continue_from(plan)
        return ahead

    def _all_continue(self, plan: StepPlan) -> bool:
        """True if all running requests decode in `plan`, which still runs, and in the step after it.

        They have pages for that step now. Planning then depends on nothing that `plan` changes.
        """
        running, last = self.running, self.running.plan
        if running.choice_groups or self.grammars.heavy or last is None or last.sequences is not plan.sequences:
            return False
        ends = [request for request in running if request.num_computed_tokens + 2 >= request.max_length]
        return not ends and self.grow_decodes(1)

    def _plan_next(self, step_id: int, ending: Collection[Request] = (), *, is_async: bool = False) -> StepPlan | None:
        """Plan a step of the running requests, except `ending`, and of waiting ones. is_async, None: see `_build`."""
        candidates = self._candidates(ending, is_async=is_async)
        all_decode = candidates is self.running and self.grow_decodes()
        return self._build(step_id, candidates, all_decode=all_decode, is_async=is_async)

    def _build(
        self, step_id: int, candidates: Sequence[Request], *, all_decode: bool, is_async: bool
    ) -> StepPlan | None:
        """Plan a step of running requests, the `candidates`, and of waiting ones; None if nothing can run.

        is_async: the step before it still runs. Then None also if a request would be preempted, or wait for its
        adapter.
        """
        if all_decode and not self.waiting:
            return self._plan(step_id, {}, True)
        now = self._clock()
        builder = StepBuilder(
            limits=self._limits,
            lifecycle=self.lifecycle,
            allocator=self._allocator,
            running=self.running,
            candidates=candidates,
            now=now,
            eligible_adapters=self.eligible_adapters,
            all_decode=all_decode,
            is_async=is_async,
            work=self._prompt_work(candidates, now, all_decode=all_decode),
        )
        if not all_decode:
            self.schedule_running(builder, candidates)
        if self.waiting:
            self._admit_waiting(builder)
        plan = None
        if not (is_async and (builder.was_short or self._loading)):
            plan = self._plan(step_id, builder.counts, builder.all_decode)
        if plan is None:
            self._choices.rollback()
        return plan

    def note_begin(self, plan: StepPlan, now: float) -> None:
        """Note that a step begins. While all requests are one tenant's, only the times of decode steps are kept."""
        target = self.target
        if target is None:
            return
        is_plain = self._is_plain(plan)
        if (is_plain and target.has_plain_last and not target.debts) or self._has_one_tenant():
            if is_plain and target.has_plain_last:
                target.decode_seconds.append(now - target.began)
            target.has_plain_last, target.began, target.last = is_plain, now, None
        else:
            target.begin(NO_PROMPTS if is_plain else StepPrompts.of(plan, self._requests), now)

    def _is_plain(self, plan: StepPlan) -> bool:
        """True if no sequence of a step has a prompt. Most steps have the very sequences of the one before."""
        if plan.sequences is not self._plain:
            is_plain = plan.bucket is not None and not any(sequence.is_prompt for sequence in plan.sequences)
            self._plain = plan.sequences if is_plain else []  # their requests may have ended, and hold images
        return plan.sequences is self._plain

    def _has_one_tenant(self) -> bool:
        """True if all requests are one tenant's, and nothing is known of others': then no step needs a target."""
        target, running, waiting = self.target, self.running.tenants, self.waiting.tenants
        if target is None or target.debts or target.recent or len(running) > 1 or len(waiting) > 1:
            return False
        return not running or not waiting or next(iter(running)) in waiting

    def note_pause(self) -> None:
        """Note that no step follows the last one at once."""
        if self.target is not None:
            self.target.has_plain_last, self.target.last = False, None

    def _prompt_work(self, candidates: Sequence[Request], now: float, *, all_decode: bool) -> PromptWork | None:
        """Return what the prompts of a step of these running requests may take of its time; None: anything."""
        if self.target is None or self._has_one_tenant():
            return None
        if all_decode:  # then nothing is to be done for each request
            return self.target.work_beside(self.running.tenants, (), self.waiting.tenants, now)
        prompts, decoding = ({each.fairness_key for each in part} for part in split_prompts(candidates))
        return self.target.work_beside(decoding, prompts, self.waiting.tenants, now)

    def schedule_running(self, builder: StepBuilder, candidates: Sequence[Request]) -> None:
        """Schedule running requests; a subclass may leave some out."""
        builder.schedule_running(candidates, self.waiting.tenants)

    def _plan(self, step_id: int, counts: dict[Request, int], all_decode: bool) -> StepPlan | None:
        """Return the plan of a step of `counts` and, if `all_decode`, of all other running requests; None if empty."""
        running = self.running
        drafts = self._drafts(counts, all_decode=all_decode) if self._speculation is not None else {}
        last = running.plan if all_decode and not drafts else None
        if last is not None:
            return StepPlan(step_id, last.sequences, last.adapters, last.bucket)
        groups = running.by_adapter() if all_decode else group_by_adapter(counts)
        if not groups:
            return None
        plan = plan_step(step_id, groups, counts, self._buckets, drafts)
        running.plan = plan if all_decode and not counts and not drafts else None
        if (
            running.choice_groups
            and plan.bucket is None
            and any(each.sequence is None and not each.choice_group for each in counts)
        ):
            self._choices.ignore()
        return plan

    def _drafts(self, counts: dict[Request, int], *, all_decode: bool) -> dict[Request, list[int]]:
        """Return proposed tokens for requests of a step that is otherwise planned; see `_plan`."""
        assert self._speculation is not None
        requests = self.running if all_decode else [*counts]
        num_tokens = sum(counts.values()) + len(requests) - len(counts)
        left = min(self._max_tokens - num_tokens, self._most_logits - len(requests))  # each has logits for one token
        return self._speculation.drafts(requests, left, self._memory.grow)

    def _find(self, sequence: ScheduledSequence) -> Request | None:
        """Return the request of a sequence; None if it has ended, or was preempted, since the plan was made."""
        request = self._requests.get(sequence.request_id)
        if request is None or request.sequence is sequence:
            return request
        return request if request.is_running and request.block_table.pages is sequence.pages else None

    def rollback(self) -> None:
        """Discard the plan of `plan_ahead`. It has advanced the sequences, hence the next plan makes new ones."""
        self._choices.rollback()
        self.running.plan = None
        for request in self.running:
            request.sequence = None

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Apply a step's result: append sampled tokens, end requests that are done, return the new outputs.

        Stale sequences of an async step are discarded: their requests have ended or were preempted since it was
        planned.
        """
        info = self.last_step = StepInfo(plan.step_id, len(plan.sequences), len(plan.adapters), plan.num_tokens)
        self._count_steps(plan.num_tokens)
        if self._allocator.max_adapters is not None:
            self._allocator.note_step(self._adapters_of(plan), self._clock())
        requests, lifecycle, outputs = self._requests, self.lifecycle, list[RequestOutput]()
        has_extras = result.unready or result.errors or result.prompt_logprobs or result.pooled
        is_async = plan.sources is not None
        for sequence in plan.sequences:
            request = requests.get(sequence.request_id)
            if request is None or (is_async and request.sequence is not sequence and self._find(sequence) is None):
                continue
            if has_extras and not lifecycle.note_extras(request, result, info, outputs):
                continue
            if sequence.drafts:
                outputs += self._advance_drafted(request, sequence, result, info)
            elif (output := self._advance(request, sequence, result, info, len(sequence.tokens))) is not None:
                outputs.append(output)
        self.num_generated_tokens += sum([len(output.token_ids) for output in outputs])
        if result.unready:
            self._send_back_late(result)
        self._note_end(result)
        return outputs

    def _adapters_of(self, plan: StepPlan) -> dict[Adapter, None]:
        """The adapters of a step's requests, also of those whose tokens come before their adapter begins."""
        begun = (self._requests.get(each.request_id) for each in plan.sequences if each.kv_len <= each.lora_from)
        early = (request.adapter for request in begun if request is not None and request.adapter is not None)
        return dict.fromkeys(plan.adapters) | dict.fromkeys(early)

    def _note_end(self, result: StepResult) -> None:
        """Note what grammars have taken in a step, and whether no other step follows it at once."""
        if (self._admission.leaders or self.target is not None) and not self.has_work():
            if self._admission.leaders:
                self._admission.release_held_back()  # nothing keeps an ended request, nor its images
            self.note_pause()
        if not (result.grammar_seconds or self.grammars.heavy):
            return
        spent = result.grammar_seconds.items()
        self.grammars.note({self._requests[name]: seconds for name, seconds in spent if name in self._requests})

    def count_by_adapter(self, most: int) -> tuple[dict[Adapter | None, int], dict[Adapter | None, int]]:
        """Count running and waiting requests by adapter (None: the base model): all of them, and the first `most`.

        Adapters with a request among the first `most` come first, in the order of their first requests. The time is
        proportional to `most` and the number of adapters, however many requests wait.
        """
        running, waiting = self.running.count_by_adapter(), self.waiting.num_of
        first = Counter([request.adapter for request in islice(chain(self.running, self.waiting), most)])
        requests = {
            adapter: running.get(adapter, 0) + waiting.get(adapter, 0)
            for adapter in dict.fromkeys(chain(first, running, waiting))
        }
        return requests, first

    def pop_failed(self) -> list[RequestOutput]:
        """Return the outputs of requests that failed before they could run, once."""
        failed, self.lifecycle.ended_outside_steps = self.lifecycle.ended_outside_steps, []
        return failed

    def holders(self) -> Iterator[tuple[PageKind, list[int]]]:
        """Yield the KV pages that requests hold, for `PagePool.check_integrity`."""
        for request in self._requests.values():
            if request.is_running:
                yield PageKind.KV, request.block_table.held

    def reset_running(self) -> None:
        """Preempt every running request."""
        for request in reversed(list(self.running)):
            self.lifecycle.preempt(request)

    def stop_caching(self) -> None:
        """Keep the KV that running requests have computed so far out of the prefix cache."""
        for request in self.running:
            request.caching = False

    def finish_copies(self) -> None:
        """Apply the copies and loads that have ended, for a driver that runs no steps."""
        self._finish_ended()

    # -- choosing

    def _finish_ended(self) -> None:
        """Apply the copies, loads and shared prefills that have ended since the last step."""
        if self._memory.swapped.copies:
            for request in self._memory.finish_copies():  # their KV is lost and must be recomputed
                self.lifecycle.send_back(request, RequestState.SWAPPED)
        if self._loading or self._store.loads.under_way:
            self._finish_loads()
        if (host := self._memory.host) is not None and host.ahead is not None:
            host.ahead.advance()
        if self.disk is not None and self.disk.is_busy:
            self.disk.advance()
        if self.waiting or self._admission.late or self._admission.leaders:
            self._admission.release_held_back()

    @property
    def disk(self) -> DiskTier | None:
        """Cached prefixes in files; None if there are none."""
        return self._memory.disk

    def _finish_loads(self) -> None:
        """End requests of adapters that failed to load; mark requests of adapters now complete as running."""
        for adapter, error in self._store.poll():
            for request in [request for request in self.running if request.adapter is adapter]:
                self.lifecycle.end(request, *load_error(request, error))
            if adapter.pages:  # else it was replaced, and evicted with its last request
                self._store.evict(adapter)
        loading = [request for request in self._loading if request.state is RequestState.LOADING]
        self._loading = [request for request in loading if is_loading(request)]
        for request in loading:
            request.state = RequestState.LOADING if is_loading(request) else RequestState.RUNNING

    def _candidates(self, ending: Collection[Request] = (), *, is_async: bool = False) -> list[Request]:
        """Return the running requests that may have a sequence in the next step: `running` itself if all of them may.

        It leaves out requests whose KV is being restored, requests of adapters that are not eligible or have no turn,
        prompts of tenants that owe time, and `ending`: the requests that end in the step that still runs (is_async).
        """
        running, eligible = self.running, self.eligible_adapters
        sharing: list[Request] = running
        if running.choice_groups:
            sharing = self._choices.choose(running, self.waiting, is_async=is_async) or running
        else:
            self._choices.pending.clear()
        if eligible is not None or self._memory.arriving or ending:
            sharing = [each for each in sharing if is_eligible(each, eligible) and each not in ending]
        sharing = self._within_budgets(sharing)
        if len(sharing) <= self._limits.max_num_seqs:
            return sharing
        if sharing is not running:
            return self._service.choose(sharing)
        if running.chosen is None:
            running.chosen = self._service.choose(running)
        return running.chosen

    def _within_budgets(self, requests: list[Request]) -> list[Request]:
        """Return the requests that may be in the next step by the budgets of grammars, of prompts and of adapters."""
        if self.grammars.heavy:
            requests = self.grammars.choose(requests) or requests
        if self.target is not None and self.target.debts:
            requests = self.target.without_held(requests)
        if self._allocator.max_adapters is not None:
            requests = self._allocator.with_index(requests, self._clock())
        return requests

    def grow_decodes(self, ahead: int = 0) -> bool:
        """Fast path: allocate pages so that every running request can decode one token; True if that is done.

        False, and nothing is done, if any must prefill, or if tokens or pages run short. ahead: number of unfinished
        steps before it.
        """
        running = self.running
        if len(running) > self._max_tokens or self._memory.arriving:
            return False
        if running.plan is None and not all(num_missing(each) == 1 for each in running if each.sequence is None):
            return False
        short = [request for request in running if request.room <= request.num_computed_tokens + ahead]
        return not short or self._memory.grow_each(short)

    def _admit_waiting(self, builder: StepBuilder) -> None:
        """Admit waiting requests and prefetch adapters for the queue."""
        lifecycle, swapped = self.lifecycle, self._memory.swapped
        if lacks_adapters := self.waiting.has_absent():
            for request, error in self._load_ahead.hopeless(self.waiting):
                lifecycle.end(request, *load_error(request, error))
        before = lifecycle.num_preemptions
        if not builder.was_short and not (swapped.copies and swapped.frees_pages):  # else pages are free after a copy
            builder.begin_admission()
            self._admission.admit(builder)
            self._allocator.end()
            self._loading += [request for request in builder.admitted if request.state is RequestState.LOADING]
        if lacks_adapters:
            self._load_ahead.read(self._admission.read_order())
            self._load_ahead.load(self.waiting)
        is_over = builder.num_sequences > self._limits.max_num_seqs or lifecycle.num_preemptions > before
        has_restoring = builder.all_decode and self._memory.arriving  # admitted just now, and in no step yet
        if is_over or builder.descheduled or has_restoring:
            builder.keep_max_num_seqs()
        if not builder.was_short:
            builder.extend_truncated()

    def _send_back_late(self, result: StepResult) -> None:
        """Send requests back to the queue whose adapters missed their deadline, until these are loaded.

        They keep neither slots nor pages, and the adapter's own pages may be evicted.
        """
        held = [self._requests[each].adapter for each in result.unready if each in self._requests]
        late = {adapter for adapter in held if adapter is not None}
        for request in [request for request in reversed(self.running) if request.adapter in late]:
            self.lifecycle.send_back(request, RequestState.LATE)
        for adapter in late:
            self._admission.note_late(adapter)

    # -- a step's result

    def _count_steps(self, tokens: int, steps: int = 1) -> None:
        """Count so many steps of so many tokens each."""
        self.num_steps += steps
        self.num_step_tokens += steps * tokens
        self.step_sizes[bisect_left(STEP_SIZES, tokens)] += steps

    def _advance_drafted(
        self, request: Request, sequence: ScheduledSequence, result: StepResult, info: StepInfo
    ) -> list[RequestOutput]:
        """Apply a sequence with drafts as if each of its sampled tokens came from a step of its own.

        Tokens after one that ends the request are dropped.
        """
        drafts = sequence.tokens[-sequence.drafts :]
        outputs: list[RequestOutput] = []
        for each in (result, *result.after_drafts):
            if request.finished or sequence.request_id not in each.tokens:
                break
            output = self._advance(request, sequence, each, info, 1, was_draft=each is not result)
            assert output is not None
            outputs.append(output)
        accepted = sum(output.token_ids[0] == draft for output, draft in zip(outputs, drafts, strict=False))
        self.num_proposed_tokens += len(drafts)
        self.num_accepted_tokens += accepted
        if self._speculation is not None:
            self._speculation.note(request, len(drafts), accepted)
        outputs[:accepted] = [output._replace(was_draft=True) for output in outputs[:accepted]]
        outputs[-1] = outputs[-1]._replace(num_rejected_drafts=len(drafts) - accepted)
        return outputs

    def _advance(
        self,
        request: Request,
        sequence: ScheduledSequence,
        result: StepResult,
        info: StepInfo,
        count: int,
        *,
        was_draft: bool = False,
    ) -> RequestOutput | None:
        """Apply `count` computed tokens to a request: append the sampled token, end the request if done, return its
        output. was_draft: it is one token, an accepted draft.
        """
        computed = request.num_computed_tokens = request.num_computed_tokens + count
        if request.caching and computed >= (request.num_known_blocks + 1) * self._memory.block_tokens:
            self._memory.remember(request)
        if computed >= request.leaves_at or sequence.states is not None:
            self._memory.move_on(request, was_draft=was_draft)
        if not sequence.samples:
            return self.lifecycle.pool(request, info)
        token = result.tokens[sequence.request_id]
        request.token_ids.append(token)
        if (reused := request.sequence) is not None:  # for the next step
            reused.tokens, reused.start = [token], computed
            if reused.states is not None:
                reused.state_step = reused.states.steps
        reason = None
        if token in request.end_ids:
            reason = FinishReason.STOP
        elif computed + 1 >= request.max_length:
            reason = FinishReason.LENGTH
        logprobs = result.logprobs.get(sequence.request_id) if result.logprobs else None
        is_first = computed == request.num_prompt_tokens
        fills = not computed % self._memory.block_tokens
        if reason is None and logprobs is None and not is_first and not fills:  # nearly every token
            return RequestOutput(sequence.request_id, (token,), step=info)
        return self.lifecycle.report(request, token, info, reason, logprobs, is_first=is_first)
