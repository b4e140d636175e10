"""A part of the model that a checkpoint has as several tensors, whose rows follow one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.shard import Shard
from chorus.core.model.weights.weight_loader import WeightLoader

from ...tiny_families import save_family

FAMILY = "olmo-hybrid-wide-values"

#: Rows of queries, keys and values.
WIDTHS = (24, 24, 48)
AT = "model.layers.{}.linear_attn."
CONVS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
JOINT = "conv1d.weight"
LAYERS = range(3)


@pytest.fixture
def saved(tmp_path) -> Path:
    """As transformers saves it: in three equal parts."""
    save_family(FAMILY, tmp_path)
    return tmp_path


def written(path: Path, joint: dict[int, torch.Tensor] | None, **parts: torch.Tensor | None) -> None:
    """Replace the convolutions of layers. joint: of each layer, in one tensor. parts: of each of layer 1, others
    stay.
    """
    file = path / "model.safetensors"
    tensors = load_file(file)
    if joint is not None:
        tensors = {name: it for name, it in tensors.items() if not name.endswith(CONVS)}
        tensors |= {AT.format(layer) + JOINT: it for layer, it in joint.items()}
    for name, it in parts.items():
        tensors.pop(AT.format(1) + name + "_conv1d.weight", None)
        if it is not None:
            tensors[AT.format(1) + name + "_conv1d.weight"] = it
    save_file(tensors, file, {"format": "pt"})


def joined(path: Path, layer: int) -> torch.Tensor:
    tensors = load_file(path / "model.safetensors")
    return torch.cat([tensors[AT.format(layer) + name] for name in CONVS])


def taps(path: Path, rank: int = 0, size: int = 1) -> list[torch.Tensor]:
    """The weights of convolutions `[taps, channels]` that a TP rank loads."""
    shard = Shard(rank, size)
    layers = WeightLoader(path, read_model_config(path), torch.float32, shard=shard).layers()
    return [each["recurrent"].conv for each in layers if "recurrent" in each]


def test_transformers_reads_what_it_saves_in_equal_parts(saved):
    """Three equal parts are no fault of the file: both join them in order."""
    from transformers import AutoModelForCausalLM

    tensors = load_file(saved / "model.safetensors")
    assert [len(tensors[AT.format(0) + name]) for name in CONVS] == [32, 32, 32]
    model: Any = AutoModelForCausalLM.from_pretrained(saved)
    for layer, found in zip(LAYERS, taps(saved), strict=True):
        want = model.model.layers[layer].linear_attn.conv1d.weight
        assert torch.equal(found, want.squeeze(1).T)


@pytest.mark.parametrize("form", ["published", "joint"])
def test_other_forms_of_the_same_weights_are_read(saved, form):
    want, joint = taps(saved), {layer: joined(saved, layer) for layer in LAYERS}
    if form == "joint":
        written(saved, joint)
    else:
        parts = dict(zip("qkv", joint[1].split(WIDTHS), strict=True))
        written(saved, None, **{name: it.contiguous() for name, it in parts.items()})
    assert all(torch.equal(one, other) for one, other in zip(taps(saved), want, strict=True))


def test_ranks_have_their_heads_of_each_part(saved):
    for layer in LAYERS:
        q, k, v = joined(saved, layer).squeeze(1).split(WIDTHS)
        for rank in range(2):
            own = torch.cat([each.chunk(2)[rank] for each in (q, k, v)])
            assert torch.equal(taps(saved, rank, 2)[layer], own.T)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"k": None}, "k_conv1d.weight is missing from its weight files, which have .*.q_conv1d.weight"),
        ({"v": torch.zeros(31, 1, 4)}, r"conv1d.weight has shape \[95, 1, 4\], config.json needs \[96, 1, 4\]"),
        ({"v": torch.zeros(32, 1, 3)}, r"v_conv1d.weight has shape \[32, 1, 3\], its neighbour .*q_conv1d.weight "),
        ({"v": torch.zeros(32, 1, 4).half()}, "v_conv1d.weight is stored as F16, its neighbour .*q_conv1d.weight as"),
    ],
    ids=["missing", "rows", "taps", "dtype"],
)
def test_parts_that_make_no_tensor_are_refused_by_name(saved, parts, message):
    written(saved, None, **parts)
    with pytest.raises(UnsupportedModel, match=message):
        taps(saved)
