"""Shares of a step among the answers of one call and other calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from statistics import fmean

from ..requests.request import Request
from .running import Running
from .waiting import WaitingQueue

MAX_SLOWDOWN = 1.35
"""Factor by which a step may be longer than one in which calls with several answers leave their turns out.

Those steps are run amid the others, where a server still has to send what the steps before brought: measured against
what a step takes when nobody takes turns, it is about twice as long.
"""

FIRST_TURNS = 4.0
"""Turns in a step before anything was measured."""

LEAST_TURNS = 1 / 8
"""Turns in a step, below which answers are not held back, whatever they cost."""

WINDOW = 30
"""Steps between two trials."""

SPIKES = 3
"""The longest steps of a window, which are left out: something else held them up."""

TRIAL = 2
"""Steps of a trial."""

UNTRIED_WINDOWS = 8
"""Windows between two trials while everybody runs and that has been found cheap enough."""


class StepShares:
    """Chooses which answers of calls with several answers take part in a step, when there are other calls.

    Every call has a place in each step, and those with several answers have more places between them, which they and
    their answers take in turns. How many is found by measuring and not by counting, since one more row costs a GPU
    next to nothing and a CPU a good part of a step: now and then there is a trial, steps in which one call has no place
    and the others have one each, and the time those take is compared with that of the other steps. An answer that sits
    out keeps its seat, its pages and its state.
    """

    def __init__(self, max_rows: int, clock: Callable[[], float]) -> None:
        """max_rows: of a step."""
        self._max_rows = max_rows
        self._clock = clock
        self._turns = FIRST_TURNS  # places in a step beyond those in a step of a trial, on average
        self._due = 0.0  # what is left of a turn that did not fit into a step as a whole
        self._without: float | None = None  # seconds of a step of a trial, smoothed
        self._window: list[float] = []  # seconds of the steps since the last trial
        self._trial: list[float] = []
        self._num_tried = 0
        self._num_untried = 0
        self._measured: list[float] | None = None  # where the time of the step under way belongs
        self._began = 0.0

    def choose(self, running: Running, waiting: WaitingQueue) -> list[Request] | None:
        """Requests of the next step, None for all that run. To be asked while calls with several answers run.

        With every row taken it leaves one to a call that waits for its first.
        """
        num_calls, free = running.num_calls, self._max_rows
        if len(running) >= free and num_calls < free and waiting.has_firsts():
            free -= 1
        if num_calls < 2:
            self._measured = None
            return None if len(running) <= free else self._deal(running, free)
        now = self._clock()
        if self._measured is not None:
            self._measured.append(now - self._began)
        self._began, self._measured = now, self._window
        turns = len(running) - num_calls + 1  # with which everybody runs
        given = min(self._turns, free - num_calls + 1)
        if len(self._window) >= WINDOW:
            if self._num_tried < TRIAL and (given < turns or self._num_untried >= UNTRIED_WINDOWS):
                self._num_tried += 1
                self._measured = self._trial
                return self._deal(running, 0)
            if self._trial:
                self._adapt(min(given, turns))
            self._num_untried = 0 if self._num_tried else self._num_untried + 1
            self._num_tried = 0
            self._window.clear()
            self._trial.clear()
            given = min(self._turns, free - num_calls + 1)
        if given >= turns:
            return None
        self._due += given
        whole = int(self._due)
        self._due -= whole
        return self._deal(running, whole)

    def forget(self) -> None:
        """The step that was chosen last does more than to go on with answers: the time it takes says nothing."""
        self._measured = None

    def _adapt(self, turns: float) -> None:
        """Set how many turns there is time for, now that `turns` of them have been measured."""
        seconds = min(self._trial)
        self._without = seconds if self._without is None else self._without + (seconds - self._without) / 4
        cost, room = fmean(sorted(self._window)[:-SPIKES]) - self._without, (MAX_SLOWDOWN - 1) * self._without
        wanted = 2.0 if 2 * cost <= room else max(0.5, room / cost)
        self._turns = max(LEAST_TURNS, turns * wanted)

    def _deal(self, running: Running, turns: int) -> list[Request]:
        """One request of each call but the one that is first in turn, and `turns` more in turns, from that one on."""
        calls = running.calls
        counts = dict.fromkeys(calls, 1)
        first = next(iter(calls))
        counts[first] = 0
        calls[first] = calls.pop(first)
        if turns:
            order = deque((first, *(call for call in counts if call != first)))
            while turns and order:
                call = order.popleft()
                if counts[call] < len(calls[call]):
                    counts[call] += 1
                    turns -= 1
                    order.append(call)
        chosen = list(running.lone)
        for call, count in counts.items():
            members = calls[call]
            taking = list(islice(members, count))
            for request in taking:  # to the end of the line
                del members[request]
                members[request] = None
            chosen += taking
        return chosen
