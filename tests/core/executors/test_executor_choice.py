"""The executor that `device` comes to."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from chorus.core.config import EngineConfig
from chorus.core.executors import choice
from chorus.core.executors.cpu import CpuExecutor
from chorus.graphs.device import DeviceError
from chorus.ops.gemm import small_gemm_schedule
from chorus.ops.library import native_library
from chorus.server.cluster.replica_process import ReplicaSettings
from chorus.server.settings import Settings


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


def test_a_cpu_refuses_activations_in_fp8(subject):
    with pytest.raises(DeviceError, match="fp8_activations is true, but a CPU multiplies activations with FP8 weights"):
        choice.open_executor(EngineConfig(model=subject("gqa").model, device="cpu", fp8_activations=True))


def test_a_gpu_keeps_no_prefixes_in_files(subject, tmp_path):
    files = {"kv_cache_dir": tmp_path, "kv_cache_disk_bytes": 1 << 20}
    with pytest.raises(DeviceError, match="kv_cache_dir is set, but the keys of its files don't cover"):
        choice.open_executor(EngineConfig(model=subject("gqa").model, device="cuda", **files))


def test_cuda_without_a_gpu_is_refused(subject, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="device is 'cuda', but PyTorch finds no GPU"):
        choice.open_executor(EngineConfig(model=subject("gqa").model, device="cuda"))


@pytest.mark.parametrize(
    ("gigabytes", "asked", "want"),
    [
        (80, {}, (256, 8192)),
        (24, {}, (128, 4096)),
        (8, {}, (32, 1024)),
        (0, {}, (32, 1024)),
        (80, {"max_num_seqs": 16}, (16, 8192)),
        (80, {"max_num_seqs": 4096, "max_num_batched_tokens": 4096}, (4096, 4096)),
        (80, {"max_num_batched_tokens": 64}, (64, 64)),
    ],
)
def test_a_step_is_as_large_as_the_gpu_by_default(monkeypatch, gigabytes, asked, want):
    monkeypatch.setattr(choice, "gpu_bytes", lambda device: gigabytes * 10**9)
    found = choice.completed(EngineConfig(model=".", **asked))
    assert (found.max_num_seqs, found.max_num_batched_tokens) == want


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


@pytest.mark.parametrize(
    ("quantised", "asked", "want"),
    [
        (None, {}, 256),
        (None, {"quantization": "int4"}, 64),
        (None, {"quantization": "fp8"}, 64),
        (None, {"quantization": "fp8", "fp8_activations": True}, 256),
        (None, {"quantization": "int4", "small_gemm": "off"}, 256),
        (None, {"quantization": "int4", "max_num_seqs": 200}, 200),
        (GPTQ, {}, 64),
        ({"quant_method": "mxfp4"}, {}, 256),
        ({"quant_method": "of another"}, {}, 256),
    ],
)
def test_steps_of_quantised_models_are_as_large_as_the_kernel_that_widens_nothing(
    monkeypatch, tmp_path, quantised, asked, want
):
    """Beyond, a GPU's library gets all projections widened, in every step."""
    monkeypatch.setattr(choice, "gpu_bytes", lambda device: 80 * 10**9)
    fields = {"model_type": "llama"} | ({} if quantised is None else {"quantization_config": quantised})
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert choice.completed(EngineConfig(model=tmp_path, **asked)).max_num_seqs == want
    assert small_gemm_schedule.MAX_ROWS == choice.MOST_NARROW


@pytest.mark.parametrize(
    ("level", "fields", "want"),
    [
        ("avx2", {}, "ngram"),
        ("avx2", {"speculation": "off"}, "off"),
        ("avx2", {"cpu_kernels": "torch"}, "off"),
        ("avx2", {"cpu_kernels": "torch", "speculation": "ngram"}, "ngram"),
        ("avx2", {"device": "cuda"}, "off"),
        ("avx2", {"device": "cuda", "speculation_cache_tokens": 1000}, "ngram"),
        (None, {}, "off"),
    ],
)
def test_auto_speculates_where_steps_of_all_sizes_give_the_same_bits(monkeypatch, level, fields, want):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(native_library, "level", lambda: level)
    found = choice.completed(EngineConfig(model=".", **fields))
    assert (found.speculation, found.speculates) == (want, want == "ngram")


@pytest.mark.parametrize(("flags", "want"), [({}, (256, 8192)), ({"max_num_seqs": 32}, (32, 8192))])
def test_what_a_server_was_not_told_is_left_to_the_gpu(monkeypatch, flags, want):
    """In `chorus serve`, and in a replica, whose settings go through a file."""
    monkeypatch.setattr(choice, "gpu_bytes", lambda device: 80 << 30)
    settings = Settings(**flags)
    replica = ReplicaSettings.of(settings).model_dump_json(exclude_unset=True)
    for config in (settings.engine_config(), ReplicaSettings.model_validate_json(replica).engine):
        found = choice.completed(config)
        assert (found.max_num_seqs, found.max_num_batched_tokens) == want


@pytest.mark.parametrize(("device", "want"), [("cpu", 0), ("cuda", 80), ("cuda:1", 24), ("cuda:2", 0)])
def test_bytes_of_a_gpu_are_those_of_the_one_meant(monkeypatch, device, want):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=[80, 24][index])
    )
    assert choice.gpu_bytes(device) == want


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CUDA", "cpu:0"])
def test_other_devices_are_refused(device):
    with pytest.raises(ValidationError, match=r"device\n.*it may be auto, cpu, cuda, or"):
        EngineConfig(model=".", device=device)


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu_memory_utilization": 0},
        {"gpu_memory_utilization": 1.1},
        {"max_lora_rank": 257},
        {"graph_capture": "never"},
        {"small_gemm": "always"},
    ],
)
def test_settings_of_a_gpu_have_limits(changes):
    with pytest.raises(ValidationError, match=next(iter(changes))):
        EngineConfig(model=".", **changes)
