"""Scales and offsets as they are computed when an adapter is read."""

from __future__ import annotations

import pytest
import torch

from chorus.memory.adapters.image import ImageForm, read_image
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.host.buffers import HostBuffers
from chorus.memory.host.image import HostImage
from chorus.memory.pages.adapter_layout import AdapterLayout, vector_elems

from ...tables import TINY, TINY_PATHS
from ..conftest import DIMS, LAYERS, module_key, tensor_name

RANK, SCALE = 4, 2.0  # of `draft`


class Base:
    """Random weights, and biases of some modules."""

    def __init__(self, biased=()):
        generator = torch.Generator().manual_seed(7)
        places = [(layer, module) for layer in range(LAYERS) for module in DIMS]
        self.weights = {at: torch.randn(DIMS[at[1]][::-1], generator=generator) for at in places}
        self.biases = {at: torch.randn(DIMS[at[1]][1], generator=generator) for at in places if at[1] in biased}

    def weight(self, layer, module):
        return self.weights[layer, module]

    def bias(self, layer, module):
        return self.biases.get((layer, module))


def read(path, base, dtype=torch.float32, page_elems=64):
    """The vectors (layer, module) → scale and offset, found as the layout says; layers are published with theirs."""
    manifest = inspect_adapter(path, TINY_PATHS)
    layout = AdapterLayout.build(manifest.parts, TINY, page_elems, dtype.itemsize, vectors=manifest.vectors)
    image, found, places = HostImage(), {}, layout.vectors
    assert places is not None

    def look():
        data = image.data.view(-1)
        for target in manifest.vectors:
            if target.layer < image.stream.num_ready:
                outputs = DIMS[target.module][1]
                first = places.first_elem[target.layer][TINY.id(target.module)]
                stride = vector_elems(outputs, dtype.itemsize)
                begin, end = layout.layer_ranges(target.layer)[-1]
                assert begin <= first < first + 2 * stride <= end
                found[target[:2]] = tuple(
                    data[at : at + stride].view(torch.float32)[:outputs].clone() for at in (first, first + stride)
                )

    image.follow(look)
    read_image(manifest, ImageForm(layout, TINY, page_elems, dtype), image, HostBuffers(), base=base)
    return found


def add(it, end, modules):
    for layer in range(LAYERS):
        for module in modules:
            name = f"base_model.model.{module_key(layer, module)}.{end}"
            it.tensors[name] = torch.randn(DIMS[module][1], generator=torch.Generator().manual_seed(layer)) + 3


def ab(it, layer, module):
    return (it.tensors[tensor_name(layer, module, side)].float() for side in "AB")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_elems", [16, 64, 4096])
def test_dora_is_the_magnitude_by_the_norm(adapter_draft, tmp_path, dtype, page_elems):
    """In float32, whatever the model's dtype and wherever pages end."""
    base, modules = Base(), ("q_proj", "down_proj")
    it = adapter_draft(modules, use_dora=True)
    add(it, "lora_magnitude_vector", modules)
    found = read(it.write(tmp_path), base, dtype, page_elems)
    assert found.keys() == {(layer, module) for layer in range(LAYERS) for module in modules}
    for (layer, module), (scale, offset) in found.items():
        a, b = ab(it, layer, module)
        norm = (base.weight(layer, module) + SCALE * b @ a).norm(dim=1)
        magnitude = it.tensors[f"base_model.model.{module_key(layer, module)}.lora_magnitude_vector"]
        torch.testing.assert_close(scale, magnitude / norm, rtol=1e-6, atol=0)
        assert not offset.any()


@pytest.mark.parametrize("has_dora", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_base_models_bias_becomes_the_adapters(adapter_draft, tmp_path, has_dora, has_bias):
    """DoRA scales the product and not the bias."""
    base = Base(biased=("k_proj",))
    it = adapter_draft(("k_proj",), use_dora=has_dora, bias="all" if has_bias else "none", lora_bias=not has_dora)
    if has_dora:
        add(it, "lora_magnitude_vector", ("k_proj",))
    else:
        add(it, "lora_B.bias", ("k_proj",))
    if has_bias:
        add(it, "base_layer.bias", ("k_proj",))
    x = torch.randn(DIMS["k_proj"][0])
    for (layer, module), (scale, offset) in read(it.write(tmp_path), base).items():
        key = f"base_model.model.{module_key(layer, module)}"
        a, b = ab(it, layer, module)
        weight, own = base.weight(layer, module), base.biases[layer, module]
        bias = it.tensors.get(f"{key}.base_layer.bias", own)
        if has_dora:
            merged = weight + SCALE * b @ a
            want = it.tensors[f"{key}.lora_magnitude_vector"] / merged.norm(dim=1) * (merged @ x) + bias
        else:
            want = weight @ x + SCALE * (b @ a @ x + it.tensors[f"{key}.lora_B.bias"]) + bias
        torch.testing.assert_close(scale * (weight @ x + own + SCALE * b @ (a @ x)) + offset, want)


def test_an_output_of_norm_0_is_refused(adapter_draft, tmp_path):
    base = Base()
    it = adapter_draft(("o_proj",), use_dora=True)
    add(it, "lora_magnitude_vector", ("o_proj",))
    base.weights[1, "o_proj"][3] = 0
    it.tensors[tensor_name(1, "o_proj", "B")][3] = 0
    with pytest.raises(AdapterFormatError, match=r"layers\.1\.self_attn\.o_proj.*can't be applied"):
        read(it.write(tmp_path), base)


def test_without_a_base_model_they_are_only_checked(adapter_draft, tmp_path):
    it = adapter_draft(("o_proj",), use_dora=True)
    add(it, "lora_magnitude_vector", ("o_proj",))
    read(it.write(tmp_path / "well"), None)
    next(tensor for name, tensor in it.tensors.items() if "magnitude" in name)[2] = torch.inf
    with pytest.raises(AdapterFormatError, match="lora_magnitude_vector holds NaN or infinity"):
        read(it.write(tmp_path / "ill"), None)
