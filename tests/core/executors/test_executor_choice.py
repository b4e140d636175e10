"""The executor that `device` comes to."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from chorus.core.config import EngineConfig
from chorus.core.executors import choice
from chorus.core.executors.cpu import CpuExecutor
from chorus.graphs.device import DeviceError


@pytest.mark.parametrize(
    ("device", "gpu", "triton", "want"),
    [
        ("cpu", True, True, False),
        ("cuda", False, False, True),
        ("cuda:1", True, True, True),
        ("auto", True, True, True),
        ("auto", True, False, False),
        ("auto", False, True, False),
    ],
)
def test_auto_takes_a_gpu_that_triton_can_use(monkeypatch, device, gpu, triton, want):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(choice, "find_spec", lambda name: object() if triton else None)
    assert choice.uses_gpu(device) is want


def test_without_a_gpu_auto_is_the_cpu(subject, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    executor = choice.open_executor(EngineConfig(model=subject("gqa").model, threads=1, memory_bytes=1 << 20))
    assert isinstance(executor, CpuExecutor)
    executor.close()


def test_cuda_without_a_gpu_is_refused(subject, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="device is 'cuda', but PyTorch finds no GPU"):
        choice.open_executor(EngineConfig(model=subject("gqa").model, device="cuda"))


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CUDA", "cpu:0"])
def test_other_devices_are_refused(device):
    with pytest.raises(ValidationError, match=r"device\n.*it may be auto, cpu, cuda, or"):
        EngineConfig(model=".", device=device)


@pytest.mark.parametrize("changes", [{"gpu_memory_utilization": 0}, {"gpu_memory_utilization": 1.1},
                                     {"max_lora_rank": 257}, {"graph_capture": "never"},
                                     {"small_gemm": "always"}])  # fmt: skip
def test_settings_of_a_gpu_have_limits(changes):
    with pytest.raises(ValidationError, match=next(iter(changes))):
        EngineConfig(model=".", **changes)
