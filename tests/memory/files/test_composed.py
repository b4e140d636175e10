"""Adapters composed of others: their image is that of an adapter with the joined matrices."""

from __future__ import annotations

import os
from dataclasses import fields

import pytest
import torch

from chorus.memory.files.composed import composed, inspect, paths_of
from chorus.memory.files.error import AdapterChanged, AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.identity import open_unchanged, with_content, with_effect
from chorus.memory.files.manifest import AdapterManifest
from chorus.memory.pages.adapter_layout import AdapterPart

from ...tables import TINY_PATHS
from ..conftest import Draft
from .test_adapter_forms import write_mlx


@pytest.fixture
def two(adapter_draft, tmp_path):
    one = adapter_draft(("q_proj", "up_proj"), rank=3, seed=1, dtype=torch.bfloat16)
    other = adapter_draft(("q_proj", "down_proj"), rank=5, seed=2, lora_alpha=4, use_rslora=True)
    return one, other


def manifests(tmp_path, *drafts):
    return [inspect_adapter(it.write(tmp_path / str(index)), TINY_PATHS) for index, it in enumerate(drafts)]


def joined(one, other, scales):
    """Of two drafts, what PEFT's `cat` makes: ranks per module, and tensors."""
    factors = [(scales[0], 2.0), (scales[1], 4 / 5**0.5)]
    tensors = {}
    for (draft, (scale, of_part)), name in (
        (each, name) for each in zip((one, other), factors, strict=True) for name in each[0].tensors
    ):
        values = draft.tensors[name].float()
        if ".lora_A." in name:
            values = values * scale * of_part
        axis = 0 if ".lora_A." in name else 1
        tensors[name] = torch.cat([tensors[name], values], axis) if name in tensors else values
    config = {"r": 8, "lora_alpha": 8, "rank_pattern": {"up_proj": 3, "down_proj": 5}}
    config |= {"alpha_pattern": {"up_proj": 3, "down_proj": 5}, "peft_type": "LORA"}
    return Draft({**config, "target_modules": ["q_proj", "up_proj", "down_proj"]}, tensors)


def test_the_image_is_of_the_joined_matrices(two, tmp_path):
    from .test_adapter_forms import image_of

    scales = (0.7, -0.5)
    one, other = manifests(tmp_path, *two)
    made = composed([(one, scales[0]), (other, scales[1])])
    assert made.rank == 8
    path = joined(*two, scales).write(tmp_path / "joined")
    want, image = image_of(path)
    assert made.parts == want.parts
    got = read(made)
    assert torch.equal(got, image)
    again = inspect(made.path, TINY_PATHS, [tmp_path])
    assert again.parts == made.parts and torch.equal(read(again), image)
    assert paths_of(made.path) == [one.path, other.path]


def test_a_module_of_a_later_layer_may_be_of_the_first_source(adapter_draft, tmp_path):
    """Layers of a part are in rising order, as its pages have them, whichever source names them first."""
    later = adapter_draft(("q_proj",), layers=(1,), layers_to_transform=[1], seed=1)
    others = adapter_draft(("q_proj", "up_proj"), layers=(0, 2), layers_to_transform=[0, 2], seed=2)
    one, other = manifests(tmp_path, later, others)
    made, turned = composed([(one, 0.5), (other, 2.0)]), composed([(other, 2.0), (one, 0.5)])
    assert [part.layers for part in made.parts] == [(0, 1, 2), (0, 2)]
    assert made.parts == turned.parts
    assert torch.equal(read(made), read(turned))


def read(manifest):
    from chorus.memory.adapters.image import ImageForm, read_image
    from chorus.memory.host.buffers import HostBuffers
    from chorus.memory.host.image import HostImage
    from chorus.memory.pages.adapter_layout import AdapterLayout

    from ...tables import TINY

    layout = AdapterLayout.build(manifest.parts, TINY, 1024, 4)
    image = HostImage()
    read_image(manifest, ImageForm(layout, TINY, 1024, torch.float32), image, HostBuffers())
    return image.data


def test_of_other_forms(two, tmp_path):
    one, other = manifests(tmp_path, *two)
    mlx = inspect_adapter(write_mlx(two[0], tmp_path / "mlx"), TINY_PATHS)
    want, got = (composed([(first, 0.5), (other, 2.0)]) for first in (one, mlx))
    assert torch.equal(read(want), read(got))


def test_its_content_is_that_of_its_sources_and_scales(two, tmp_path):
    one, other = map(with_content, manifests(tmp_path, *two))
    made = composed([(one, 0.5), (other, 2.0)])
    assert made.content_hash == composed([(one, 0.5), (other, 2.0)]).content_hash
    others = composed([(one, 0.5), (other, 1.0)]), composed([(other, 0.5), (one, 2.0)]), one, other
    assert made.content_hash not in {each.content_hash for each in others}
    unhashed = inspect(made.path, TINY_PATHS)
    assert unhashed.content_hash is None
    assert with_content(unhashed).content_hash == made.content_hash
    assert with_effect(unhashed).no_effect is False


def test_a_changed_source_is_noticed(two, tmp_path):
    one, other = manifests(tmp_path, *two)
    made = composed([(one, 0.5), (other, 2.0)])
    with open_unchanged(made) as file:
        assert file.is_unchanged()
        os.utime(other.path / "adapter_model.safetensors", (1, 1))
        assert not file.is_unchanged()
        assert str(other.path) in str(file.changed())
    with pytest.raises(AdapterChanged, match=str(other.path)):
        open_unchanged(made)
    assert not any(
        "adapter_model" in os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    )


def test_an_activated_source_is_refused(adapter_draft, tmp_path):
    plain, activated = manifests(tmp_path, adapter_draft(), adapter_draft(alora_invocation_tokens=[5]))
    with pytest.raises(AdapterFormatError, match=r"is an activated LoRA \(alora_invocation_tokens\)"):
        composed([(plain, 1.0), (activated, 0.5)])


def test_a_source_outside_the_roots_is_refused(two, tmp_path):
    made = composed([(each, 0.5) for each in manifests(tmp_path, *two)])
    with pytest.raises(AdapterFormatError, match="outside the directories"):
        inspect(made.path, TINY_PATHS, [tmp_path / "0"])


def test_every_field_of_an_adapter_is_judged():
    """What an adapter has beyond A and B must be composed, or make it one that `why_alone` refuses."""
    files = {"path", "file_size", "mtime_ns", "tensor_spans", "identity", "stem", "modules", "num_left_out", "sources"}
    files |= {"dropped", "untrained", "form", "is_larger"}
    told = {"content_hash", "no_effect", "base_model", "names_other_base"}
    refused = {"invocation_tokens", "vectors", "head", "tokens", "tower"}
    of_rows = {"num_tokens", "added"}  # that are refused
    assert {field.name for field in fields(AdapterManifest)} == {"parts"} | files | told | refused | of_rows
    assert {field.name for field in fields(AdapterPart)} == {
        *("rank", "scale", "layers", "targets"),
        *("token_ids", "file_rows", "experts"),  # refused too
    }
