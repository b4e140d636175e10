"""Steps on a CPU: ragged steps computed directly, decode steps in static buffers; and how logits become tokens.

The native decoder keeps few logits and samples plain requests itself; PyTorch's operators give all logits.

Tests: tests/core/executors/test_cpu_executor.py, tests/core/test_parity.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from ...graphs.buffers import DecodeBuffers
from ...graphs.runner import GraphRunner, StepMode
from ...memory.pages.layout import PageLayout
from ...memory.pages.pool import PagePool
from ...ops.attention import GroupedAttention
from ...ops.native import NativeRows
from ...ops.sampling import TorchSampling, greedy
from ..model.batch import LoraState, RowPlan, StepBatch, ragged_batch
from ..model.decoder import DecoderModel
from ..model.native_decoder import NativeDecoderModel
from ..model.paged_states import PagedStates
from ..model.sampler import RowLogits, Sampling, needs_logits, plain_row_params
from ..requests.types import StepPlan, StepResult
from .lora_offload import LoraOffload

A = TypeVar("A", bound=RowPlan)


class Sample(Protocol):
    """Samples the tokens of a step; see `sample_tokens`."""

    def __call__(
        self, plan: StepPlan, argmax: Sequence[int], logits: RowLogits, chosen: Collection[int] = ()
    ) -> StepResult: ...


class _Decoder(Protocol[A]):
    """A decoder, with its own form of attention."""

    def new_attention(self) -> A: ...

    def new_states(self) -> PagedStates | None: ...

    def forward(self, batch: StepBatch[A, LoraState], /) -> torch.Tensor: ...


class CpuSteps(ABC, Generic[A]):
    """Computes the steps of a decoder: ragged steps directly, decode steps in the static buffers of their bucket."""

    sampling: Sampling

    def __init__(
        self, decoder: _Decoder[A], lora: LoraState, layout: PageLayout, sizes: Sequence[int], max_model_len: int
    ) -> None:
        """sizes: of the buckets."""
        self._computing = decoder
        self._lora = lora
        self._layout = layout
        self._eager_attention = decoder.new_attention()
        self._buffers = DecodeBuffers(
            sizes, layout.table_width(max_model_len), layout.block_tokens, PagePool.DUMMY, layout.pages_per_block
        )
        self._states = decoder.new_states()
        self._bucket_attention = {size: decoder.new_attention() for size in sizes}
        self.graphs: GraphRunner[torch.Tensor] = GraphRunner(self._capture)

    @abstractmethod
    def execute(self, plan: StepPlan, sample: Sample) -> StepResult:
        """Compute a step and sample its tokens."""

    @abstractmethod
    def compute(self, plan: StepPlan, kept: Sequence[int]) -> None:
        """Compute a step of which the first rank samples. kept: entries whose logits it wants whole."""

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Logits of a step's entries."""
        return self._ragged(plan) if plan.bucket is None else self._decode(plan, plan.bucket)

    def close(self) -> None:
        self.graphs.close()

    def _ragged(self, plan: StepPlan) -> torch.Tensor:
        lora = None
        if plan.mode is not StepMode.BASE:
            lora_indices, lengths = (
                [row.lora_index for row in plan.sequences],
                [len(row.tokens) for row in plan.sequences],
            )
            self._lora.set_step(plan.adapters, lora_indices, lengths, plan.merged)
            lora = self._lora
        batch = ragged_batch(
            plan.sequences,
            self._layout,
            PagePool.DUMMY,
            attention=self._eager_attention,
            lora=lora,
            merged=plan.merged is not None,
            states=self._states,
        )
        return self._computing.forward(batch)

    def _decode(self, plan: StepPlan, bucket: int) -> torch.Tensor:
        """Fill the bucket's static buffers, then replay its captured step."""
        rows = plan.sequences
        views = self._buffers.fill(
            bucket, [row.tokens[0] for row in rows], [row.start for row in rows], [row.pages for row in rows]
        )
        self._bucket_attention[bucket].plan(range(bucket + 1), views.page_table, views.kv_lens)
        if self._states is not None:
            self._states.set_step(rows, range(bucket + 1))
        if plan.mode is StepMode.BASE:
            return self.graphs.replay(bucket, StepMode.BASE)
        self._lora.set_step(plan.adapters, [row.lora_index for row in rows], [1] * len(rows), plan.merged)
        return self.graphs.replay(bucket, plan.mode)

    def _capture(self, bucket: int, mode: StepMode) -> Callable[[], torch.Tensor]:
        views = self._buffers.views[bucket]
        batch = StepBatch(
            token_ids=views.token_ids,
            positions=views.positions,
            offset=views.offset,
            page=views.page,
            attention=self._bucket_attention[bucket],
            lora=None if mode is StepMode.BASE else self._lora,
            merged=mode is StepMode.MERGED,
            states=self._states,
        )
        decoder = self._computing
        return lambda: decoder.forward(batch)


class TorchSteps(CpuSteps[GroupedAttention]):
    """Steps on PyTorch's operators, which give every entry's logits."""

    def __init__(
        self, decoder: DecoderModel, lora: LoraState, layout: PageLayout, sizes: Sequence[int], max_model_len: int
    ) -> None:
        super().__init__(decoder, lora, layout, sizes, max_model_len)
        self._decoder, self.sampling = decoder, TorchSampling()

    def execute(self, plan: StepPlan, sample: Sample) -> StepResult:
        asking = [index for index, row in enumerate(plan.sequences) if needs_logits(row)]
        with torch.inference_mode():
            logits = self._decoder.gathered(self.forward(plan))
            return sample(plan, greedy(logits), RowLogits(logits, {index: index for index in asking}))

    def compute(self, plan: StepPlan, kept: Sequence[int]) -> None:
        self._decoder.gathered(self.forward(plan))


class NativeSteps(CpuSteps[NativeRows]):
    """Steps of the native decoder, which samples plain requests and keeps the logits of as few entries as possible."""

    def __init__(
        self,
        decoder: NativeDecoderModel,
        lora: LoraState,
        layout: PageLayout,
        sizes: Sequence[int],
        max_model_len: int,
        *,
        samples: bool,
        offload: LoraOffload | None = None,
    ) -> None:
        """samples: False on TP ranks: each has only some columns of the logits. offload: computes LoRA of incoming
        adapters in other processes.
        """
        super().__init__(decoder, lora, layout, sizes, max_model_len)
        self._decoder, self._samples, self.sampling = decoder, samples, decoder.sampling
        self._offload = offload
        if offload is not None:
            decoder.offload(offload)

    def execute(self, plan: StepPlan, sample: Sample) -> StepResult:
        rows = plan.sequences
        asking = [index for index, row in enumerate(rows) if needs_logits(row)]
        plain = asking if self._samples else []
        sampled = {index: row_params for index in plain if (row_params := plain_row_params(rows[index]))}
        kept = [
            index
            for index in asking
            if index not in sampled or sampled[index].cuts or rows[index].params.logprobs is not None
        ]
        self._decoder.keep_logits(kept, sampled)
        logits = self.forward(plan) if self._offload is None else self._offload.run(self.forward, plan)
        at = {index: place for place, index in enumerate(kept)}
        return sample(plan, self._decoder.best, RowLogits(logits, at), sampled)

    def compute(self, plan: StepPlan, kept: Sequence[int]) -> None:
        self._decoder.keep_logits(kept)
        self.forward(plan)
