"""Offload workers of the CUDA executor that are refused; `test_cuda_lora_offload_interpreted.py` tests their work."""

from __future__ import annotations

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.executors.cuda import CudaExecutor
from chorus.core.model.specs.config import UnsupportedModel
from chorus.graphs.device import DeviceError
from chorus.memory.transfers import cuda_driver
from chorus.ops.library import native_library

from ...graphs.host_device import HostDevice
from ..tiny_families import save_family

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not native_library.available(torch.float32), reason="offload workers run the native library"),
]


def test_a_model_that_offload_workers_do_not_compute_is_refused(subject):
    config = EngineConfig(model=subject("gqa").model, device="cuda", dtype="float16", offload_workers=2)
    with pytest.raises(UnsupportedModel, match=r"offload_workers is 2, .* not in float16; or set it to 0"):
        CudaExecutor(config, HostDevice())


@pytest.mark.parametrize(
    ("family", "projection"),
    [
        ("falcon-h1", "in_proj"),
        ("youtu", "q_b_proj"),
        ("gemma-4-inputs", "per_layer_input_gate"),
        ("gemma-3n", "linear_left"),
    ],
)
def test_layers_with_further_projections_are_refused(tmp_path, family, projection):
    """While offload workers compute a layer's adapters, a GPU leaves out all of its projections, these too."""
    save_family(family, tmp_path)
    config = EngineConfig(model=tmp_path, device="cuda", dtype="float32", offload_workers=2)
    with pytest.raises(UnsupportedModel, match=rf"offload_workers is 2, .* compute no .*{projection}.*; set it to 0"):
        CudaExecutor(config, HostDevice())


def test_without_cupy_offload_workers_are_refused(subject, monkeypatch):
    def missing():
        raise cuda_driver.MissingCupy("run: pip install cupy")

    monkeypatch.setattr(cuda_driver, "cupy_module", missing)
    config = EngineConfig(model=subject("gqa").model, device="cuda", dtype="float32", offload_workers=2)
    monkeypatch.setattr(CudaExecutor, "_load", lambda self: None)
    with pytest.raises(DeviceError, match="offload_workers is 2, but exchanges need CuPy; set it to 0, or install"):
        CudaExecutor(config, HostDevice())
