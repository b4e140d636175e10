"""The CPU executor: a production backend with the same buckets and static buffers as the CUDA executor.

Tests: tests/core/executors/test_cpu_executor.py, tests/core/test_parity.py.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

import torch

from ...graphs.runner import DecodeBuckets
from ...memory.pages.arena import Arena
from ...memory.pages.layout import PageLayout
from ...ops.ranks import Ranks
from ..config import EngineConfig
from ..cpus import available_cpus, has_fast_products
from ..model.batch import LoraState, RowPlan
from ..model.config import ModelConfig, UnsupportedModel
from ..model.decoder import DecoderModel
from ..model.native_decoder import NativeDecoderModel, why_unsupported
from ..model.open_weights import open_weights
from ..model.sampler import (
    RowLogits,
    add_prompt_logprobs,
    prompt_logprob_slices,
    sample_tokens,
)
from ..model.shadow import ShadowWeights
from ..model.shard import WHOLE, Shard
from ..model.weights import num_weights
from ..requests.types import StepPlan, StepResult
from .adapters import ModelAdapters
from .base import ModelExecutor
from .cpu_steps import CpuSteps, NativeSteps, TorchSteps
from .host_memory import WIDE_SHARE, default_arena_bytes, total_bytes
from .lora_offload import LoraOffload, OffloadAdapters
from .swaps import PageSwaps

logger = logging.getLogger(__name__)

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
        native = _use_native(config, self.config, dtype)
        products = dtype if native else _torch_gemms(config, self.whole, dtype)
        shard, ranks = self.shard, None if rank_context is None else rank_context.ranks
        self.weight_bytes = num_weights(self.whole, shard) * products.itemsize
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
            self._offload = LoraOffload(config, self.config, self.layout.page_elems, dtype)
            self._offload.use_adapters(OffloadAdapters(self.config, self.arena, dtype))
        self.adapters = self._offload.adapters if self._offload else ModelAdapters(self.config, self.arena, dtype)
        self.swaps = PageSwaps(self.arena, self.adapters.dma)
        self._lora = LoraState(self.config, self.arena.pages, config.max_load_stall_seconds)
        setup = self._lora, self.layout, DecodeBuckets(config.max_num_seqs).sizes, max_model_len
        self.steps: CpuSteps
        with open_weights(config.model, self.whole, dtype, load_format=config.load_format, shard=shard) as weights:
            if native:
                self.decoder = decoder = NativeDecoderModel(
                    self.config, weights, self.arena, max_model_len=max_model_len, threads=threads, ranks=ranks
                )
                torch.set_num_threads(1)  # the native decoder does the work; torch's threads would only spin
                if self._offload is not None:
                    self._offload.join()
                    self.cold_starts = self._offload.starts
                self.steps = NativeSteps(decoder, *setup, samples=shard.size == 1, offload=self._offload)
            else:
                self.decoder = decoder = DecoderModel(
                    self.config, weights, self.arena, max_model_len=max_model_len, dtype=products, ranks=ranks
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
        argmax: Sequence[int],
        logits: RowLogits,
        chosen: Collection[int] = (),
    ) -> StepResult:
        rows = plan.sequences
        ends, grammars = self.model.eos_token_ids, self.model.grammars
        result = sample_tokens(
            rows, argmax, logits, sampling=self.steps.sampling, eos_token_ids=ends, chosen=chosen, grammars=grammars
        )
        if any(row.wants_prompt_logprobs for row in rows):
            add_prompt_logprobs(rows, self.decoder.prompt_logits, self.steps.sampling, self.model.vocab_size, result)
        if plan.adapters:
            for request_id in self._lora.late_requests(rows):
                result.retract(request_id)
        return result

    def close(self) -> None:
        self.steps.close()
        self.decoder.close()
        if self._offload is not None:
            self._offload.close()


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


def cpu_threads(config: EngineConfig) -> int:
    """Threads of each rank: by default, of the processors that offload workers leave."""
    threads = config.threads or max(1, available_cpus() - config.offload_workers)
    return max(1, threads // config.tensor_parallel_size)


def cpu_pages(config: EngineConfig, shapes: ModelExecutor, layout: PageLayout, weight_bytes: int) -> int:
    """Number of pages of the arena. layout: of a page of all ranks together; weight_bytes: of all ranks together."""
    if config.num_pages is not None:
        return config.num_pages
    if (num_bytes := config.memory_bytes) is None:
        logits = config.max_num_seqs * shapes.model.vocab_size
        num_bytes = default_arena_bytes(layout, shapes.model.max_model_len, weight_bytes, logits)
        logger.info("the arena has %d MiB; memory_bytes sets another size", num_bytes >> 20)
    return max(2, num_bytes // layout.page_bytes)


def _use_native(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> bool:
    if config.cpu_kernels == "torch":
        return False
    if (reason := why_unsupported(model, dtype)) is None:
        return True
    if config.cpu_kernels == "native":
        raise UnsupportedModel(f"cpu_kernels is 'native', but {reason}; use 'auto' or 'torch' instead")
    logger.warning("steps run on torch's operators, many times as slow as the native decoder: %s", reason)
    return False


def _torch_gemms(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch's operators compute.

    It is float32 if the processor is slow in `dtype` and the machine has memory for copies of the weights. It depends
    only on the processor's features and the machine's size, so replicas on equal machines give the same outputs.
    """
    name = str(dtype).removeprefix("torch.")
    if has_fast_products(name):
        return dtype
    num_bytes = num_weights(model) * torch.float32.itemsize
    limit = int(WIDE_SHARE * total_bytes()) - (config.memory_bytes or 0)
    if num_bytes <= limit:
        logger.warning(
            "this processor is slow in %s: weights are kept as float32 too, in %d MiB; with the native decoder they "
            "need not be",
            name,
            num_bytes >> 20,
        )
        return torch.float32
    logger.warning(
        "this processor is slow in %s, and copies of the weights in float32, %d MiB, are more than the %d MiB that are "
        "left for them: more memory, a smaller memory_bytes or the native decoder would make steps faster",
        name,
        num_bytes >> 20,
        max(0, limit) >> 20,
    )
    return dtype
