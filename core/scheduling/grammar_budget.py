"""The time of a step for the grammars of its requests."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from ..cpus import available_cpus
from ..requests.request import Request

LEAST_SECONDS = 1e-3
"""Least time of a step that heavy grammars may take. Chosen."""

SHARE = 0.4
"""Time that heavy grammars may take, as a share of the time that steps take without it, where that is more. Chosen: as
the share of the larger groups in `StepShares`."""

ALONE_SECONDS = 5e-3
"""Time of a step for heavy grammars if all requests have one: new requests wait for the step. Chosen."""

MAX_DEBT = 64
"""Most time that they may owe, in budgets of a step: a pause of the machine must not starve them. Chosen."""

NUM_SAMPLES = 8
"""Number of latest steps; the least of their times without heavy grammars is the usual one."""


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
        self._debt = min(max(0.0, self._debt + charge - budget), MAX_DEBT * budget) if self.heavy else 0.0

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
