"""Piecewise CUDA graphs: steps with prompts, and decoding sequences among them, captured by number of tokens.

Tests: tests/core/executors/test_cuda_interpreted.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...graphs.buffers import StaticColumns, num_columns, split_columns
from ...graphs.device import CudaDevice
from ...graphs.runner import NO_TAIL, USUAL_ROOM, GraphRunner, StepForm, StepMode, StepPart
from ...memory.adapters.adapter import Adapter
from ...ops.attention.attention import GroupedAttention
from ...ops.lora.sgmv_tiles import MERGED_TERMS
from ..model.batch import RowBackends, StepBatch, StepStates
from ..model.decoder import DecoderModel
from ..model.lora.lora_launches import LoraLaunches
from ..model.lora.lora_state_cuda import CudaLoraState
from ..model.program.torch_step import Batch, Residual
from .cuda_merged import MERGED_MODES, MergedGraphs

#: Tokens of the smallest bucket, below which reading the weights sets a step's time; and between two buckets.
_LEAST, _STEP = 32, 64

#: Launches of a step's adapters; None if no sequence has one.
Lora = LoraLaunches | None

#: Forms of steps that are captured ahead.
AHEAD = tuple(
    StepForm(mode, StepPart.PIECES, room=room)
    for mode, room in ((StepMode.BASE, USUAL_ROOM), (StepMode.LORA, USUAL_ROOM), (StepMode.LORA, NO_TAIL))
)


def token_buckets(most: int) -> tuple[int, ...]:
    """32, 64, 128, 192, … ending exactly at `most`; empty for 0."""
    sizes = {_LEAST, most, *range(_STEP, most, _STEP)}
    return tuple(sorted(size for size in sizes if 0 < size <= most))


class PiecewiseSteps:
    """Pads a step to a bucket of tokens and computes it in pieces, with the layers' mixers between them.

    There is one piece before each layer's mixer and one after the last. Mixers (attention, recurrent ones) run for
    the step's own sequences and cover only its tokens, as in any step.

    A piece reads only static buffers, so it can be captured. It depends only on its bucket, so captured and eager
    pieces give the same bits. The first is not replayed in a step whose adapters change embeddings. Padding tokens are
    token 0 at position 0 of the dummy page, without an adapter and with zeros for a mixer's output. They don't affect
    the bits of other tokens.
    """

    def __init__(
        self,
        decoder: DecoderModel,
        device: CudaDevice,
        attention: GroupedAttention,
        lora: CudaLoraState,
        columns: StaticColumns,
        sizes: Sequence[int],
    ) -> None:
        """attention: for sequences of any length. columns: a step's token ids, positions, offsets and pages. sizes:
        buckets in rising order; may be empty.
        """
        self._decoder, self._device, self._attention, self._lora = decoder, device, attention, lora
        self._columns, self.sizes = columns, sizes
        self._num_columns = num_columns(decoder.arena.layout.pages_per_block)
        self._flow = decoder.new_flow(max(sizes, default=0))
        self._num_tokens = 0  # of the current step
        self._states: StepStates | None = None
        self._captures = False
        self._launches = {size: lora.padded(size) for size in sizes}
        self._mixture_launches = {size: lora.padded(size, MERGED_TERMS) for size in sizes}
        self.backends = RowBackends()
        """The backends of GEMMs by a step's tokens."""
        self._first: Callable[[], None] | None = None  # of the current step, if it is not the captured one
        self.graphs: GraphRunner[None] = GraphRunner(self.capture, lambda: device.memory()[0])

    def bucket(self, tokens: int) -> int:
        """Return the smallest bucket that holds so many tokens; one must exist."""
        return next(size for size in self.sizes if size >= tokens)

    def begin(
        self,
        bucket: int,
        adapters: Sequence[Adapter],
        lora_indices: Sequence[int],
        lengths: Sequence[int],
        merged: Adapter | None = None,
    ) -> Lora:
        """Write a step's adapter tables; return its launches. merged: the adapter added to its weights."""
        if not adapters and merged is None:
            return None
        captured = (self._launches if merged is None else self._mixture_launches)[bucket]
        return self._lora.begin_padded(adapters, lora_indices, lengths, captured, merged)

    def run(
        self,
        bucket: int,
        num_tokens: int,
        lora: Lora,
        states: StepStates | None = None,
        merged: MergedGraphs | None = None,
    ) -> Residual:
        """Compute a step with inputs in `columns`, up to the residual stream after the last layer.

        states: see `StepBatch`. merged: graphs for the merged weights, if the step uses them.
        """
        flow, is_merged = self._flow.of(bucket), merged is not None
        flow.pad(num_tokens)
        self._num_tokens, self._states = num_tokens, states
        if self._captures and (lora is None or lora.eager is None):
            if lora is not None and self._lora.of_model.segments.rows:
                (self._first, *_), _ = self._pieces(bucket, lora, merged=is_merged)
            (self.graphs if merged is None else merged).replay(bucket, _form(lora, is_merged=is_merged))
            self._first = None
        else:
            self._run(*self._pieces(bucket, lora, merged=is_merged))
        return Residual(flow.x)

    def allow_captures(self) -> None:
        """Capture from now on: the arena is now the final one."""
        self._captures = True

    def prepare(self, bucket: int) -> None:
        """Make a bucket's buffers and the adapter tables hold a step without sequences."""
        self._columns.view(self._num_columns, bucket).zero_()
        self._lora.rest()

    def _pieces(self, bucket: int, lora: Lora, *, merged: bool) -> tuple[list[Callable[[], None]], Batch]:
        """A bucket's pieces, and the batch that they are of."""
        columns = self._columns.view(self._num_columns, bucket)
        token_ids, positions, offset, page = split_columns(columns[:, :bucket])
        batch = StepBatch(
            token_ids=token_ids,
            positions=positions,
            offset=offset,
            page=page,
            attention=self._attention,
            lora=lora,
            merged=merged,
            backends=self.backends.of(bucket),
        )
        flow = self._flow.of(bucket)
        count = len(self._decoder.layers_of_mixers) + 1
        pieces = [partial(self._decoder.piece, index, batch, flow) for index in range(count)]
        return pieces, batch

    def _run(self, pieces: Sequence[Callable[[], None]], batch: Batch) -> None:
        """Run all pieces, with mixers between them. Before each piece, wait for that layer of adapters being loaded:
        in a step without any, the waits of the last step with adapters don't apply.
        """
        flow, first, has_lora = self._flow.of(self._num_tokens), self._first, batch.lora is not None
        for index, (layer, piece) in enumerate(zip(self._decoder.layers_of_mixers, pieces, strict=False)):
            if has_lora:
                self._lora.wait(layer)
            (piece if index or first is None else first)()
            self._decoder.mix(index, batch, self._states, flow)
        pieces[-1]()

    def capture(self, bucket: int, form: StepForm) -> Callable[[], None]:
        """Capture a bucket's pieces; see `GraphRunner`."""
        launches = self._mixture_launches if form.mode is StepMode.MIXTURE else self._launches
        has_lora = form.mode in (StepMode.LORA, StepMode.MIXTURE)
        lora = launches[bucket].variant(form.scales, form.room) if has_lora else None
        pieces, batch = self._pieces(bucket, lora, merged=form.mode in MERGED_MODES)
        return partial(self._run, [self._device.capture(piece) for piece in pieces], batch)


def _form(lora: Lora, *, is_merged: bool) -> StepForm:
    """The form of a step that may be captured."""
    if lora is None:
        return StepForm(StepMode.MERGED if is_merged else StepMode.BASE, StepPart.PIECES)
    mode = StepMode.MIXTURE if is_merged else StepMode.LORA
    return StepForm(mode, StepPart.PIECES, lora.scales, lora.room)
