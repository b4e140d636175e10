"""Choice of the executor by configuration."""

from __future__ import annotations

from importlib.util import find_spec

from ..config import EngineConfig
from .base import Executor


def open_executor(config: EngineConfig) -> Executor:
    """Load the model where `config.device` says; with `auto` on a GPU where there is one and Triton is installed.

    Raises UnsupportedModel for a checkpoint, DeviceError for a device that is not there, OutOfDeviceMemory.
    """
    if uses_gpu(config.device):
        from .cuda import CudaExecutor

        return CudaExecutor(config)
    from .cpu import CpuExecutor

    return CpuExecutor(config)


def uses_gpu(device: str) -> bool:
    """Return the device that `device`, which may be `auto`, means on this machine."""
    if device != "auto":
        return device != "cpu"
    import torch

    return torch.cuda.is_available() and find_spec("triton") is not None
