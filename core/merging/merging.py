"""The adapter that steps have in their weights: making its shadow weights, switching to them, dropping them.

Tests: tests/core/merging/test_merging.py, tests/core/merging/test_merged.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from ...memory.adapters.adapter import Adapter
from ...memory.adapters.reclaimer import Reclaimer
from ...memory.adapters.store import AdapterStore
from ...memory.transfers.transfer import ExecutorLost
from ..executors.base import ShadowBackend
from ..requests.types import CannotMerge

logger = logging.getLogger(__name__)

#: Share of a step's time that merging may take between two steps; chosen: a pause is shorter than a step, and a merge
#: ends before many steps have passed. At least one matrix is made each time. Where a mode policy merges on a GPU, steps
#: with merged weights are captured at the start, in the pages that are allocated last, for adapters that change every
#: matrix or only those of queries, keys and values. For other adapters, or where those pages are in use, one step is
#: captured each time, which takes longer than a step. So it is where only a program calls `Engine.merge`, and on TP
#: ranks, which capture a step when they first run it.
SHARE = 0.5

#: Seconds until a policy's choice that found no room is tried again; searching for runs takes a while.
RETRY_SECONDS = 1.0


class Merging:
    """Shadow weights of one adapter at a time.

    merged: the adapter in the weights that steps use, None in unmerged mode. shadowed: the adapter of the shadow
    weights, complete or being made; while `merged` is None they may be kept, so that merging it again is a switch.

    The adapter stays resident: when it loses its pages, or its name gets another version, the shadow is dropped first.
    `Reclaimer` may free its pages between any two steps, if requests or adapters need them more.
    """

    def __init__(
        self, backend: ShadowBackend | None, reclaimer: Reclaimer, store: AdapterStore, clock: Callable[[], float]
    ) -> None:
        self._backend = backend
        self._reclaimer = reclaimer
        self._pages = reclaimer.shadow
        self._store = store
        self._clock = clock
        self._refused: WeakKeyDictionary[Adapter, str] = WeakKeyDictionary()
        self._retry_at = -math.inf  # when there may be room again
        self._runs: list[range] = []  # still to be taken for the shadow that is being made, the last one first
        self._spent = 0.0  # seconds on it
        self._uses = 0  # switches to the shadow that is there
        self.is_under_way = False
        """True while a shadow is being made: call `advance` between steps."""
        self.merged: Adapter | None = None
        self.shadowed: Adapter | None = None
        self.num_merges = 0
        self.num_switches = 0
        self.merge_seconds = 0.0
        """Seconds that the latest whole merge took, all pauses together; 0 before the first."""
        self.longest_pause = 0.0
        """Seconds of the longest time that a step was kept waiting for merging."""
        self._pages.on_gone = self._forget

    def merge(self, adapter: Adapter) -> None:
        """Have steps use the adapter's shadow weights: at once if they are made, else once they are.

        Until then steps run unmerged. Raises CannotMerge, and changes nothing, when they can't be made.
        """
        if adapter is not self.shadowed:
            began = self._clock()
            try:
                self._begin(adapter)
            finally:
                self.longest_pause = max(self.longest_pause, self._clock() - began)
        elif not self.is_under_way and self.merged is None:
            self._switch_on(adapter)

    def unmerge(self) -> None:
        """Have steps compute with the model's own weights. The shadow is kept until its pages are wanted."""
        adapter = self.merged
        if adapter is None:
            if self.is_under_way:
                self._pages.give_up()
            return
        self.merged = None
        self.num_switches += 1
        self._pages.rest(self.merge_seconds, self._uses)
        self._store.let_go(adapter)

    def advance(self, step_seconds: float) -> None:
        """Do some of the work that is under way; steps are merged once all is done.

        step_seconds: of a decode step; decode steps continue meanwhile.
        """
        adapter, backend = self.shadowed, self._backend
        if adapter is None or backend is None or not self.is_under_way:
            return
        began, most = self._clock(), SHARE * step_seconds
        try:
            with self._refusing(adapter):
                left = most
                if self._runs:
                    self._take_runs(most)
                    left -= self._clock() - began
                is_whole = self.is_under_way and not self._runs and left >= 0 and backend.advance(left)
        except CannotMerge as error:  # steps go on without
            logger.info("%s", error)
            self._pages.give_up()
            return
        pause = self._clock() - began
        self._spent += pause
        self.longest_pause = max(self.longest_pause, pause)
        if is_whole:
            self.is_under_way = False
            self.merge_seconds = self._spent
            self.num_merges += 1
            self._store.let_go(adapter)
            self._switch_on(adapter)

    @property
    def expected_seconds(self) -> float | None:
        """Estimated seconds of the whole merge under way, from the share made so far; None while that is 0."""
        if not self.is_under_way or not self.share_made:
            return None
        return self._spent / self.share_made

    @property
    def share_made(self) -> float:
        """Share of the shadow's weights that are made, 0 to 1."""
        return 0.0 if self._backend is None else self._backend.share_made

    def may_merge(self, adapter: Adapter) -> bool:
        """True unless it is known that the adapter can't be merged, or not yet."""
        if self._backend is None or not _is_complete(adapter) or adapter in self._refused:
            return False
        if adapter.manifest.unmerged_targets:
            return False
        return adapter is self.shadowed or self._clock() >= self._retry_at

    def _begin(self, adapter: Adapter) -> None:
        backend = self._backend
        if backend is None:
            raise CannotMerge("this executor has no merged mode")
        if adapter in self._refused:
            raise CannotMerge(self._refused[adapter])
        if targets := adapter.manifest.unmerged_targets:
            raise CannotMerge(
                f"adapter {adapter.name!r} changes {', '.join(targets)}, parts of a mixture of experts, of inputs of "
                "layers, of norms' gates or beside a mixer, and these weights are not merged: serve it unmerged"
            )
        if not _is_complete(adapter):
            raise CannotMerge(f"adapter {adapter.name!r} is not resident; merge it once it has been loaded")
        self._store.hold(adapter)  # an adapter that a request waits for is not evicted for the runs
        try:
            with self._refusing(adapter):
                sizes, wished = backend.sizes(adapter), backend.wished_runs(adapter)
            runs = self._reclaimer.find_runs(sizes, wished)
            if runs is None:
                self._retry_at = self._clock() + RETRY_SECONDS
                raise CannotMerge(
                    f"adapter {adapter.name!r} needs {sum(sizes)} pages for merged weights, in {len(sizes)} runs of up "
                    f"to {max(sizes)}; there is no room for them beside what is in use"
                )
            self._pages.give_up()
            self._begin_weights(backend, adapter, runs)
        except CannotMerge:
            self._store.let_go(adapter)
            raise
        self.shadowed, self.is_under_way, self._runs, self._spent, self._uses = adapter, True, runs[::-1], 0.0, 0
        self._take_runs(0.0)

    def _begin_weights(self, backend: ShadowBackend, adapter: Adapter, runs: list[range]) -> None:
        """Have the backend begin. Raises CannotMerge; then the backend has nothing of the adapter."""
        try:
            with self._refusing(adapter):
                backend.begin(adapter, runs)
        except CannotMerge:
            backend.drop()
            raise

    @contextmanager
    def _refusing(self, adapter: Adapter) -> Iterator[None]:
        """Raises CannotMerge for whatever is raised inside but the loss of an executor, and remembers it: steps go on
        without merged weights.
        """
        try:
            yield
        except ExecutorLost:
            raise
        except CannotMerge as error:
            self._refused[adapter] = str(error)
            raise
        except Exception as error:
            logger.exception("merging %r failed", adapter)
            self._refused[adapter] = f"merging it failed: {type(error).__name__}: {error}"
            raise CannotMerge(self._refused[adapter]) from error

    def _take_runs(self, most: float) -> None:
        """Take more of the runs, for `most` seconds or until something had to be evicted from one; give the shadow up
        where one is in use by now.
        """
        began, evicted, cleared = self._clock(), 0, []
        while self._runs and (not evicted or self._clock() - began < most):
            if (num_pages := self._reclaimer.clear(self._runs[-1])) is None:
                self._retry_at = self._clock() + RETRY_SECONDS
                self._pages.give_up()
                return
            evicted += num_pages
            cleared.append(self._runs.pop())
        if cleared:
            self._pages.take(cleared)

    def _switch_on(self, adapter: Adapter) -> None:
        self._store.hold(adapter)
        self._pages.use()
        self.merged = adapter
        self._uses += 1
        self.num_switches += 1

    def leave(self, adapter: Adapter) -> None:
        """Give the shadow up if it is of an adapter that is about to lose its pages or its name."""
        if adapter is self.shadowed:
            self._pages.give_up()

    def _forget(self) -> None:
        """The pages are gone, if there were any."""
        if self.shadowed is None:
            return
        adapter, is_held = self.shadowed, self.merged is not None or self.is_under_way
        self.num_switches += self.merged is not None
        self.merged = self.shadowed = None
        self.is_under_way, self._runs = False, []
        if self._backend is not None:
            self._backend.drop()
        if is_held:
            self._store.let_go(adapter)


def _is_complete(adapter: Adapter) -> bool:
    return bool(adapter.pages) and adapter.transfer is None
