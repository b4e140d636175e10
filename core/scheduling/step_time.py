"""Time of a step for those whose work makes steps long: larger choice groups, and heavy grammars.

Tests: tests/core/scheduling/test_choice_budget.py, tests/core/scheduling/test_grammar_budget.py.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from ..cpus import available_cpus
from ..requests.request import Request
from .queues import Running, WaitingQueue

SHARE = 0.4
"""Time that they may add to steps, as a share of the time of a step without them. Chosen."""

MAX_DEBT = 64
"""Most time that they may owe, in steps or budgets: a pause of the machine must not starve them. Chosen."""

NUM_SAMPLES = 8
"""Number of latest steps without them; the least of their times is the usual one."""

LONGEST_STEP = 4
"""Most time that the larger groups should add to one step, in steps without them."""

FIRST_ENTRIES = 8
"""Choices of the larger groups in their first step."""

WINDOW = 16
"""Steps in a row with the larger groups, per sample, before a step without them measures the usual time again."""

LEAST_SECONDS = 1e-3
"""Least time of a step that heavy grammars may take. Chosen."""

ALONE_SECONDS = 5e-3
"""Time of a step for heavy grammars if all requests have one: new requests wait for the step. Chosen."""


def owed(debt: float, beyond: float, unit: float) -> float:
    """Return a debt after a step that took so long beyond its budget (negative: less), at most `MAX_DEBT` units."""
    return min(max(0.0, debt + beyond), MAX_DEBT * unit)


class ChoiceBudget:
    """Chooses the choices that are in a step, when some choice groups have more running choices than others.

    Groups with the fewest choices always run whole. The larger groups are rate-limited by a debt: each step adds its
    time above the baseline step (one without them), and pays back `SHARE` of a baseline step. While they are in debt,
    steps run without them; then with as many of their choices as one step bears, in turns. Thus a request with one
    choice keeps at least 1 / (1 + SHARE) of its rate, whatever is expensive: sequences on a CPU, logprobs, or text that
    the server sends. If a sequence costs next to nothing, as on a GPU, all choices run all the time. A descheduled
    choice keeps its slot, its pages and its state.
    """

    def __init__(self, max_num_seqs: int, clock: Callable[[], float]) -> None:
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._without: deque[float] = deque(maxlen=NUM_SAMPLES)  # seconds of steps without the larger groups
        self._usual = 0.0  # the least of them: in others the server may still have sent earlier outputs
        self._debt = 0.0  # seconds
        self._excess = 0.0  # seconds that the last step with them took beyond its share
        self._max_entries = FIRST_ENTRIES  # choices of the larger groups in a step with them
        self._num_with = NUM_SAMPLES * WINDOW  # steps since the last one without
        self.pending: deque[int | None] = deque()
        """Choices of the larger groups in each step since `_began`; None if the step's time does not count."""
        self._began = 0.0  # when the first of these steps began

    def choose(self, running: Running, waiting: WaitingQueue, *, is_async: bool = False) -> list[Request] | None:
        """Return the requests of the next step; None: all running ones. Call it while a choice group runs.

        With every slot taken, one is left to a waiting first choice. The result may exceed the slots if the smallest
        groups do. is_async: the step chosen last still runs; its time is a guess.
        """
        free = self._max_num_seqs
        if len(running) >= free and running.num_groups < free and waiting.has_first_choices():
            free -= 1
        fewest = 1 if running.single_requests else min(map(len, running.choice_groups.values()))
        larger = sum(len(members) for members in running.choice_groups.values() if len(members) > fewest)
        if not larger:
            self._without.clear()
            self._num_with = NUM_SAMPLES * WINDOW
            self.pending.clear()
            return (
                None if len(running) <= free else self._select(running, 0, max(1, free - len(running.single_requests)))
            )
        self._settle(is_async)
        entries = max(1, free - (len(running) - larger))
        debt = self._debt + sum([self._excess if num_chosen else -SHARE * self._usual for num_chosen in self.pending])
        if debt > 0 or self._num_with >= WINDOW * (1 + len(self._without)):
            self._num_with = 0
            self.pending.append(0)
            return self._select(running, fewest, entries, without=True)
        self._num_with += 1
        num_chosen = min(self._max_entries, larger, entries)
        self.pending.append(num_chosen)
        return None if num_chosen == larger else self._select(running, fewest, num_chosen)

    def ignore(self) -> None:
        """Ignore the time of the step chosen last: it also computes the prompt of another request."""
        if self.pending:
            self.pending[-1] = None

    def rollback(self) -> None:
        """Record that the step chosen last is not run."""
        if self.pending:
            self.pending.pop()

    def _settle(self, is_async: bool) -> None:
        """Charge for the steps that have ended, in equal parts of the time since `_began`."""
        if is_async and not self.pending:
            self.pending.append(None)  # the step that still runs was not chosen here
        now, pending = self._clock(), self.pending
        if ended := len(pending) - is_async:
            parts = [pending.popleft() for _ in range(ended)]
            for each in parts:
                self._charge((now - self._began) / ended, None if None in parts else each)
        if ended or not is_async:
            self._began = now

    def _charge(self, seconds: float, num_chosen: int | None) -> None:
        """Charge the larger groups for a step, and adapt their number of choices to its time."""
        if num_chosen is None:
            seconds = self._usual
        elif not num_chosen:
            self._without.append(seconds)
            self._usual = min(self._without)
        usual = self._usual
        excess = seconds - (1 + SHARE) * usual
        self._debt = owed(self._debt, excess, usual)
        if not usual or not num_chosen:
            return
        self._excess = excess
        if seconds > (1 + LONGEST_STEP) * usual:
            self._max_entries = max(1, num_chosen // 2)
        elif num_chosen == self._max_entries and seconds < (1 + LONGEST_STEP / 2) * usual:
            self._max_entries = min(2 * self._max_entries, self._max_num_seqs)

    def _select(self, running: Running, fewest: int, entries: int, without: bool = False) -> list[Request]:
        """Return all requests of groups with at most `fewest` choices, and `entries` of the larger groups', in turns.

        without: none of the larger group that is first in turn, and at most `fewest` of each other one.
        """
        groups = running.choice_groups
        chosen, counts = list(running.single_requests), {}
        for group, members in groups.items():
            if len(members) > fewest:
                counts[group] = 0
            else:
                chosen += members
        order = deque(counts)
        first = order[0]
        if without:
            order.popleft()
        while entries and order:
            group = order.popleft()
            counts[group] += 1
            entries -= 1
            if counts[group] < (fewest if without else len(groups[group])):
                order.append(group)
        groups[first] = groups.pop(first)  # it is the last in the next step
        for group, count in counts.items():
            members = groups[group]
            taking = list(islice(members, count))
            for request in taking:
                del members[request]
                members[request] = None
            chosen += taking
        return chosen


class GrammarBudget:
    """Chooses the requests with heavy grammars that share a step with other requests.

    A grammar is heavy if its last token took long (`GrammarState.seconds`). Time beyond the budget of a step is a
    debt, which the budgets of later steps pay off; until then steps run without them. Then as many
    run as the budget has room for, at least one: tenants take turns, and so do requests of one tenant. Heavy grammars
    wait for each other, and other requests don't wait for them. A descheduled request keeps its slot, pages and state.
    """

    def __init__(self, clock: Callable[[], float], threads: int | None = None) -> None:
        """threads: that compute grammars at once; default: the processors."""
        self._clock = clock
        self._threads = threads or available_cpus()
        self._debt = 0.0  # seconds
        self.heavy: dict[Request, float] = {}
        """Seconds of a processor for the last token, by requests whose grammars are heavy."""
        self._turns: dict[Request, int] = {}  # number of the last step that each was chosen for
        self._num_chosen = 0
        self._samples: deque[float] = deque(maxlen=NUM_SAMPLES)
        self._noted_at: float | None = None

    @property
    def seconds(self) -> float:
        """Time of the next step for heavy grammars."""
        return max(LEAST_SECONDS, SHARE * min(self._samples, default=0.0))

    def choose(self, candidates: Sequence[Request]) -> list[Request] | None:
        """Return the candidates without the requests that are left out of the next step; None if none is."""
        heavy = [request for request in candidates if request in self.heavy]
        if not heavy:
            return None
        if len(heavy) == len(candidates):  # nobody waits for them but who comes during the step
            kept = self._in_turn(heavy, max(ALONE_SECONDS, self.seconds))
        else:
            kept = self._in_turn(heavy, self.seconds) if self._debt <= 0 else set()
        left_out = set(heavy) - kept
        return [each for each in candidates if each not in left_out] if left_out else None

    def note(self, seconds: Mapping[Request, float]) -> None:
        """Record a step that has ended. seconds: of a processor, for those of its grammars that are or were heavy."""
        for request, spent in seconds.items():
            if spent:
                self.heavy[request] = spent
            else:
                self._forget(request)
        for request in [request for request in self.heavy if request.finished]:
            self._forget(request)
        now, charge = self._clock(), self._wall(list(seconds.values()))
        if self._noted_at is not None:
            self._samples.append(max(0.0, now - self._noted_at - charge))
        self._noted_at = now
        budget = self.seconds
        self._debt = owed(self._debt, charge - budget, budget) if self.heavy else 0.0

    def _in_turn(self, heavy: Sequence[Request], budget: float) -> set[Request]:
        """Return the heavy requests that a budget has room for, at least one."""
        self._num_chosen += 1
        last: Counter[str] = Counter()  # number of the last step with a request of each tenant
        for request, turn in self._turns.items():
            last[request.fairness_key] = max(last[request.fairness_key], turn)
        places: Counter[str] = Counter()
        order: dict[Request, tuple[int, int]] = {}
        for request in sorted(heavy, key=lambda each: self._turns.get(each, 0)):
            order[request] = places[request.fairness_key], last[request.fairness_key]
            places[request.fairness_key] += 1
        kept: dict[Request, float] = {}
        for request in sorted(order, key=order.__getitem__):
            if kept and self._wall([*kept.values(), self.heavy[request]]) > budget:
                break
            kept[request] = self.heavy[request]
            self._turns[request] = self._num_chosen
        return set(kept)

    def _wall(self, seconds: Sequence[float]) -> float:
        """Time that grammars take in threads, by their times of a processor."""
        return max(max(seconds, default=0.0), sum(seconds) / self._threads)

    def _forget(self, request: Request) -> None:
        self.heavy.pop(request, None)
        self._turns.pop(request, None)
