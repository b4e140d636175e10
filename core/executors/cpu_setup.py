"""Settings that a CPU executor makes before it loads weights: threads, pages, kernels and dtypes.

Tests: tests/core/executors/test_cpu_executor.py.
"""

from __future__ import annotations

import logging

import torch

from ...memory.pages.layout import PageLayout
from ...ops.library import native_library
from ..config import EngineConfig
from ..cpus import available_cpus, has_fast_gemms
from ..model.program.native_decoder import why_unsupported
from ..model.specs.config import ModelConfig, UnsupportedModel
from ..model.weights.narrow_bytes import kept_bytes
from ..model.weights.shard import Shard
from ..model.weights.weight_plan import Way, WeightPlan
from ..requests.draft_length import most_logits
from .base import ModelExecutor
from .host_memory import WIDE_SHARE, default_arena_bytes, gib, total_bytes, warn_of_more_than_all

logger = logging.getLogger(__name__)

_SLOW = "many times as slow as the native decoder"


def cpu_threads(config: EngineConfig) -> int:
    """Threads of each rank: by default, of the processors that offload workers leave."""
    threads = config.threads or max(1, available_cpus() - config.offload_workers)
    return max(1, threads // config.tensor_parallel_size)


def cpu_pages(config: EngineConfig, shapes: ModelExecutor, layout: PageLayout, weight_bytes: int) -> int:
    """Number of pages of the arena. layout: of a page of all ranks together; weight_bytes: of all ranks together."""
    if (pages := config.num_pages) is not None:
        num_bytes = pages * layout.page_bytes
        warn_of_more_than_all(f"num_pages is {pages}: {gib(num_bytes)}", num_bytes)
        return pages
    if (num_bytes := config.memory_bytes) is None:
        logits = most_logits(config) * shapes.model.vocab_size
        num_bytes = default_arena_bytes(layout, shapes.model.max_model_len, weight_bytes, logits)
        logger.info("the page pool has %d MiB; memory_bytes sets another size", num_bytes >> 20)
    else:
        warn_of_more_than_all(f"memory_bytes is {gib(num_bytes)}", num_bytes)
    return max(2, num_bytes // layout.page_bytes)


def weight_bytes(config: EngineConfig, shapes: ModelExecutor, shard: Shard, dtype: torch.dtype, *, native: bool) -> int:
    """Bytes of a rank's weights in `dtype`, but for those that are kept quantised: projections by the native decoder,
    experts by the native library. native: the native decoder is in use.
    """
    plan = WeightPlan(Way.PACK if native else Way.LEAVE, _experts(config, dtype))
    return kept_bytes(shapes.whole, dtype.itemsize, plan, shard, shapes.quantiser)


def _experts(config: EngineConfig, dtype: torch.dtype) -> Way:
    """How experts are kept in steps of `dtype`."""
    return Way.PACK if config.cpu_kernels != "torch" and native_library.available(dtype) else Way.LEAVE


def of_torch(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> str:
    """The weights that PyTorch's operators multiply, where the native decoder is not in use."""
    is_packed = model.num_experts and config.quantization != "fp8" and _experts(config, dtype) is Way.PACK
    return "weights other than those of experts" if is_packed else "weights"


def use_native(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> bool:
    if config.cpu_kernels == "torch":
        return False
    if (reason := why_unsupported(model, dtype)) is None:
        return True
    if config.cpu_kernels == "native":
        raise UnsupportedModel(f"cpu_kernels is 'native', but {reason}; use 'auto' or 'torch' instead")
    by_library = model.num_experts and native_library.available(dtype)
    how = "but for mixtures of experts, which the native library computes" if by_library else _SLOW
    logger.warning("steps run on torch's operators, %s: %s", how, reason)
    return False


def torch_gemms(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch's operators compute.

    It is float32 if the processor is slow in `dtype` and the machine has memory for copies of the weights. It depends
    only on the processor's features and the machine's size, so replicas on equal machines give the same outputs.
    """
    name = str(dtype).removeprefix("torch.")
    if has_fast_gemms(name):
        return dtype
    num_bytes = kept_bytes(model, torch.float32.itemsize)
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
