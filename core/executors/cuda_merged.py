"""Merged mode on a GPU: merged weights made on the device, and graphs of the steps that use them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from ...graphs.runner import CapturedStep, GraphRunner, LaunchSize, StepForm, StepMode
from ...memory.pages.arena import Arena
from ..model.decoder import DecoderModel
from ..model.lora.lora_state import LoraState
from ..model.weights.shadow import Places, ShadowWeights

#: Modes in which steps with merged weights are captured.
MERGED_MODES = (StepMode.MERGED, StepMode.MIXTURE)

#: Forms of decode steps that are captured once weights are merged.
MERGED_FORMS = (StepForm(StepMode.MERGED), StepForm(StepMode.MIXTURE), StepForm(StepMode.MIXTURE, room=LaunchSize(1)))

#: Number of address sets to keep graphs for: adapters that target other projections than the last one need other sets.
KEPT_PLACES = 2


class PlacedGraphs:
    """Graphs of merged steps for the last few places (sets of addresses) of merged weights.

    A graph contains the addresses of its weights. Therefore merged weights are made at the addresses of the previous
    ones of the same matrices, and merging another adapter captures nothing. If these pages can't be used, graphs are
    captured anew.
    """

    def __init__(
        self,
        capture: Callable[[int, StepForm], Callable[[], None]],
        prepare: Callable[[int], None],
        ahead: Sequence[int],
    ) -> None:
        """prepare: fills a bucket's buffers with a step without sequences. ahead: the buckets to capture before the
        first step needs them, largest first.
        """
        self._capture, self._prepare = capture, prepare
        self._keys = [(bucket, form) for bucket in ahead for form in MERGED_FORMS]
        self._runners: OrderedDict[Places, GraphRunner[None]] = OrderedDict()  # most recently used last
        self._current: GraphRunner[None] | None = None
        self._left: list[tuple[int, StepForm]] = []

    @property
    def places(self) -> Sequence[Places]:
        """Places that have graphs, most recently used first."""
        return [*reversed(self._runners)]

    @property
    def report(self) -> list[CapturedStep]:
        """The captured buckets and modes for all places."""
        return [step for runner in self._runners.values() for step in runner.report]

    @property
    def num_left(self) -> int:
        """Number of steps still to be captured ahead for the current places."""
        return len(self._left)

    def use(self, places: Places) -> None:
        """Use these places from now on."""
        runner = self._runners.pop(places, None) or GraphRunner(self._capture)
        while len(self._runners) >= KEPT_PLACES:
            self._runners.popitem(last=False)[1].close()
        self._runners[places] = self._current = runner
        self._left = [key for key in self._keys if key not in runner.keys]

    def capture_next(self) -> None:
        """Capture the next of the remaining steps."""
        bucket, form = self._left.pop(0)
        self._prepare(bucket)
        self._of_now().capture(bucket, form)

    def replay(self, bucket: int, form: StepForm) -> None:
        """Run a step with the weights in the current places."""
        self._of_now().replay(bucket, form)

    def close(self) -> None:
        """Drop all graphs and the owner's functions, which reference the owner."""
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        self._current, self._left = None, []
        del self._capture, self._prepare

    def _of_now(self) -> GraphRunner[None]:
        if self._current is None:
            raise RuntimeError("a merged step was requested, but no adapter has been merged")
        return self._current


class CudaShadow(ShadowWeights):
    """Merged weights on a GPU: work runs in stream order with the steps; a fatal device error raises ExecutorLost."""

    def __init__(
        self,
        model: DecoderModel,
        arena: Arena,
        lora: LoraState,
        graphs: PlacedGraphs,
        scope: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """scope: context for work on the device."""
        super().__init__(model, arena, lora, graphs)
        self._scope = scope

    def advance(self, max_seconds: float) -> bool:
        """See `ShadowWeights.advance`."""
        with self._scope(), torch.inference_mode():
            return super().advance(max_seconds)
