"""Merged mode on a GPU: merged weights made on the device, and graphs of the steps that use them.

Tests: tests/core/executors/test_cuda_interpreted.py
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress

import torch

from ...graphs.runner import CapturedStep, GraphRunner, LaunchSize, StepForm, StepMode
from ...memory.pages.adapter_layout import AdapterLayout, AdapterPart
from ...memory.pages.arena import Arena
from ...ops.lora.sgmv import AdapterRows
from ..model.decoder import DecoderModel
from ..model.lora.lora_state import LoraState, rows_in
from ..model.program.torch_ops import kind_of
from ..model.weights.shadow import Places, ShadowWeights, changes
from ..model.weights.slots import MERGED_MATRICES
from ..requests.types import CannotMerge

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


#: Makes the parts and the layout of an adapter of a rank that changes everything: `CudaLoraState.whole`.
Whole = Callable[[int], tuple[tuple[AdapterPart, ...], AdapterLayout]]

#: The least rank that is rehearsed; a library's kernel for fewer terms is that for so many.
_LEAST_RANK = 8


def _ranks(most: int) -> Iterator[int]:
    """Powers of 2 up to `most`, and `most`."""
    rank = _LEAST_RANK
    while rank < most:
        yield rank
        rank *= 2
    yield most


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

    def rehearse(self, whole: Whole, max_rank: int) -> None:
        """Make a matrix of each kind with adapters of zeros, of ranks up to `max_rank`, in the arena's pages, which
        hold nothing yet and are zeroed.

        So libraries load their kernels, and torch takes the memory that sums need, before the first step, and not
        between two steps of the first merge. What does not fit in the arena is left out.
        """
        if self._arena.pages.is_meta:  # of a stand-in for a GPU, on which nothing is computed or read
            return
        kinds: dict[tuple[torch.Size, str], tuple[int, int]] = {}
        for layer, group in itertools.product(range(len(self._model.layers)), MERGED_MATRICES):
            if (origin := self._model.layers[layer].get(MERGED_MATRICES[group])) is not None:
                kinds.setdefault((origin.shape, kind_of(origin).form), (layer, group))
        for rank in _ranks(max_rank):
            parts, layout = whole(rank)
            pages = list(range(layout.num_pages))
            rows = [rows_in(part, place, pages) for part, place in zip(parts, layout.parts, strict=True)]
            for at in kinds.values():
                with suppress(CannotMerge):
                    self._rehearse(*at, rows, self._arena.pages[len(pages) :].view(-1))

    def _rehearse(self, layer: int, group: int, rows: Sequence[AdapterRows], free: torch.Tensor) -> None:
        """Make a matrix with an adapter's parts in free memory, if it has room."""
        shape, dtype = self._model.merged_form(layer, group)
        changed = [row for row in rows if changes(row, layer, self._lora.modules(layer, group))]
        if changed and shape.numel() <= (elems := free.view(dtype)).numel():
            place = elems[: shape.numel()].view(shape)
            self._model.merge(layer, group, changed, self._origin(layer, group), place)
            place.zero_()

    def advance(self, max_seconds: float) -> bool:
        """See `ShadowWeights.advance`."""
        with self._scope(), torch.inference_mode():
            return super().advance(max_seconds)
