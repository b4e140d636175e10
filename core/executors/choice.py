"""Chooses the executor, and the settings that the configuration leaves to the machine.

Tests: tests/core/executors/test_executor_choice.py
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from ..config import EngineConfig
from .base import Executor
from .host_memory import default_host_cache_bytes, gib, warn_of_more_than_all

DRIVER = Path("/dev/nvidiactl")
"""Device file of NVIDIA's driver."""

#: GPU memory in bytes → default max_num_seqs and max_num_batched_tokens, largest first. The configuration's own
#: defaults are for a CPU, and for GPUs smaller than all of these.
GPU_BATCHES = {40 << 30: (256, 8192), 14 << 30: (128, 4096)}

#: Default max_num_seqs of quantised models on a GPU: a kernel multiplies so many rows with weights as they are kept.
#: Larger decode steps widen every projection in memory first, and move more bytes than those of the original model.
MOST_NARROW = 64


def completed(config: EngineConfig) -> EngineConfig:
    """Complete the configuration from the machine: host memory for images, speculation and, on a GPU, the batch
    limits.
    """
    chosen = {}
    if config.speculation == "auto":
        chosen["speculation"] = _speculation(config)
    if config.host_cache_bytes is None:
        chosen["host_cache_bytes"] = default_host_cache_bytes()
    else:
        warn_of_more_than_all(f"host_cache_bytes is {gib(config.host_cache_bytes)}", config.host_cache_bytes)
    if (batch := gpu_batch(gpu_bytes(config.device))) is not None:
        rows, tokens = batch
        asked = config.model_fields_set
        tokens = config.max_num_batched_tokens if "max_num_batched_tokens" in asked else tokens
        if widens(config):
            rows = min(rows, MOST_NARROW)
        rows = config.max_num_seqs if "max_num_seqs" in asked else min(rows, tokens)
        chosen |= {"max_num_seqs": rows, "max_num_batched_tokens": max(rows, tokens)}
    if config.tensor_parallel_size > 1 and uses_gpu(config.device):
        chosen["max_load_stall_seconds"] = 0.0  # see `cuda_rank_copies`
    return config.model_copy(update=chosen)


def widens(config: EngineConfig) -> bool:
    """True if a GPU keeps the weights of layers narrow, and widens them for decode steps of many sequences."""
    if config.small_gemm == "off" or config.fp8_activations:
        return False
    if config.quantization is not None:
        return True
    from ..model.checkpoints.quantization.mxfp4 import Mxfp4
    from ..model.checkpoints.quantization.registry import read_format
    from ..model.config_json import ConfigJson

    try:
        found = read_format(ConfigJson.read(Path(config.model) / "config.json"))
    except Exception:  # whatever is wrong with it, the executor says so
        return False
    return found is not None and not isinstance(found, Mxfp4)  # which is of experts, and these have tiles for more


def _speculation(config: EngineConfig) -> str:
    """What `auto` means: n-grams where a step of any size gives the same bits, so that answers stay the same, or where
    the configuration has a cache for them.
    """
    from ...ops.library import native_library

    native = config.cpu_kernels != "torch" and not uses_gpu(config.device) and native_library.level() is not None
    return "ngram" if native or config.speculation_cache_tokens else "off"


def gpu_batch(memory: int) -> tuple[int, int] | None:
    """Default max_num_seqs and max_num_batched_tokens for a GPU of this size; None to keep the configuration's."""
    return next((batch for least, batch in GPU_BATCHES.items() if memory >= least), None)


def gpu_bytes(device: str) -> int:
    """Memory of the GPU that `device` names; 0 for the CPU, or a GPU that does not exist."""
    if not uses_gpu(device):
        return 0
    import torch

    index = int(device.partition(":")[2] or 0)
    found = torch.cuda.is_available() and index < torch.cuda.device_count()
    return torch.cuda.get_device_properties(index).total_memory if found else 0


def open_executor(config: EngineConfig) -> Executor:
    """Load the model on `config.device`; `auto` means a GPU if there is one and Triton is installed.

    Raises UnsupportedModel for a checkpoint, DeviceError for a device that does not exist, and OutOfDeviceMemory.
    """
    size, workers = config.tensor_parallel_size, config.offload_workers
    on_gpu = uses_gpu(config.device)
    if workers and size > 1:
        raise _refusal(
            f"offload_workers is {workers} and tensor_parallel_size is {size}: use one of them; set the other to "
            "its default"
        )
    if config.fp8_activations and not on_gpu:
        raise _refusal(
            "fp8_activations is true, but a CPU multiplies activations with FP8 weights as they are; leave it out, or "
            "set device to 'cuda'"
        )
    if config.kv_cache_dir is not None and on_gpu:
        raise _refusal(
            "kv_cache_dir is set, but the keys of its files don't cover which kernels of a GPU computed KV; leave it "
            "out, or set device to 'cpu'"
        )
    if on_gpu and size > 1:
        from .cuda_ranks import CudaRanksExecutor

        return CudaRanksExecutor(config)
    if on_gpu:
        from .cuda import CudaExecutor

        return CudaExecutor(config)
    if size > 1:
        from .ranks import RanksExecutor

        return RanksExecutor(config)
    from .cpu import CpuExecutor

    return CpuExecutor(config)


def _refusal(text: str) -> RuntimeError:
    from ...graphs.device import DeviceError  # imports torch

    return DeviceError(text)


def may_use_gpu(device: str) -> bool:
    """Predict `uses_gpu` without importing torch, which takes seconds."""
    if device != "auto":
        return device != "cpu"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and DRIVER.exists() and find_spec("triton") is not None


def uses_gpu(device: str) -> bool:
    """True if `device`, which may be `auto`, means a GPU on this machine."""
    if device != "auto":
        return device != "cpu"
    import torch

    return torch.cuda.is_available() and find_spec("triton") is not None
