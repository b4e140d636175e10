"""Checkpoints of compressed-tensors that vLLM and transformers read, too: `pack-quantized`, `int-quantized` and
`float-quantized`.

Tests: tests/server/cli/test_quantize.py
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ...config_json import UnsupportedModel
from .round_to_nearest import RoundToNearest

if TYPE_CHECKING:
    import torch


#: Activations of 8 bits, with a scale that each token's get.
_INPUTS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "group_size": None,
    "dynamic": True,
    "observer": None,
}


def packed_tensors(name: str, weight: torch.Tensor, quantiser: RoundToNearest) -> dict[str, torch.Tensor]:
    """The tensors of a weight `[out, in]` called `name`, by the end of their names.

    In FP8: `weight` E4M3 `[out, in]` and `weight_scale` float32 `[out, 1]`. Where activations are rounded: `weight`
    int8 `[out, in]` and `weight_scale`. Else:

    `weight_packed` int32 `[out, ⌈in · bits / 32⌉]`: values plus 2^(bits-1), the first in the lowest bits.
    `weight_scale` bfloat16 `[out, groups]`. `weight_shape` int64 `[2]`.
    """
    import torch

    matrix = quantiser(weight, name)
    if matrix.is_float:
        return {"weight": matrix.values, "weight_scale": matrix.scales}
    if matrix.inputs is not None:
        return {"weight": matrix.values, "weight_scale": matrix.scales.bfloat16()}
    rows, inputs = matrix.values.shape
    bits, each = matrix.bits, 32 // matrix.bits
    stored = torch.zeros(rows, -(-inputs // each) * each, dtype=torch.int64)
    stored[:, :inputs] = matrix.values.long() + (1 << (bits - 1))
    words = (stored.view(rows, -1, each) << (bits * torch.arange(each))).sum(-1)
    return {
        "weight_packed": torch.where(words < 1 << 31, words, words - (1 << 32)).int(),
        "weight_scale": matrix.scales.bfloat16(),
        "weight_shape": torch.tensor([rows, inputs]),
    }


def quantization_config(
    quantiser: RoundToNearest, inputs: Mapping[str, int], ignored: Collection[str] = ()
) -> dict[str, Any]:
    """`quantization_config` of config.json. inputs: of each quantised module, by its name. ignored: names of linear
    modules that are not quantised, in addition to the output projection.

    Raises UnsupportedModel for rows that no group size divides, and for modules at one place in layers with several
    sizes.
    """
    per_row = quantiser.bits == 8
    by_name = {} if per_row else _by_name({each: _group_of(quantiser, each, count) for each, count in inputs.items()})
    layout, inputs_of = ("pack-quantized", None) if quantiser.inputs is None else ("int-quantized", _INPUTS)
    if quantiser.is_float:
        layout, inputs_of = "float-quantized", None  # others round activations if it says so
    sizes = [None] if per_row else sorted(set(by_name.values()), reverse=True)
    groups = {
        f"group_{index}": {
            "targets": ["Linear"]
            if len(sizes) == 1
            else [f"re:.*\\.{name}$" for name in sorted(by_name) if by_name[name] == size],
            "weights": _weights(quantiser, size),
            "input_activations": inputs_of,
            "output_activations": None,
        }
        for index, size in enumerate(sizes)
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted({*ignored, "lm_head"} - inputs.keys()),
        "kv_cache_scheme": None,
    }


def _group_of(quantiser: RoundToNearest, module: str, count: int) -> int:
    """Inputs of a module's groups."""
    group = quantiser.group_of(count)
    if count % group:
        raise UnsupportedModel(
            f"{module} has rows of {count} weights, which no group of 128, 64 or 32 divides; quantise to int8"
        )
    return group


def _by_name(groups: Mapping[str, int]) -> dict[str, int]:
    """Ends of names, as regular expressions, that tell modules of other groups apart: the last part of names, and where
    that has several, such as down_proj of an expert and of a dense layer, all behind the layer's number.
    """
    found: dict[str, set[int]] = {}
    for module, group in groups.items():
        found.setdefault(module.rpartition(".")[2], set()).add(group)
    by_name: dict[str, int] = {}
    for module, group in groups.items():
        name = module.rpartition(".")[2]
        if len(found[name]) > 1:
            name = re.sub(r"\d+", r"\\d+", re.escape(module.partition(".layers.")[2].partition(".")[2]))
        if by_name.setdefault(name, group) != group:
            raise UnsupportedModel(f"{module} has other groups than {name} of other layers; quantise to int8")
    return by_name


def _weights(quantiser: RoundToNearest, group: int | None) -> dict[str, Any]:
    return {
        "num_bits": quantiser.bits,
        "type": "float" if quantiser.is_float else "int",
        "symmetric": True,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
