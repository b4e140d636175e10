"""Merged mode on a GPU: merged weights made on the device, and graphs of the steps that use them.

Tests: tests/core/executors/test_cuda_interpreted.py
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress

import numpy as np
import torch

from ...graphs.runner import NO_TAIL, CapturedStep, GraphRunner, LaunchSize, StepForm, StepMode, StepPart
from ...memory.pages.adapter_layout import AdapterLayout, AdapterPart
from ...memory.pages.arena import Arena
from ...memory.pages.pool import PagePool
from ...memory.pages.runs import BLOCKED, place_runs
from ...ops.lora.sgmv import AdapterRows
from ..model.decoder import DecoderModel
from ..model.lora.lora_state import LoraState, rows_in
from ..model.program.torch_gemm import kind_of
from ..model.weights.shadow import Addresses, ShadowWeights, addresses_of, changes
from ..requests.types import CannotMerge

logger = logging.getLogger(__name__)

#: Modes in which steps with merged weights are captured.
MERGED_MODES = (StepMode.MERGED, StepMode.MIXTURE)

#: Forms of decode steps that are captured once weights are merged.
MERGED_FORMS = (StepForm(StepMode.MERGED), StepForm(StepMode.MIXTURE), StepForm(StepMode.MIXTURE, room=LaunchSize(1)))

#: Forms of steps with prompts, which are captured for the addresses of the start alone: at others when the first such
#: step runs, as each takes a graph for every layer.
MERGED_PIECES = (
    StepForm(StepMode.MERGED, StepPart.PIECES),
    StepForm(StepMode.MIXTURE, StepPart.PIECES),
    StepForm(StepMode.MIXTURE, StepPart.PIECES, room=NO_TAIL),
)

#: The products whose merged steps are captured at the start: all (None), as most adapters have them, and queries, keys
#: and values alone, which PEFT chooses for many families.
_AHEAD = None, "qkv"

#: Number of address sets to keep graphs for: adapters that target other projections than the last one need other sets.
KEPT_ADDRESSES = 2


class MergedGraphs:
    """Graphs of merged steps for the last few sets of addresses of merged weights.

    A graph contains the addresses of its weights. Therefore merged weights are made at the addresses of the previous
    ones of the same matrices, and merging another adapter captures nothing. If these pages can't be used, graphs are
    captured anew.
    """

    def __init__(
        self,
        capture: Callable[[int, StepForm], Callable[[], None]],
        prepare: Callable[[int, StepForm], None],
        ahead: Sequence[tuple[int, StepForm]],
    ) -> None:
        """prepare: fills the buffers of a bucket and a form with a step without sequences. ahead: what to capture
        before the first step needs it, the largest buckets first.
        """
        self._capture, self._prepare, self._keys = capture, prepare, ahead
        self._runners: OrderedDict[Addresses, GraphRunner[None]] = OrderedDict()  # most recently used last
        self._current: GraphRunner[None] | None = None
        self._left: list[tuple[int, StepForm]] = []

    @property
    def addresses(self) -> Sequence[Addresses]:
        """Sets of addresses that have graphs, most recently used first."""
        return [*reversed(self._runners)]

    @property
    def report(self) -> list[CapturedStep]:
        """The captured buckets and modes for all addresses."""
        return [step for runner in self._runners.values() for step in runner.report]

    @property
    def num_left(self) -> int:
        """Number of steps still to be captured ahead for the current addresses."""
        return len(self._left)

    def use(self, addresses: Addresses) -> None:
        """Use these addresses from now on."""
        self._use(addresses, self._keys)

    def capture_all(self, addresses: Addresses, more: Sequence[tuple[int, StepForm]]) -> None:
        """Capture the steps of these addresses now, and `more` than is captured ahead between steps."""
        self._use(addresses, [*self._keys, *more])
        while self._left:
            self.capture_next()

    def _use(self, addresses: Addresses, keys: Sequence[tuple[int, StepForm]]) -> None:
        runner = self._runners.pop(addresses, None) or GraphRunner(self._capture)
        while len(self._runners) >= KEPT_ADDRESSES:
            self._runners.popitem(last=False)[1].close()
        self._runners[addresses] = self._current = runner
        self._left = [key for key in keys if key not in runner.keys]

    def capture_next(self) -> None:
        """Capture the next of the remaining steps."""
        bucket, form = self._left.pop(0)
        self._prepare(bucket, form)
        self._of_now().capture(bucket, form)

    def replay(self, bucket: int, form: StepForm) -> None:
        """Run a step with the weights at the current addresses."""
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
        graphs: MergedGraphs,
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
        kinds: dict[tuple[torch.Size, str], tuple[int, str]] = {}
        for at in self._mergeable():
            origin = self._origin(*at)
            kinds.setdefault((origin.shape, kind_of(origin).form), at)
        for rank in _ranks(max_rank):
            parts, layout = whole(rank)
            pages = list(range(layout.num_pages))
            rows = [rows_in(part, at, pages) for part, at in zip(parts, layout.parts, strict=True)]
            for at in kinds.values():
                with suppress(CannotMerge):
                    self._rehearse(*at, rows, self._arena.pages[len(pages) :].view(-1))

    def _rehearse(self, layer: int, product: str, rows: Sequence[AdapterRows], free: torch.Tensor) -> None:
        """Make a matrix with an adapter's parts in free memory, if it has room."""
        shape, dtype = self._model.merged_form(layer, product)
        changed = [row for row in rows if changes(row, layer, self._lora.modules(layer, product))]
        if changed and shape.numel() <= (elems := free.view(dtype)).numel():
            matrix = elems[: shape.numel()].view(shape)
            self._model.merge(layer, product, changed, self._origin(layer, product), matrix)
            matrix.zero_()

    def capture_ahead(self, graphs: MergedGraphs, more: Sequence[tuple[int, StepForm]]) -> None:
        """Capture merged steps with weights in the pages that a first merge takes: the last ones, which are allocated
        last. While these pages can be had, merging an adapter of the same matrices captures nothing between steps.

        Nothing may be in the arena. more: steps to capture beyond those that are captured between steps.
        """
        for product in _AHEAD:
            targets = [at for at in self._mergeable() if product in (None, at[1])]
            try:
                self._capture_ahead(graphs, targets, more)
            except CannotMerge as error:
                logger.info("merged steps are not captured at the start: %s", error)
            except Exception:  # as while an adapter is merged: steps go on without
                logger.exception("merged steps could not be captured at the start")
        self._model.use_merged(None)

    def _capture_ahead(
        self, graphs: MergedGraphs, targets: Sequence[tuple[int, str]], more: Sequence[tuple[int, StepForm]]
    ) -> None:
        """Capture the steps of one set of matrices, if the arena has room for them."""
        costs = np.zeros(self._arena.num_pages, np.uint32)
        costs[PagePool.DUMMY] = BLOCKED
        runs = place_runs(self._sizes(targets), costs) if targets else None
        if runs is None:
            return
        layers = [*self._model.layers]
        for (layer, product), run in zip(targets, runs, strict=True):
            layers[layer] = {**layers[layer], product: self._matrix(layer, product, run)}
        self._model.use_merged(layers)
        graphs.capture_all(addresses_of(targets, runs), more)

    def _mergeable(self) -> list[tuple[int, str]]:
        """Layer and product of each matrix that an adapter may change."""
        return [(layer, product) for layer in range(len(self._model.layers)) for product in self._lora.merged(layer)]

    def advance(self, max_seconds: float) -> bool:
        """See `ShadowWeights.advance`."""
        with self._scope(), torch.inference_mode():
            return super().advance(max_seconds)
