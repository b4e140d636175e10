"""Merged mode on a GPU: shadow weights made on the device, and graphs of steps that have their places in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from ...graphs.runner import CapturedStep, GraphRunner, StepMode
from ...memory.pages.arena import Arena
from ..model.batch import LoraState
from ..model.decoder import DecoderModel
from ..model.shadow import Places, ShadowWeights

#: Modes that steps with shadow weights are captured in.
MERGED_MODES = (StepMode.MERGED, StepMode.MIXTURE)

#: Number of places to keep graphs for: adapters that target other projections than the last one have others.
KEPT_PLACES = 2


class PlacedGraphs:
    """Graphs of merged steps for the last few places of shadow weights.

    A graph has the addresses of its weights in it. A shadow is therefore made where the last one of the same matrices
    was, so that merging another adapter captures nothing; where these pages can't be had, graphs are captured anew.
    """

    def __init__(
        self,
        capture: Callable[[int, StepMode], Callable[[], None]],
        prepare: Callable[[int], None],
        ahead: Sequence[int],
    ) -> None:
        """prepare: has a bucket's buffers hold a step without rows. ahead: the buckets to capture before the first step
        needs them, from the largest down.
        """
        self._capture, self._prepare = capture, prepare
        self._keys = [(bucket, mode) for bucket in ahead for mode in MERGED_MODES]
        self._runners: OrderedDict[Places, GraphRunner[None]] = OrderedDict()  # the last used last
        self._current: GraphRunner[None] | None = None
        self._left: list[tuple[int, StepMode]] = []

    @property
    def places(self) -> Sequence[Places]:
        """Places with graphs, the last used first."""
        return [*reversed(self._runners)]

    @property
    def report(self) -> list[CapturedStep]:
        """The captured buckets and modes of all places."""
        return [step for runner in self._runners.values() for step in runner.report]

    @property
    def num_left(self) -> int:
        """Steps that are yet to be captured ahead with the current places."""
        return len(self._left)

    def use(self, places: Places) -> None:
        """Go by these places from now on."""
        runner = self._runners.pop(places, None) or GraphRunner(self._capture)
        while len(self._runners) >= KEPT_PLACES:
            self._runners.popitem(last=False)[1].close()
        self._runners[places] = self._current = runner
        self._left = [key for key in self._keys if key not in runner.keys]

    def capture_next(self) -> None:
        """Capture one more of the steps that are left."""
        bucket, mode = self._left.pop(0)
        self._prepare(bucket)
        self._of_now().capture(bucket, mode)

    def replay(self, bucket: int, mode: StepMode) -> None:
        """Run a step with the weights in the current places."""
        self._of_now().replay(bucket, mode)

    def close(self) -> None:
        """Give up all graphs, and their owner's functions, which have the owner."""
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        self._current, self._left = None, []
        del self._capture, self._prepare

    def _of_now(self) -> GraphRunner[None]:
        if self._current is None:
            raise RuntimeError("a merged step is asked for, and no adapter has been merged")
        return self._current


class CudaShadow(ShadowWeights):
    """Shadow weights on a GPU: work runs in stream order with the steps; a fatal device error raises ExecutorLost."""

    def __init__(
        self,
        model: DecoderModel,
        arena: Arena,
        lora: LoraState,
        graphs: PlacedGraphs,
        scope: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """scope: of work on the device."""
        super().__init__(model, arena, lora, graphs)
        self._scope = scope

    def advance(self, max_seconds: float) -> bool:
        """See `ShadowWeights.advance`."""
        with self._scope(), torch.inference_mode():
            return super().advance(max_seconds)
