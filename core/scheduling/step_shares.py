"""Shares of a step's rows among calls with one and with several answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice

from ..requests.request import Request
from .queues import Running, WaitingQueue

SHARE = 0.4
"""Time that the larger calls may take for their answers, as a share of the time that steps take without these."""

MAX_DEBT = 64
"""Most time that the larger calls may owe, in steps without them: a pause of the machine must not starve them."""

LONGEST_STEP = 4
"""Most time that the answers of the larger calls should add to one step, in steps without them."""

FIRST_ENTRIES = 8
"""Answers of the larger calls in their first step."""

NUM_SAMPLES = 8
"""Number of latest steps without the larger calls; the least of their times is the baseline."""

WINDOW = 16
"""Steps in a row with the larger calls, per such sample, before a step without them measures the baseline again."""


class StepShares:
    """Chooses the answers that take part in a step, when some calls have more running answers than others.

    Calls with the fewest answers always run whole. The larger calls are rate-limited by a debt: each step adds its time
    above the baseline step (one without them), and pays back `SHARE` of a baseline step. While they are in debt, steps
    run without them; then with as many of their answers as one step bears, in turns. So a call with one answer keeps at
    least 1 / (1 + SHARE) of its rate, whatever the cost: rows on a CPU, scores, or text that the server sends. Where a
    row costs next to nothing, as on a GPU, all answers run all the time. A paused answer keeps its slot, its pages and
    its state.
    """

    def __init__(self, max_num_seqs: int, clock: Callable[[], float]) -> None:
        """max_rows: of a step."""
        self._max_num_seqs = max_num_seqs
        self._clock = clock
        self._without: deque[float] = deque(maxlen=NUM_SAMPLES)  # seconds of steps without the larger calls
        self._usual = 0.0  # the least of them: in others the server may still have sent what steps before brought
        self._debt = 0.0  # seconds
        self._excess = 0.0  # seconds that the last step with them took beyond the time that pays for itself
        self._max_entries = FIRST_ENTRIES  # of the larger calls in a step with them
        self._num_with = NUM_SAMPLES * WINDOW  # steps since the last one without
        self.pending: deque[int | None] = deque()
        """Of each step since `_began`: places of the larger calls; None if its time is no measure."""
        self._began = 0.0  # the time from which on these steps take theirs

    def choose(self, running: Running, waiting: WaitingQueue, *, is_async: bool = False) -> list[Request] | None:
        """Return the requests of the next step, None for all running ones. Call it while calls with n > 1 run.

        With every row taken, one is left to a call that waits for its first. The result exceeds a step's rows where the
        requests alone in their calls do. is_async: the step chosen last is still under way; its time is a guess.
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
        places = max(1, free - (len(running) - larger))
        debt = self._debt + sum([self._excess if dealt else -SHARE * self._usual for dealt in self.pending])
        if debt > 0 or self._num_with >= WINDOW * (1 + len(self._without)):
            self._num_with = 0
            self.pending.append(0)
            return self._select(running, fewest, places, without=True)
        self._num_with += 1
        dealt = min(self._max_entries, larger, places)
        self.pending.append(dealt)
        return None if dealt == larger else self._select(running, fewest, dealt)

    def ignore(self) -> None:
        """Ignore the time of the step chosen last: it also computes a prompt of another call."""
        if self.pending:
            self.pending[-1] = None

    def rollback(self) -> None:
        """The step chosen last is not run."""
        if self.pending:
            self.pending.pop()

    def _settle(self, is_async: bool) -> None:
        """Account for the steps that have ended, all but one under way, with equal parts of the time since `_began`."""
        if is_async and not self.pending:
            self.pending.append(None)  # it was not chosen here
        now, dealt = self._clock(), self.pending
        if ended := len(dealt) - is_async:
            parts = [dealt.popleft() for _ in range(ended)]
            for each in parts:
                self._charge((now - self._began) / ended, None if None in parts else each)
        if ended or not is_async:
            self._began = now

    def _charge(self, seconds: float, dealt: int | None) -> None:
        """Charge the larger calls for a step, and fit their rows to its time."""
        if dealt is None:
            seconds = self._usual
        elif not dealt:
            self._without.append(seconds)
            self._usual = min(self._without)
        usual = self._usual
        excess = seconds - (1 + SHARE) * usual
        self._debt = min(max(0.0, self._debt + excess), MAX_DEBT * usual)
        if not usual or not dealt:
            return
        self._excess = excess
        if seconds > (1 + LONGEST_STEP) * usual:
            self._max_entries = max(1, dealt // 2)
        elif dealt == self._max_entries and seconds < (1 + LONGEST_STEP / 2) * usual:
            self._max_entries = min(2 * self._max_entries, self._max_num_seqs)

    def _select(self, running: Running, fewest: int, places: int, without: bool = False) -> list[Request]:
        """Return all requests of calls with `fewest` answers or less, and `places` of the larger calls', in turns.

        without: none of the larger call that is first in turn, and at most `fewest` of each other.
        """
        calls = running.choice_groups
        chosen, counts = list(running.single_requests), {}
        for call, members in calls.items():
            if len(members) > fewest:
                counts[call] = 0
            else:
                chosen += members
        order = deque(counts)
        first = order[0]
        if without:
            order.popleft()
        while places and order:
            call = order.popleft()
            counts[call] += 1
            places -= 1
            if counts[call] < (fewest if without else len(calls[call])):
                order.append(call)
        calls[first] = calls.pop(first)  # to the end of the line
        for call, count in counts.items():
            members = calls[call]
            taking = list(islice(members, count))
            for request in taking:
                del members[request]
                members[request] = None
            chosen += taking
        return chosen
