"""Checks of the requests that a step runs and starts: turns of tenants, overtaken requests, and descheduled ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set

from chorus.core.engine import Engine
from chorus.core.requests.request import Request
from chorus.core.requests.types import StepPlan
from chorus.core.scheduling.allocator import LONGEST_ROUND
from chorus.core.scheduling.queues import num_missing
from chorus.core.scheduling.step_target import RECENT_SECONDS
from chorus.memory.adapters.adapter import Adapter, Tier

from .asked import Asked, promise
from .invariants import STATES
from .made_up_model import seconds_of

Moment = tuple[float, float]
"""Time in seconds, and steps of the engine."""


class CheckedOrder:
    """Follows an engine from step to step. `before` and `after` enclose a step, `on_plan` sees each plan before it is
    run, and `note` is to be called between any two things that are done to the engine.
    """

    def __init__(
        self, engine: Engine, clock: Callable[[], float], asked: Mapping[str, Asked], reached: Counter[str]
    ) -> None:
        self._engine = engine
        self._config = engine.config
        self._scheduler = engine.scheduler
        self._clock = clock
        self._asked = asked
        self._reached = reached
        self._turns: dict[str, Moment] = {}  # since when a tenant has waited for one, with something in the queue
        self._last_turns: dict[str, Moment] = {}
        self._paused: set[str] = set()  # requests that ran, but had no row of the last step
        self._drawing: set[str] = set()  # requests that draw a token in the last step
        self._had_no_index: set[Adapter] = set()  # adapters of running requests, in the last step
        self._out_since: dict[Adapter, Moment] = {}  # adapters of running requests without an index
        self._decoded: dict[str, float] = {}  # when tenants have decoded last
        self._decided: Moment = 0.0, 0
        self._last_plan: StepPlan | None = None
        """The step before a step ahead: it may be launched in the same call."""
        self.has_run = False
        """True if the last step computed anything."""

    def note(self) -> None:
        """Note which tenants have something in the queue."""
        now = self._clock(), self._scheduler.num_steps
        self._turns = {tenant: self._turns.get(tenant, now) for tenant in self._scheduler.waiting.tenants}

    def before(self) -> None:
        """Remember the running requests before a step, and the state that decides about it."""
        engine, scheduler = self._engine, self._scheduler
        self.note()
        self.has_run = False
        self._running = [request.id for request in scheduler.running]
        self._drawing.intersection_update(self._running)  # rows of the others are stale, even if they begin again
        self._num_steps, self._num_preemptions = scheduler.num_steps, scheduler.lifecycle.num_preemptions
        self._decide(self._clock())
        tier = engine.store.tier
        self._here = {each for each in engine.store.versions() if tier(each) in (Tier.DEVICE, Tier.HOST)}
        ahead = engine.async_steps
        self._under_way = None if ahead is None else ahead.plan
        self._note_dropped()

    def after(self) -> None:
        """Check a step that has been run, or was not."""
        scheduler = self._scheduler
        # Other started requests have no row: they wait for a copy, or their step ahead was rolled back.
        self._check_turns(self._started(), [])
        has_not_run = scheduler.num_steps == self._num_steps
        self._reached["run again, with none ahead"] += has_not_run and self._under_way is not None
        self._check_order()

    def on_plan(self, plan: StepPlan) -> None:
        self.has_run = True
        self._check_order()
        ending = set() if plan.sources is None else self._check_ahead(plan)
        self._drawing = {row.request_id for row in plan.sequences if row.samples}
        self._decoded |= dict.fromkeys(self._decoding(plan), self._decided[0])
        self._check_plan(plan, ending)
        self._last_plan = plan
        self._running = [request.id for request in self._scheduler.running]

    def _decoding(self, plan: StepPlan) -> set[str]:
        """The tenants with a request that decodes in a step. One whose prompt lacks its last token does, too: in a step
        ahead, what the step under way computes is counted as computed.
        """
        before = None if plan.sources is None else self._last_plan
        rows = () if before is None else before.sequences
        computed = {row.request_id: len(row.tokens) - row.samples for row in rows}
        running = self._scheduler.running
        return {each.fairness_key for each in running if num_missing(each) - computed.get(each.id, 0) <= 1}

    def _decide(self, now: float) -> None:
        """Note that the next step is planned now; it then takes time."""
        self._decided = now, self._scheduler.num_steps
        self._overdue_before = now - self._config.max_overtake_seconds

    def _check_order(self) -> None:
        """Check that no request starts again in the very plan that sent it back: the others come first."""
        still = [request.id for request in self._scheduler.running if request.id in self._running]
        promise(still == [id for id in self._running if id in still], "sent back, a request began again at once")

    def _started(self) -> list[Request]:
        """Requests that have begun since the last plan."""
        return [each for each in self._scheduler.running if each.id not in self._running]

    # -- steps ahead

    def _note_dropped(self) -> None:
        """Note rows of the step under way whose requests are gone, or are waiting again."""
        for row in () if self._under_way is None else self._under_way.sequences:
            asked = self._asked[row.request_id]
            has_ended = asked.told.reason is not None
            self._reached["dropped: it had ended"] += has_ended
            again = not has_ended and not (asked.ended or asked.request.is_running)
            self._reached["dropped: it was aborted or sent back"] += again or (asked.aborted and not has_ended)

    def _check_ahead(self, plan: StepPlan) -> set[str]:
        """Return the requests that the step under way is known to end: only they may lack a row for that."""
        self._decide(self._clock() - seconds_of(plan))
        running, started, reached = self._scheduler.running, self._started(), self._reached
        may_end = {each.id for each in running if each.num_tokens + 1 >= each.max_length}
        ending = may_end & self._drawing
        promise(ending.isdisjoint([row.request_id for row in plan.sequences]), "a request goes on behind its end")
        promise(not ending or not started, "a successor waits a step more")
        reached["a step ahead"] += 1
        reached["a step ahead without those that end"] += bool(ending)
        reached["a step ahead while others wait"] += bool(self._scheduler.waiting)
        reached["a step ahead that looks back"] += any(row.looks_back for row in plan.sequences)
        reached["a step of prompts ahead"] += plan.bucket is None
        reached["begun in a step ahead"] += bool(started)
        in_step = {self._asked[row.request_id].request for row in plan.sequences}
        without = [(len(members.keys() - in_step), len(members)) for members in running.choice_groups.values()]
        reached["a step ahead of some answers of a call"] += any(0 < count < most for count, most in without)
        return ending

    # -- all steps

    def _check_plan(self, plan: StepPlan, ending: Set[str]) -> None:
        """ending: the requests that have no row, as they end in the step before."""
        running, started, reached = self._scheduler.running, self._started(), self._reached
        first = [each for each in started if not self._asked[each.id].was_sent_back]
        beyond_slots = len(self._running) + len(started) > self._config.max_num_seqs  # some may be preempted for others
        reached["begun beyond the slots"] += len(running) > self._config.max_num_seqs and bool(first)
        for request in started:
            reached[STATES[request.state]] += 1
        self._check_paused(plan, ending)
        self._check_overtaken(plan, first, beyond_slots)
        self._check_turns(started, [] if beyond_slots else self._may_begin())
        arrivals = [each.arrival_time for each in first]
        oldest = min((each.arrival_time for each in self._scheduler.waiting), default=math.inf)
        reached["overtaken"] += any(arrival > oldest for arrival in arrivals)
        for request in started:
            others = [each for each in self._scheduler.waiting if each.fairness_key != request.fairness_key]
            reached["a tenant's turn"] += any(other.queue_position < request.queue_position for other in others)
            reached["prefix hit"] += request.num_cached_tokens > 0
            reached["prefix hit of an adapter"] += request.num_cached_tokens > 0 and request.adapter is not None

    def _check_paused(self, plan: StepPlan, ending: Set[str]) -> None:
        """Check that running requests without a row had to be left out."""
        engine, reached, in_step = self._engine, self._reached, {row.request_id for row in plan.sequences}
        paused = [request for request in self._scheduler.running if request.id not in in_step | ending]
        reached["sat out"] += bool(paused)
        reached["went on after sitting out"] += not self._paused.isdisjoint(in_step)
        before, self._paused = self._paused, {request.id for request in paused}
        left_out = self._left_out(plan)
        # rows of an adapter whose index a waiting request takes are free only in the next step, even if it was its turn
        is_lent = any(request.adapter is not None and request.id in in_step for request in self._started())
        new = left_out if is_lent else left_out - self._had_no_index
        gave = sum(request.adapter in new for request in self._scheduler.running)
        lent = {each.fairness_key for each in self._scheduler.running if each.adapter in left_out - self._had_no_index}
        self._had_no_index = left_out
        self._check_adapters(plan, left_out)
        able = [each for each in paused if each.restoring is None and each.adapter not in left_out]
        reached["a prompt waited for answers"] += any(map(self._is_bounded, able))
        left = self._config.max_num_batched_tokens - plan.num_tokens
        alone = [each for each in able if not each.choice_group and not self._is_bounded(each)]
        # one step computes all of an image, and a prompt with one takes more or fewer tokens than its tenant's share
        has_images = any(each.blocks.longest > left for each in able) or any(row.blocks.spans for row in plan.sequences)
        waits = engine.swapped.frees_pages  # for pages that are being copied out
        preempted = (
            self._scheduler.lifecycle.num_preemptions - self._num_preemptions
        )  # whose rows are free in this step
        free_rows = self._config.max_num_seqs - len(plan.sequences)
        reached["sat out for another tenant"] += not free_rows and bool(alone)
        if left and engine.reclaimer.available and not waits:
            is_right = not alone or has_images or free_rows <= preempted + gave
            promise(is_right, "one that is alone in its call sat out")
        if not free_rows:
            longest = max((each.blocks.longest for each in self._scheduler.waiting), default=0)
            has_tokens = left > longest and self._paused <= before
            self._check_shares(in_step, left, ending, left_out, lent if is_lent else set(), has_tokens=has_tokens)

    def _is_bounded(self, request: Request) -> bool:
        """True if a request has a prompt to compute, of which a step may have no token as another tenant decodes, has
        just decoded, or begins a request in it. A prompt of one token decodes once it runs; while it waits, its tenant
        may owe time.
        """
        if self._scheduler.target is None or (request.is_running and num_missing(request) <= 1):
            return False
        if any(each.fairness_key != request.fairness_key for each in self._started()):
            return True
        since = self._decided[0] - RECENT_SECONDS
        return any(tenant != request.fairness_key and when >= since for tenant, when in self._decoded.items())

    def _left_out(self, plan: StepPlan) -> set[Adapter]:
        """Adapters of running requests that have no index in a step, as there are more of them than indices. The index
        of one that was preempted, or that had no row, is free from the next step on.
        """
        most = self._config.max_adapters_per_step
        adapters = {request.adapter for request in self._scheduler.running if request.adapter is not None}
        has_preempted = self._scheduler.lifecycle.num_preemptions > self._num_preemptions
        fit = most is None or (len(adapters) <= most and not has_preempted)
        return set() if fit else adapters - self._ran(plan)

    def _ran(self, plan: StepPlan) -> set[Adapter | None]:
        """The adapters of a step's requests, also of those whose adapter begins later."""
        return {self._asked[row.request_id].adapter for row in plan.sequences}

    def _check_adapters(self, plan: StepPlan, left_out: Set[Adapter]) -> None:
        """Check that no adapter of running requests is descheduled beyond its time and a round of the others."""
        now = self._decided[0]
        self._reached["adapters took turns"] += bool(left_out)
        # A prompt that another tenant's decoding holds back takes part in no turn.
        running = [each for each in self._scheduler.running if each.restoring is None and not each.choice_group]
        may_run = {each.adapter for each in running if not self._is_bounded(each)}
        since = self._out_since
        self._out_since = {each: since.get(each, (now, self._decided[1])) for each in left_out & may_run}
        patience, count = self._config.max_overtake_seconds, len(left_out) + len(self._ran(plan) - {None})
        for adapter, (then, step) in self._out_since.items():
            is_late = now - then > patience + min(patience, LONGEST_ROUND) and self._decided[1] - step > 3 * count
            promise(not is_late, "{} is descheduled since {}, now {}", adapter, then, now)

    def _check_shares(
        self,
        in_step: Collection[str],
        left: int,
        ending: Set[str],
        left_out: Set[Adapter],
        lent: Set[str],
        *,
        has_tokens: bool,
    ) -> None:
        """Check that no tenant that could begin waits without a row while another has two, where there is room.

        A row that was started in this step is cancelled in none before the next. left: tokens that the step does not
        use. lent: tenants that had their turn with an adapter whose index one of these rows takes. has_tokens: the step
        has tokens left, other than those of rows that were cancelled last.
        """
        running, waiting, engine = self._scheduler.running, self._scheduler.waiting, self._engine
        rows = Counter(request.fairness_key for request in running if request.id in in_step)
        here = [each for each in running if each.restoring is None and each.id not in ending]
        here = [each for each in here if each.adapter not in left_out]
        here = {
            each.fairness_key
            for each in here
            if each.id in in_step or not (self._is_bounded(each) or each.blocks.longest > left)
        }
        config = self._config
        has_more = config.max_adapters_per_step is not None and len(here) > config.max_num_seqs
        is_right = not (rows.keys() ^ here) - lent or bool(running.choice_groups) or has_more
        promise(is_right, "a tenant whose requests all sit out")
        preempted = self._scheduler.lifecycle.num_preemptions > self._num_preemptions
        if preempted or not has_tokens or config.weights or engine.swapped.frees_pages or not self._has_room():
            return
        if config.chunked_prefill and config.max_adapters_per_step is None and not running.choice_groups:
            self._reached["room for all"] += 1
            new = Counter(request.fairness_key for request in self._started() if request.id in in_step)
            givers = [tenant for tenant, own in rows.items() if own > 1 and own > new[tenant]]
            for tenant, groups in waiting.tenants.items():
                if tenant not in running.tenants and None in groups and not self._is_bounded(next(iter(groups[None]))):
                    promise(not givers, f"{tenant!r} waits beside {rows}")

    def _has_room(self) -> bool:
        """True if there are pages for all that runs and waits, however long it gets."""
        block, scheduler = self._engine.block_tokens, self._scheduler
        growth = sum(1 + (each.max_length - each.num_tokens) // block for each in scheduler.running)
        growth += sum(2 + each.max_length // block for each in scheduler.waiting)
        growth *= self._engine.executor.layout.pages_per_block
        growth += sum(adapter.num_pages for adapter in self._engine.store.versions())
        return growth <= self._engine.reclaimer.available

    def _check_overtaken(self, plan: StepPlan, first: Sequence[Request], beyond_slots: bool) -> None:
        """Check that no request starts while one of its tenant waits that has been overtaken for long enough.

        Where a step's adapters are limited, one may wait for its adapter's turn, and for a slot while another adapter
        had its turn in this step.
        """
        before = {self._asked[id].adapter for id in self._running} - {None}
        most = self._config.max_adapters_per_step or math.inf
        full = len(before | {each.adapter for each in self._scheduler.running} - {None}) >= most
        overdue = [each for each in self._scheduler.waiting if self._is_overdue(each, first, beyond_slots)]
        for waiting in overdue:
            if self._asked[waiting.id].was_moved:  # its time counts from its arrival at the engine that it came from
                continue
            if full and waiting.adapter not in {None, *plan.adapters}:
                continue
            for other in first:
                had_turn = full and other.adapter not in {None, *before}
                if other.fairness_key == waiting.fairness_key and not had_turn:
                    is_older = other.arrival_time <= waiting.arrival_time
                    promise(is_older, f"{waiting} was overtaken too long by {other}")

    def _is_overdue(self, waiting: Request, first: Sequence[Request], beyond_slots: bool) -> bool:
        """True if a request has been overtaken for long enough, and could have started in this step."""
        if waiting.arrival_time >= self._overdue_before or waiting.id in self._running:
            return False
        adapter = waiting.adapter
        if adapter is not None and adapter not in self._here:
            later = any(each.arrival_time > waiting.arrival_time for each in first)
            self._reached["overdue, its adapter not here"] += later
            return False
        queue = self._scheduler.waiting
        if waiting not in queue.tenants.get(waiting.fairness_key, {}).get(adapter, ()):
            return False  # held back until its prompt has been computed for another
        # a call that comes anew needs no slot
        return not (
            beyond_slots and (waiting.is_later_choice or waiting.choice_group in self._scheduler.running.choice_groups)
        )

    # -- turns

    def _may_begin(self) -> list[Request]:
        """The waiting requests that could have begun: the first of their calls, with adapters that are here."""
        if self._config.max_adapters_per_step is not None:
            return []
        tier = self._engine.store.tier
        here: set[Adapter | None] = {None, *(each for each in self._here if tier(each) in (Tier.DEVICE, Tier.HOST))}
        groups = [group for groups in self._scheduler.waiting.tenants.values() for group in groups.values()]
        firsts = [request for group in groups if group.adapter in here for request in group.first_choices]
        return [request for request in firsts if request.id not in self._running]

    def _has_waited_for_long(self, since: Moment, more_steps: int = 0) -> bool:
        seconds, steps = self._decided[0] - since[0], self._decided[1] - since[1]
        return seconds >= self._config.max_turn_seconds or steps >= self._config.max_turn_steps + more_steps

    def _check_turns(self, started: Sequence[Request], may_begin: Sequence[Request]) -> None:
        """Check that no tenant that has waited too long for a turn is passed over by one that has had one lately.

        A tenant with a running request may be where pages are short: only its share of them is kept for it.
        """
        begun, running = {request.fairness_key for request in started}, self._scheduler.running.tenants
        waiting = {request.fairness_key for request in may_begin} - begun
        # A turn in a step ahead counts from the step before or from that; one that may be held back by a target of
        # steps' time, from the plan that finds its tenant waiting.
        behind = int(self._engine.async_steps is not None) + int(self._scheduler.target is not None)
        never = math.inf, math.inf
        late = {each for each in waiting if self._has_waited_for_long(self._turns.get(each, never), behind)}
        if late and not self._has_room():
            late -= running.keys()
        self._reached["late for its turn"] += bool(late)
        for tenant in begun:
            last, since = self._last_turns.get(tenant), self._turns.get(tenant)
            self._reached["a turn that was late"] += since is not None and self._has_waited_for_long(since)
            if late and last is not None:
                has_waited = self._has_waited_for_long(last)
                promise(has_waited, f"{tenant!r} began, last {last}; late for a turn: {late}")
            self._last_turns[tenant] = self._decided
            self._turns[tenant] = self._clock(), self._scheduler.num_steps  # its turn was while adapters were loaded
