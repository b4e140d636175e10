"""Random adapters on all experts are read as PEFT's, and have the same values in every form."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from chorus.core.executors.adapters import open_rows
from chorus.core.model.checkpoints.quantization.round_to_nearest import RoundToNearest
from chorus.core.model.read_config import read_model_config
from chorus.core.model.weights.narrow_bytes import weight_bytes
from chorus.memory.adapters.image import ImageForm, read_image
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.module_paths import ExpertForm
from chorus.memory.host.buffers import HostBuffers
from chorus.memory.host.image import HostImage
from chorus.memory.pages.adapter_layout import AdapterLayout
from chorus.ops.cpu import native_reader
from chorus.perf.bench.models.random_mixture import MixtureShape, write_adapter

SMALL = MixtureShape(layers=3, hidden=16, size=8, count=4, per_token=2, heads=2, kv_heads=1, head_dim=8, vocab=64)
RANK = 2


def values_of(path, config):
    """The parts of an adapter, and its values as they lie in pages."""
    manifest, image = inspect_adapter(path, config.module_paths), HostImage()
    assert manifest.modules is not None
    layout = AdapterLayout.build(manifest.parts, config.projections, 512, 2)
    reader = open_rows if native_reader.available(torch.bfloat16) else None
    form = ImageForm(layout, config.projections, 512, torch.bfloat16)
    read_image(manifest, form, image, HostBuffers(), reader)
    return manifest, image.data.view(-1)[: layout.num_elems]


def test_all_forms_have_the_same_values(tmp_path):
    config = read_model_config(SMALL.write_config(tmp_path / "model"))
    found = {}
    for form in ExpertForm:
        path = write_adapter(tmp_path / form, SMALL, RANK, form)
        manifest, found[form] = values_of(path, config)
        assert manifest.modules is not None
        assert manifest.modules.experts is form
        assert {part.experts for part in manifest.parts} == {(), tuple(range(SMALL.count))}
        assert set(manifest.targets) == {*SMALL.attention, *(f"experts.{n}_proj" for n in ("gate", "up", "down"))}
    assert found[ExpertForm.EACH].any()
    assert all(torch.equal(values, found[ExpertForm.EACH]) for values in found.values())


def test_attention_alone(tmp_path):
    config = read_model_config(SMALL.write_config(tmp_path / "model"))
    manifest, values = values_of(write_adapter(tmp_path / "adapter", SMALL, RANK, None), config)
    assert set(manifest.targets) == {*SMALL.attention}
    assert values.any()
    (attention,) = manifest.parts
    in_layers = [sum(each.dims) for layer in config.projections.layers for each in layer if not each.is_of_mixture]
    assert SMALL.step(2, 3, 1, 0, rank=RANK).adapter_bytes == 3 * 2 * attention.rank * sum(in_layers)


@pytest.mark.parametrize("quantiser", [None, RoundToNearest("int4"), RoundToNearest("fp8")], ids=str)
def test_a_step_that_uses_all_experts_reads_all_weights(tmp_path, quantiser):
    """Those that a GPU keeps, but for embeddings and norms."""
    shape = MixtureShape(
        layers=2, hidden=128, size=64, count=4, per_token=4, heads=2, kv_heads=1, head_dim=64, vocab=96
    )
    config = read_model_config(shape.write_config(tmp_path / "model"))
    step = shape.step(2, 1, 1, 0, quantiser=quantiser)
    assert step.experts == shape.count
    kv = shape.layers * 2 * shape.kv_heads * shape.head_dim * 2
    kept, head = weight_bytes(config, 2, quantiser), shape.vocab * shape.hidden * 2
    wider = shape.layers * 2 * shape.router_params  # routers, which are float32, are counted in the model's dtype
    assert step.num_bytes - kv - head - wider == kept.projections + kept.experts


@pytest.mark.parametrize("form", ExpertForm)
def test_files_are_as_the_safetensors_library_has_them(tmp_path, form):
    path = write_adapter(tmp_path / "adapter", SMALL, RANK, form)
    with safe_open(path / "adapter_model.safetensors", framework="pt") as file:
        names = set(file.keys())
        layers = {file.get_tensor(name).dtype for name in names}
    per_layer = {ExpertForm.EACH: 6 * SMALL.count, ExpertForm.TOGETHER: 6, ExpertForm.STACKED: 4}[form]
    assert len(names) == SMALL.layers * (per_layer + 2 * len(SMALL.attention))
    assert layers == {torch.bfloat16}
