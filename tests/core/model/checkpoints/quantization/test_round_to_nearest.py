"""Weights are quantised where they will live, and have the same bits there as on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from chorus.core.model.checkpoints.quantization import round_to_nearest
from chorus.core.model.checkpoints.quantization.round_to_nearest import NAMES, RoundToNearest
from chorus.core.model.read_config import read_model_config
from chorus.core.model.weights.dummy_weights import DummyWeights
from chorus.ops.gemm.narrow_weights import keep
from chorus.perf.bench.models.random_mixture import MixtureShape

GPU = "lazy:0"
"""Stands for a GPU: a device that tensors without data may be on in any build of PyTorch."""

#: Operations whose float32 results are the same on a CPU and on a GPU, and those that only move or shape tensors.
_EXACT = {
    "add", "mul", "mul_", "div", "div_", "neg_", "abs_", "round_", "clamp_", "clamp_min_", "amax", "amin", "maximum",
    "gt", "where", "_to_copy", "copy_", "empty", "ones_like", "scalar_tensor", "lift_fresh", "constant_pad_nd", "view",
    "slice", "unsqueeze", "squeeze", "detach", "alias",
}  # fmt: skip


class AsGpusDivide(TorchDispatchMode):
    """Divides by a number as PyTorch does on a GPU: it multiplies by the reciprocal in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.names.add(name)
        if name in ("div", "div_") and (not isinstance(args[1], torch.Tensor) or not args[1].dim()):
            args = args[0], 1 / torch.as_tensor(args[1], dtype=torch.float32)
            func = torch.ops.aten.mul.Tensor if name == "div" else torch.ops.aten.mul_.Tensor
        assert name != "reciprocal"
        return func(*args, **kwargs or {})


def weights(inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(400, inputs, generator=generator) * torch.rand(400, 1, generator=generator)
    rows[0], rows[1], rows[2] = 0, -0.0, 2.0**-133
    return rows


@pytest.mark.parametrize("inputs", [256, 200])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_a_gpu_rounds_to_the_same_bits(monkeypatch, name, inputs):
    monkeypatch.setattr(round_to_nearest, "_check_finite", lambda scales, name: None)
    rows = weights(inputs)
    want, kept = RoundToNearest(name)(rows), rows.clone()
    with AsGpusDivide() as mode:
        found = RoundToNearest(name)(rows)
    assert torch.equal(found.values.view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(found.scales.view(torch.int32), want.scales.view(torch.int32))
    assert torch.equal(rows.view(torch.int32), kept.view(torch.int32)), "the weights are as they were"
    assert mode.names - {"arange", "floor_divide"} <= _EXACT


@pytest.mark.parametrize("of", ["host", "device"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_are_quantised_on_their_device(monkeypatch, name, of):
    """Tensors that have no data tell on which device they would be; an operation on two devices is an error."""
    monkeypatch.setattr(round_to_nearest, "_check_finite", lambda scales, name: None)
    with FakeTensorMode() as mode:
        weight = torch.empty(300, 128, dtype=torch.bfloat16, device="cpu" if of == "host" else GPU)
        matrix = RoundToNearest(name)(weight, device=GPU if of == "host" else None)
        assert {str(each.device) for each in (matrix.values, matrix.scales, matrix.dequantised())} == {GPU}
        bits, where = (8 if matrix.is_float else matrix.bits), matrix.values.device
        kept = keep(matrix.values, matrix.scales, None, bits=bits, group=128, dtype=torch.bfloat16, device=where)
        assert {str(kept.data.device), str(kept.scales.device)} == {GPU}
    assert mode is not None


def test_the_device_of_steps_is_asked_for(monkeypatch, tmp_path):
    """Of projections, of experts and of the output projection."""
    asked, inner = [], RoundToNearest.__call__

    def call(self, weight, name="a weight", device=None):
        asked.append(device)
        return inner(self, weight, name)

    monkeypatch.setattr(RoundToNearest, "__call__", call)
    shape = MixtureShape(layers=1, hidden=64, size=32, count=4, per_token=2, heads=2, kv_heads=1, head_dim=32, vocab=96)
    made = DummyWeights(read_model_config(shape.write_config(tmp_path)), torch.bfloat16)
    made.quantiser, made.quantises_on = RoundToNearest("int4", lm_head=True), "cuda"
    list(made.layers())
    made.quantised_head(made.embed())
    assert asked == ["cuda"] * (2 + 2 * shape.count + 1)
