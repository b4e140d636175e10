"""Adapters with tensors in a vision tower: what is read of them, and what is refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.media.linear import AdaptedLinear, AdaptedPatches, Change, make_adaptable
from chorus.core.media.serving import with_tower
from chorus.core.media.tower_adapter import read_changes
from chorus.core.model.read_config import read_model_config
from chorus.core.quarantine import report_contents
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.identity import with_content
from chorus.memory.files.manifest import AdapterManifest
from chorus.memory.files.module_paths import ModulePaths

from .tiny_vision import needs_vision, tiny

pytestmark = [pytest.mark.vision, needs_vision]

PREFIX = "base_model.model.model."
Q = f"{PREFIX}vision_model.encoder.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def modules() -> ModulePaths:
    path = tiny("smolvlm")
    return with_tower(EngineConfig(model=path), read_model_config(path)).module_paths


def changed(tmp_path: Path, name: str, change: Any, **fields: Any) -> Path:
    """An adapter with other tensors, and fields of its configuration."""
    path = tmp_path / name
    shutil.copytree(tiny("smolvlm") / "adapters" / name, path)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    tensors = load_file(path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def test_changes_are_those_of_the_file(modules: ModulePaths) -> None:
    manifest = inspect_adapter(tiny("smolvlm") / "adapters" / "tower", modules)
    assert not manifest.parts and not manifest.num_left_out and manifest.rank == 0
    changes = read_changes(manifest)
    assert changes is not None and not changes.copies
    patches = changes.modules["vision_model.embeddings.patch_embedding"]
    assert patches.a.shape == (4, 3, 8, 8) and patches.b.shape == (32, 4, 1, 1) and patches.scale == 2
    copied = read_changes(inspect_adapter(tiny("smolvlm") / "adapters" / "copied", modules))
    assert copied is not None and set(copied.copies) == {"connector.modality_projection.proj.weight"}
    assert set(copied.modules) == {
        f"vision_model.encoder.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qv"
    }


def test_an_adapter_of_text_alone_has_none(modules: ModulePaths) -> None:
    manifest = inspect_adapter(tiny("smolvlm") / "adapters" / "text", modules)
    assert manifest.tower == () and read_changes(manifest) is None


def test_without_the_tower_its_tensors_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    """On a server that takes no images."""
    plain = read_model_config(tiny("smolvlm")).module_paths
    manifest = inspect_adapter(tiny("smolvlm") / "adapters" / "seven", plain)
    assert manifest.num_left_out and not manifest.tower
    report_contents("seven", manifest)
    (told,) = caplog.records
    assert told.levelno == logging.WARNING and "vision tower" in told.getMessage()
    assert "images are not served" in told.getMessage()
    with pytest.raises(AdapterFormatError, match="match none"):
        inspect_adapter(tiny("smolvlm") / "adapters" / "tower", plain)


def test_the_content_hash_covers_the_tower(modules: ModulePaths, tmp_path: Path) -> None:
    def hash_of(manifest: AdapterManifest) -> str | None:
        return with_content(manifest).content_hash

    own = hash_of(inspect_adapter(tiny("smolvlm") / "adapters" / "seven", modules))
    same = changed(tmp_path, "seven", lambda _: None)
    assert hash_of(inspect_adapter(same, modules)) == own
    shutil.rmtree(same)
    other = changed(tmp_path, "seven", lambda tensors: tensors[f"{Q}.lora_B.weight"].mul_(2))
    assert hash_of(inspect_adapter(other, modules)) != own
    zeros = changed(tmp_path, "tower", lambda tensors: [each.zero_() for each in tensors.values()])
    assert with_content(inspect_adapter(zeros, modules)).no_effect
    assert not with_content(inspect_adapter(tiny("smolvlm") / "adapters" / "tower", modules)).no_effect


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("tower", lambda it: it.pop(f"{Q}.lora_B.weight"), "A and B are needed"),
        (
            "tower",
            lambda it: it.update({f"{Q}.lora_A.weight": torch.ones(4, 31)}),
            r"shape \[4, 31\], \[4, 32\] is needed",
        ),
        (
            "tower",
            lambda it: it.update(
                {f"{PREFIX}vision_model.embeddings.position_embedding.lora_embedding_A": torch.ones(4, 16)}
            ),
            "embeddings or another module",
        ),
        (
            "tower",
            lambda it: it.update({f"{PREFIX}vision_model.post_layernorm.lora_A.weight": torch.ones(4, 32)}),
            "no linear layer of the vision tower",
        ),
        (
            "tower",
            lambda it: it.update(
                {f"{PREFIX}vision_model.embeddings.patch_embedding.lora_magnitude_vector": torch.ones(32)}
            ),
            "DoRA on a convolution",
        ),
        ("seven", lambda it: it.update({f"{PREFIX}connector.other.weight": torch.ones(2, 2)}), "no such parameter"),
        (
            "copied",
            lambda it: it.update({f"{PREFIX}connector.modality_projection.proj.weight": torch.ones(2, 2)}),
            "is needed",
        ),
        (
            "text",
            lambda it: it.update({f"{Q}.lora_A.weight": torch.ones(4, 32), f"{Q}.lora_B.weight": torch.ones(32, 4)}),
            "not targeted",
        ),
    ],
)
def test_what_is_not_served_is_named(modules: ModulePaths, tmp_path: Path, name: str, change: Any, why: str) -> None:
    with pytest.raises(AdapterFormatError, match=why):
        inspect_adapter(changed(tmp_path, name, change), modules)


def test_an_activated_adapter_of_a_tower_is_refused(modules: ModulePaths, tmp_path: Path) -> None:
    path = changed(tmp_path, "seven", lambda _: None, alora_invocation_tokens=[5], use_rslora=False)
    with pytest.raises(AdapterFormatError, match="alora_invocation_tokens"):
        inspect_adapter(path, modules)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["tower", "copied"])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, name: str, value: float) -> None:
    """When they are checked, not with the first image; and those of a tower alone are checked."""
    path = tiny("smolvlm")

    def change(tensors: Any) -> None:
        last = sorted(each for each in tensors if "connector" in each or "vision_model" in each)[-1]
        tensors[last].view(-1)[-1] = value

    engine = Engine.from_config(EngineConfig(model=path, memory_bytes=64 << 20, device="cpu", cpu_kernels="torch"))
    assert not engine.adapters.check(path / "adapters" / name).no_effect
    with pytest.raises(AdapterFormatError, match="NaN or infinity"):
        engine.adapters.check(changed(tmp_path, name, change))
    engine.close()


def test_a_composed_adapter_has_no_tower(modules: ModulePaths) -> None:
    manifest = inspect_adapter(tiny("smolvlm") / "adapters" / "seven", modules)
    assert "vision tower" in str(manifest.why_alone)
    assert "vision tower" not in str(replace(manifest, tower=()).why_alone)


def test_a_change_ends_with_its_use() -> None:
    from torch import nn

    inner = nn.Sequential(nn.Linear(4, 3), nn.Conv2d(3, 5, 2, stride=2), nn.Conv2d(3, 5, 3, stride=1))
    found = make_adaptable(inner)
    assert set(found) == {"0", "1"} and type(inner[2]) is nn.Conv2d
    linear, patches = found["0"], found["1"]
    assert isinstance(linear, AdaptedLinear) and isinstance(patches, AdaptedPatches)
    x, image = torch.randn(2, 4), torch.randn(1, 3, 4, 4)
    before = linear(x), patches(image)
    linear.change = Change(torch.randn(2, 4), torch.randn(3, 2), 0.5)
    patches.change = Change(torch.randn(2, 3, 2, 2), torch.randn(5, 2, 1, 1), 0.5)
    a, b = patches.change.a, patches.change.b
    merged = patches.weight + 0.5 * (b.flatten(1) @ a.flatten(1)).view_as(patches.weight)
    wanted = torch.nn.functional.conv2d(image, merged, patches.bias, stride=2)
    assert torch.allclose(patches(image), wanted, atol=1e-5) and not torch.equal(linear(x), before[0])
    linear.change = patches.change = None
    assert torch.equal(linear(x), before[0]) and torch.equal(patches(image), before[1])
