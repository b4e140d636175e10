"""Reads the scales of an FP8 KV cache that quantised checkpoints have for each layer's attention.

Tests: tests/core/model/weights/test_kv_scales.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ....ops.elementwise.float8_kv import UNSCALED, KvScales
from ..checkpoints.quantization.reading import REMEDY, read_scales
from ..config_json import UnsupportedModel

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import Checkpoint


def read_kv_scales(checkpoint: Checkpoint, attention: str) -> KvScales:
    """The scales of a layer; 1 where the checkpoint has none. attention: the module, as `model.layers.0.self_attn`.

    Raises UnsupportedModel for scales that are not one positive number for keys and one for values.
    """
    k, v = (next((each for each in _names(attention, side) if each in checkpoint), "") for side in "kv")
    if not k and not v:
        return UNSCALED
    if not k or not v:
        raise UnsupportedModel(
            f"{checkpoint[k or v].path}: tensor {k or v} is there, but the {'v' if k else 'k'}_scale of its layer is "
            f"missing; {REMEDY}, or set kv_cache_dtype to 'auto'"
        )
    return KvScales(_read(checkpoint, k), _read(checkpoint, v))


def _names(attention: str, side: str) -> Iterator[str]:
    """Where tools store the scale of keys (`k`) or values (`v`)."""
    yield f"{attention}.{side}_scale"
    yield f"{attention}.attn.{side}_scale"
    yield f"{attention}.{side}_proj.{side}_scale"  # ModelOpt
    yield f"{attention}.qkv_proj.{side}_scale"
    yield f"{attention}.{side}_proj.output_scale"  # early compressed-tensors


def _read(checkpoint: Checkpoint, name: str) -> float:
    shape = checkpoint[name].shape
    if shape not in ((), (1,)):
        raise UnsupportedModel(
            f"{checkpoint[name].path}: tensor {name} has shape {list(shape)}, and a KV cache in FP8 has one scale "
            "for a layer's keys and one for its values; set kv_cache_dtype to 'auto'"
        )
    checkpoint.check({name: shape})
    scale = float(read_scales(checkpoint, name).reshape(()))
    if scale <= 0:
        raise UnsupportedModel(f"{checkpoint[name].path}: tensor {name} is {scale}, not above 0; {REMEDY}")
    return scale
