"""Piecewise CUDA graphs: steps with prompts, and decoding sequences among them, captured by number of tokens.

Tests: tests/core/executors/test_cuda_interpreted.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ...graphs.buffers import num_columns, split_columns
from ...graphs.device import CudaDevice
from ...graphs.runner import GraphRunner, StepMode
from ...memory.adapters.adapter import Adapter
from ...ops.attention import GroupedAttention
from ..model.batch import StepBatch, StepStates, column_width
from ..model.decoder import DecoderModel
from ..model.layer import Residual
from ..model.lora_state_cuda import APPLIED, CudaLoraState, LoraLaunches

#: Tokens of the smallest bucket, below which reading the weights sets a step's time; and between two buckets.
_LEAST, _STEP = 32, 64

#: Launches of a step's adapters; None if no sequence has one.
Lora = LoraLaunches | None

#: The modes in which steps are captured ahead.
MODES = (StepMode.BASE, StepMode.LORA)


def token_buckets(most: int) -> tuple[int, ...]:
    """32, 64, 128, 192, … ending exactly at `most`; empty for 0."""
    sizes = {_LEAST, most, *range(_STEP, most, _STEP)}
    return tuple(sorted(size for size in sizes if 0 < size <= most))


class PiecewiseSteps:
    """Pads a step to a bucket of tokens and computes it in pieces, with the layers' mixers between them.

    There is one piece before each layer's mixer and one after the last. Mixers (attention, Gated DeltaNet) are run for
    the step's own sequences and cover only its tokens, as in any step.

    A piece reads only static buffers, so it can be captured. It depends only on its bucket, so captured and eager
    pieces give the same bits. Padding tokens are token 0 at position 0 of the dummy page, without an adapter and with
    zeros for a mixer's output. They don't affect the bits of other tokens.
    """

    def __init__(
        self,
        decoder: DecoderModel,
        device: CudaDevice,
        attention: GroupedAttention,
        lora: CudaLoraState,
        columns: torch.Tensor,
        sizes: Sequence[int],
    ) -> None:
        """attention: for sequences of any length. columns: flat int64 buffer for a step's token ids, positions, offsets
        and pages, one after the other, with `column_width(bucket)` values each. sizes: buckets in rising order; may
        be empty.
        """
        self._decoder, self._device, self._attention, self._lora = decoder, device, attention, lora
        self._columns, self.sizes = columns, sizes
        self._groups = decoder.arena.layout.pages_per_block
        self._flow = decoder.new_flow(max(sizes, default=0))
        self._num_tokens = 0  # of the current step
        self._states: StepStates | None = None
        self._captures = False
        self.launches = {size: lora.padded(size) for size in sizes}
        self.graphs: GraphRunner[None] = GraphRunner(self._capture, lambda: device.memory()[0])

    def bucket(self, tokens: int) -> int:
        """Return the smallest bucket that holds so many tokens; one must exist."""
        return next(size for size in self.sizes if size >= tokens)

    def begin(
        self, bucket: int, adapters: Sequence[Adapter], lora_indices: Sequence[int], lengths: Sequence[int]
    ) -> Lora:
        """Write a step's adapter tables; return the launches of its bucket, or others if those have too few tiles."""
        return self._lora.begin_padded(adapters, lora_indices, lengths, self.launches[bucket]) if adapters else None

    def run(self, bucket: int, num_tokens: int, lora: Lora, states: StepStates | None = None) -> Residual:
        """Compute a step with inputs in `columns`, up to the residual stream after the last layer.

        states: see `StepBatch`.
        """
        flow = self._flow.of(bucket)
        for mixed in (flow.attended, flow.delta_out):
            mixed[num_tokens:].zero_()
        self._num_tokens, self._states = num_tokens, states
        mode = next((mode for mode, launches in self._captured(bucket).items() if lora is launches), None)
        if self._captures and mode is not None:
            self.graphs.replay(bucket, mode)
        else:
            self._run(self._pieces(bucket, lora), lora is not None)
        return Residual(flow.rows, self._decoder.config.norm)

    def allow_captures(self) -> None:
        """Capture from now on: the arena is now the final one."""
        self._captures = True

    def prepare(self, bucket: int) -> None:
        """Make a bucket's buffers and the adapter tables hold a step without sequences."""
        self._columns[: num_columns(self._groups) * column_width(bucket)].zero_()
        self._lora.rest()

    def _pieces(self, bucket: int, lora: Lora) -> list[Callable[[], None]]:
        count, width = num_columns(self._groups), column_width(bucket)
        columns = self._columns[: count * width].view(count, width)[:, :bucket]
        token_ids, positions, offset, page = split_columns(columns)
        batch = StepBatch(
            token_ids=token_ids, positions=positions, offset=offset, page=page, attention=self._attention, lora=lora
        )
        flow = self._flow.of(bucket)
        return [partial(self._decoder.piece, index, batch, flow) for index in range(len(self._decoder.layers) + 1)]

    def _run(self, pieces: Sequence[Callable[[], None]], has_lora: bool) -> None:
        """Run all pieces, with mixers between them. Before each piece, wait for that layer of adapters being loaded.

        has_lora: without it, the waits of the last step with adapters don't apply to this step.
        """
        flow = self._flow.of(self._num_tokens)
        for index, piece in enumerate(pieces[:-1]):
            if has_lora:
                self._lora.wait(index)
            piece()
            self._decoder.mix(index, self._attention, self._states, flow)
        pieces[-1]()

    def _captured(self, bucket: int) -> dict[StepMode, Lora]:
        """The launches of a bucket's graphs."""
        lora = self.launches[bucket]
        return {StepMode.BASE: None, StepMode.LORA: lora, StepMode.VECTORS: lora.with_scales(APPLIED)}

    def _capture(self, bucket: int, mode: StepMode) -> Callable[[], None]:
        lora = self._captured(bucket)[mode]
        pieces = self._pieces(bucket, lora)
        return partial(self._run, [self._device.capture(piece) for piece in pieces], lora is not None)
