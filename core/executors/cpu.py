"""The CPU executor: a production backend with the same buckets and static buffers as the CUDA executor.

Tests: tests/core/executors/test_cpu_executor.py, tests/core/test_parity.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

import torch

from ...graphs.buffers import DecodeBuffers, DecodeViews
from ...graphs.runner import DecodeBuckets, GraphRunner, StepForm, StepMode
from ...memory.adapters.adapter import Adapter
from ...memory.pages import hugepages
from ...memory.pages.arena import Arena
from ...memory.pages.layout import PageLayout
from ...memory.pages.pool import PagePool
from ...ops.attention.attention import GroupedAttention
from ...ops.cpu.native import NativeRows
from ...ops.ranks.ranks import Ranks
from ...ops.sampling.sampling import TorchSampling, greedy
from ..config import EngineConfig
from ..model.added_tokens import (
    Run,
    StepLogits,
    adding_tokens,
    part_runs,
    prompt_runs,
    sample_with_added,
    with_added,
)
from ..model.batch import RowPlan, StepBatch, position_shifts, ragged_batch
from ..model.decoder import DecoderModel
from ..model.lora.lora_state import LoraState
from ..model.moe.experts import ExpertKernels
from ..model.paged_states import PagedStates
from ..model.pooling import add_pooled
from ..model.program.ends import cap_of
from ..model.program.native_decoder import NativeDecoderModel
from ..model.program.ops.logits import capped
from ..model.sampler import (
    RowLogits,
    Sampling,
    add_prompt_logprobs,
    adding,
    asking_rows,
    plain_row_params,
    prompt_logprob_slices,
    sample_tokens,
)
from ..model.specs.config import ModelConfig, UnsupportedModel
from ..model.specs.layers import has_axes
from ..model.verification import accept_drafts
from ..model.weights.open_weights import open_weights
from ..model.weights.shadow import ShadowWeights
from ..model.weights.shard import WHOLE, Shard
from ..requests.draft_length import most_logits
from ..requests.types import ScheduledSequence, StepPlan, StepResult, adapter_runs
from .adapters import ModelAdapters
from .base import ModelExecutor
from .cpu_setup import cpu_pages, cpu_threads, of_torch, torch_gemms, use_native, weight_bytes
from .lora_offload import LoraOffload
from .swaps import PageSwaps

A = TypeVar("A", bound=RowPlan)


class CpuExecutor(ModelExecutor):
    """Runs steps on the CPU. Any one thread at a time may use it."""

    start = None  # it computes on the host's processors, so no processor is free to plan the next step meanwhile

    def __init__(self, config: EngineConfig, rank_context: RankContext | None = None) -> None:
        """rank_context: the TP rank whose share of the model it computes, if there are several."""
        threads = cpu_threads(config)
        torch.set_num_threads(threads)
        super().__init__(config, WHOLE if rank_context is None else rank_context.shard)
        dtype, max_model_len = self._dtype, self.model.max_model_len
        native = use_native(config, self.config, dtype)
        products = dtype if native else torch_gemms(config, self.whole, dtype)
        shard, ranks = self.shard, None if rank_context is None else rank_context.ranks
        self.weight_bytes = weight_bytes(config, self, shard, products, native=native)
        self.num_pages = (
            cpu_pages(config, self, self.layout, self.weight_bytes) if rank_context is None else rank_context.num_pages
        )
        self.arena = Arena(
            self.layout, self.num_pages, dtype, "cpu", None if rank_context is None else rank_context.pages(dtype)
        )
        self._offload = None
        if config.offload_workers:
            if not native:
                raise UnsupportedModel(
                    f"offload_workers is {config.offload_workers}, but steps run on torch's operators; "
                    "set it to 0, or use cpu_kernels 'native'"
                )
            self._offload = LoraOffload(config, self.config, dtype)
        self.adapters = ModelAdapters(self.config, self.arena, dtype, base=self.base_weights)
        self.swaps = PageSwaps(self.arena, self.adapters.dma)
        self._lora = LoraState(self.config, self.arena.pages, config.max_load_stall_seconds)
        sizes = DecodeBuckets(config.max_num_seqs, most_logits(config)).sizes
        setup = self._lora, self.layout, sizes, max_model_len
        self.steps: CpuSteps
        with open_weights(
            config.model, self.whole, dtype, load_format=config.load_format, shard=shard, quantiser=self.quantiser
        ) as weights:
            if native:
                self.warn_if_dequantised("the native decoder multiplies", only_float8=True)
                self.decoder = decoder = NativeDecoderModel(
                    self.config,
                    weights,
                    self.arena,
                    max_model_len=max_model_len,
                    threads=threads,
                    ranks=ranks,
                    image_tokens=0 if self.model.why_blind else config.max_num_batched_tokens,
                )
                torch.set_num_threads(1)  # the native decoder does the work; torch's threads would only spin
                if self._offload is not None:
                    self._offload.adapters = self.adapters
                    self._offload.measure()
                    self.cold_starts = self._offload.starts
                self.steps = NativeSteps(decoder, *setup, samples=shard.size == 1, offload=self._offload)
            else:
                self.warn_if_dequantised("PyTorch's operators multiply", of_torch(config, self.config, products))
                self.decoder = decoder = DecoderModel(
                    self.config,
                    weights,
                    self.arena,
                    max_model_len=max_model_len,
                    dtype=products,
                    ranks=ranks,
                    expert_kernels=ExpertKernels.TORCH if config.cpu_kernels == "torch" else ExpertKernels.NATIVE,
                )
                self.steps = TorchSteps(decoder, *setup)
        self.shadow = ShadowWeights(self.decoder, self.arena, self._lora)

    def execute(self, plan: StepPlan) -> StepResult:
        self._check(plan)
        return self.steps.execute(plan, self._sample)

    def compute(self, plan: StepPlan, kept: Sequence[int]) -> list[str]:
        """Compute a step as a rank other than the first, which samples; return the requests with void entries.

        kept: entries for which the first rank wants more logits than the largest.
        """
        self._check(plan)
        with torch.inference_mode():
            self.steps.compute(plan, kept)
            for begin, end in prompt_logprob_slices(plan.sequences, self.model.vocab_size):
                self.decoder.prompt_logits(begin, end)
        return self._lora.late_requests(plan.sequences) if plan.adapters else []

    def _check(self, plan: StepPlan) -> None:
        if plan.merged is not None:
            self.shadow.check(plan.merged)

    def _sample(
        self,
        plan: StepPlan,
        rows: Sequence[ScheduledSequence],
        argmax: Sequence[int],
        logits: RowLogits,
        chosen: Collection[int] = (),
    ) -> StepResult:
        sampling, vocab = self.steps.sampling, self.model.vocab_size
        sample = partial(sample_tokens, eos_token_ids=self.model.eos_token_ids, grammars=self.model.grammars)
        adapters = adding(plan, rows)
        if adapters and logits.at:
            result = sample_with_added(
                rows, adapters, vocab, StepLogits(argmax, logits, chosen), sample=sample, sampling=sampling
            )
        else:
            result = sample(rows, argmax, logits, sampling, chosen=chosen)
        if any(row.wants_prompt_logprobs for row in rows):
            runs = prompt_runs(rows, adapters) if adapters else []
            parted = partial(part_runs, runs, vocab) if runs else None
            add_prompt_logprobs(rows, self.steps.prompt_logits(runs), sampling, vocab, result, parted=parted)
        if any(row.params.pooling is not None for row in rows):
            add_pooled(rows, self.decoder.hidden_states, result)
        if plan.num_drafts:
            accept_drafts(plan, rows, result)
        if plan.adapters:
            for request_id in self._lora.late_requests(plan.sequences):
                result.retract(request_id)
        return result

    @property
    def release_pages(self) -> Callable[[], None]:
        return partial(hugepages.release, self.arena.pages)

    def close(self) -> None:
        self.steps.close()
        self.decoder.close()
        if self._offload is not None:
            self._offload.close()


class SampleStep(Protocol):
    """Samples the tokens of a step; see `sample_tokens`. rows: see `StepPlan.rows_with_logits`."""

    def __call__(
        self,
        plan: StepPlan,
        rows: Sequence[ScheduledSequence],
        argmax: Sequence[int],
        logits: RowLogits,
        chosen: Collection[int] = (),
    ) -> StepResult: ...


class _Decoder(Protocol[A]):
    """A decoder, with its own form of attention."""

    @property
    def config(self) -> ModelConfig: ...

    def new_attention(self) -> A: ...

    def new_states(self) -> PagedStates | None: ...

    def forward(self, batch: StepBatch[A, LoraState], /) -> torch.Tensor: ...


class CpuSteps(ABC, Generic[A]):
    """Computes the steps of a decoder: ragged steps directly, decode steps in the static buffers of their bucket.

    A step with drafts has a bucket of exactly its tokens: capturing one costs nothing here, and padding would.
    """

    sampling: Sampling

    def __init__(
        self, decoder: _Decoder[A], lora: LoraState, layout: PageLayout, sizes: Sequence[int], max_model_len: int
    ) -> None:
        """sizes: of the buckets; the largest has room for every decode step."""
        self._computing = decoder
        self._has_axes = has_axes(decoder.config.layers)
        self._lora = lora
        self._layout = layout
        self._eager_attention = decoder.new_attention()
        self._buffers = DecodeBuffers(
            sizes, layout.table_width(max_model_len), layout.block_tokens, PagePool.DUMMY, layout.pages_per_block
        )
        self._states = decoder.new_states()
        self._bucket_attention: dict[int, A] = {}
        self.graphs: GraphRunner[torch.Tensor] = GraphRunner(self._capture)

    @abstractmethod
    def execute(self, plan: StepPlan, sample: SampleStep) -> StepResult:
        """Compute a step and sample its tokens."""

    @abstractmethod
    def compute(self, plan: StepPlan, kept: Sequence[int]) -> None:
        """Compute a step; the first rank samples its tokens.

        kept: entries whose logits of the whole vocabulary it needs, not of its share alone.
        """

    @abstractmethod
    def prompt_logits(self, runs: Sequence[Run]) -> Callable[[int, int], torch.Tensor]:
        """Return a function that computes logits of a range of the last step's prompt-logprob tokens.

        runs: of all of them, see `prompt_runs`; empty: no adapter adds tokens.
        """

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Logits of a step's entries."""
        return self._ragged(plan) if plan.bucket is None else self._decode(plan, plan.bucket)

    def close(self) -> None:
        self.graphs.close()

    def _ragged(self, plan: StepPlan) -> torch.Tensor:
        lora = None
        if plan.mode is not StepMode.BASE:
            self._lora.set_step(plan.adapters, *adapter_runs(plan.sequences), plan.merged)
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
        batch.look_up(self._computing.config.image_lookup)
        return self._computing.forward(batch)

    def _decode(self, plan: StepPlan, bucket: int) -> torch.Tensor:
        """Fill the bucket's static buffers, then replay its captured step."""
        rows = plan.sequences
        if plan.num_drafts:
            views = self._fill_drafted(bucket, rows)
        else:
            views = self._buffers.fill(
                bucket,
                [row.tokens[0] for row in rows],
                [row.start for row in rows],
                [row.pages for row in rows],
                shifts=position_shifts(rows) if self._has_axes else (),
            )
            self._attention_of(bucket).plan(range(bucket + 1), views.page_table, views.kv_lens)
            if self._states is not None:
                self._states.set_step(rows, range(bucket + 1))
        if plan.mode is StepMode.BASE:
            return self.graphs.replay(bucket, StepForm(StepMode.BASE))
        runs = adapter_runs(rows) if plan.num_drafts else ([row.lora_index for row in rows], [1] * len(rows))
        self._lora.set_step(plan.adapters, *runs, plan.merged)
        return self.graphs.replay(bucket, StepForm(plan.mode))

    def _fill_drafted(self, bucket: int, rows: Sequence[ScheduledSequence]) -> DecodeViews:
        """Fill a bucket for a step with drafts. Attention handles all tokens of a sequence together."""
        lengths = [len(row.tokens) for row in rows]
        views = self._buffers.fill(
            bucket,
            [token for row in rows for token in row.tokens],
            [position for row in rows for position in range(row.start, row.kv_len)],
            [row.pages for row in rows],
            lengths,
            shifts=position_shifts(rows) if self._has_axes else (),
        )
        qo_indptr = [0, *accumulate(lengths), *range(sum(lengths) + 1, bucket + 1)]
        self._attention_of(bucket).plan(qo_indptr, views.page_table[: len(views.kv_lens)], views.kv_lens)
        if self._states is not None:
            self._states.set_step(rows, qo_indptr)
        return views

    def _attention_of(self, bucket: int) -> A:
        if (found := self._bucket_attention.get(bucket)) is None:
            found = self._bucket_attention[bucket] = self._computing.new_attention()
        return found

    def _capture(self, bucket: int, form: StepForm) -> Callable[[], torch.Tensor]:
        views = self._buffers.view(bucket)
        batch = StepBatch(
            token_ids=views.token_ids,
            positions=views.positions,
            page=views.page,
            offset=views.offset,
            attention=self._attention_of(bucket),
            lora=None if form.mode is StepMode.BASE else self._lora,
            merged=form.mode is StepMode.MERGED,
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

    def execute(self, plan: StepPlan, sample: SampleStep) -> StepResult:
        rows = plan.rows_with_logits()
        asking = asking_rows(plan, rows)
        with torch.inference_mode():
            logits = self._decoder.gathered(self.forward(plan))
            if adapters := adding(plan, rows):
                logits = with_added(logits, adapters, self._state, self._added)
            return sample(plan, rows, greedy(logits), RowLogits(logits, {index: index for index in asking}))

    def prompt_logits(self, runs: Sequence[Run]) -> Callable[[int, int], torch.Tensor]:
        decoder = self._decoder

        def logits(begin: int, end: int) -> torch.Tensor:
            def state(at: int) -> torch.Tensor:
                return decoder.hidden_states(begin + at, begin + at + 1)

            return with_added(decoder.prompt_logits(begin, end), adding_tokens(runs, begin, end), state, self._added)

        return logits

    def _state(self, index: int) -> torch.Tensor:
        return self._decoder.logit_states([index])

    def _added(self, adapter: Adapter, states: torch.Tensor) -> torch.Tensor:
        """See `AddedLogits`."""
        logits = self._lora.added_logits(adapter, states)
        absent = logits.isneginf()
        return capped(logits, cap_of(self._decoder.config)).masked_fill_(absent, -torch.inf)

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

    def execute(self, plan: StepPlan, sample: SampleStep) -> StepResult:
        rows = plan.rows_with_logits()
        asking = asking_rows(plan, rows)
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
        return sample(plan, rows, self._decoder.best, RowLogits(logits, at), sampled)

    def prompt_logits(self, runs: Sequence[Run]) -> Callable[[int, int], torch.Tensor]:
        return self._decoder.prompt_logits

    def compute(self, plan: StepPlan, kept: Sequence[int]) -> None:
        self._decoder.keep_logits(kept)
        self.forward(plan)


class RankContext(Protocol):
    """A TP rank among several: its share of the model, and the memory that all of them share."""

    @property
    def shard(self) -> Shard: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def num_pages(self) -> int: ...
    def pages(self, dtype: torch.dtype) -> torch.Tensor:
        """The rank's arena."""
        ...
