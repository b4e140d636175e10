"""Scales of an FP8 KV cache are read from wherever tools store them; others are refused in one line."""

from __future__ import annotations

import pytest
import torch

from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.open_weights import open_weights
from chorus.ops.elementwise.float8_kv import UNSCALED, KvScales

from ...paths.float8_caches import as_stored
from ...test_families import executor_of, logits_of
from ..checkpoints.quantization.forms import FORMS
from ..checkpoints.quantization.twins import write_twins

ATTENTION = "model.layers.{}.self_attn"


def scales_of(root, form="fp8", architecture="LlamaForCausalLM", **tensors):
    """The scales of a checkpoint with further tensors, whose names have `__` for a dot."""
    added = {f"model.layers.{name.replace('__', '.')[1:]}": tensor for name, tensor in tensors.items()}
    path, _ = write_twins(root, FORMS[form], architecture, spoil=lambda stored: stored.update(added))
    with open_weights(path, read_model_config(path), torch.bfloat16) as weights:
        return weights.kv_scales()


@pytest.mark.parametrize(
    "names",
    [
        ("_1__self_attn__k_scale", "_1__self_attn__v_scale"),
        ("_1__self_attn__attn__k_scale", "_1__self_attn__attn__v_scale"),
        ("_1__self_attn__k_proj__k_scale", "_1__self_attn__v_proj__v_scale"),
        ("_1__self_attn__k_proj__output_scale", "_1__self_attn__v_proj__output_scale"),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_scales_by_all_their_names(tmp_path, names, shape):
    tensors = dict(zip(names, (torch.full(shape, 0.25), torch.full(shape, 0.5).bfloat16()), strict=True))
    assert scales_of(tmp_path, **tensors) == [UNSCALED, KvScales(0.25, 0.5)]


def test_a_checkpoint_without_scales_has_ones(tmp_path):
    assert scales_of(tmp_path) == [UNSCALED] * 2


@pytest.mark.parametrize(
    ("k", "v", "why"),
    [
        (torch.ones(2), torch.ones(1), "k_scale has shape [2], and a KV cache in FP8 has one scale for a layer's keys"),
        (torch.ones(1), torch.zeros(1), "v_scale is 0.0, not above 0"),
        (torch.tensor(torch.nan), torch.ones(1), "k_scale has scales that are not finite"),
        (torch.ones(1), None, "k_scale is there, but the v_scale of its layer is missing"),
        (None, torch.ones(1), "v_scale is there, but the k_scale of its layer is missing"),
    ],
)
def test_scales_that_can_t_be_used_are_refused_by_name(tmp_path, k, v, why):
    tensors = {"_0__self_attn__k_scale": k, "_0__self_attn__v_scale": v}
    with pytest.raises(UnsupportedModel) as caught:
        scales_of(tmp_path, **{name: tensor for name, tensor in tensors.items() if tensor is not None})
    said = str(caught.value)
    assert f"tensor model.layers.0.self_attn.{why}" in said and "\n" not in said and str(tmp_path) in said


@pytest.mark.native(needed=False)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_an_engine_uses_them(tmp_path, monkeypatch, kernels):
    """Logits are those of rounding by these scales, and others than by ones."""
    scales = {"k_scale": 0.002, "v_scale": 0.7}  # keys beyond the range become its end

    def add(stored):
        for layer in range(2):
            stored.update({f"{ATTENTION.format(layer)}.{name}": torch.tensor(each) for name, each in scales.items()})

    prompts = [[5, 6, 7], list(range(3, 40))]
    path, _ = write_twins(tmp_path, FORMS["fp8"], spoil=add)
    found = logits_of(executor_of(path, dtype="float32", cpu_kernels=kernels, kv_cache_dtype="fp8"), prompts)

    def write(slots, k, v):
        for cache, values, scale in zip(slots[:2], (k, v), scales.values(), strict=True):
            cache[slots.page, slots.offset] = as_stored(values, scale)

    monkeypatch.setattr("chorus.ops.elementwise.elementwise.write_kv", write)
    want = logits_of(executor_of(path, dtype="float32", cpu_kernels="torch"), prompts)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
    scales.update(k_scale=1.0, v_scale=1.0)
    other = logits_of(executor_of(path, dtype="float32", cpu_kernels="torch"), prompts)
    assert float((other - want).abs().max()) > 0.01
