"""Tensors that GGUF files have made of others, or with rows in another order: see `gguf_sources`.

Tests: tests/core/test_gguf.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch

from .gguf_file import Stored
from .gguf_source import FileTensors, GgufSource


def by_unit(sizes: tuple[int, ...], units: int) -> torch.Tensor:
    """See `Names.by_unit`."""
    runs = [torch.arange(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return torch.cat([run.view(units, -1) for run in runs], 1).flatten()


def _kv_up(names: FileTensors, name: str) -> GgufSource | None:
    """DeepSeek's keys and values of latents: of every head its keys, then its values; newer files have them apart."""
    if not name.endswith(".kv_b_proj.weight") or names.block(name, "attn_kv_b.weight"):
        return None
    keys, values = names.block(name, "attn_k_b.weight"), names.block(name, "attn_v_b.weight")
    if keys is None or values is None or any(len(names.file.tensors[each].shape) != 3 for each in (keys, values)):
        return None
    parts = Stored(keys, heads=True, transposed=True), Stored(values, heads=True)
    heads = {int(names.file.tensors[part.tensor].shape[2]) for part in parts}
    if len(heads) > 1:
        return None
    return names.joined(parts, partial(by_unit, tuple(names.shape(part)[0] for part in parts), heads.pop()))


def _qkv(names: FileTensors, name: str) -> GgufSource | None:
    """GPT-NeoX' and BLOOM's q, k and v by head."""
    kind = name.rpartition(".")[2]
    found = names.block(name, f"attn_qkv.{kind}") if name.endswith(f".query_key_value.{kind}") else None
    if found is None:
        return None
    part = Stored(found)
    order = names.by_unit("attention.head_count", (names.shape(part)[0] // 3,) * 3)
    return names.joined((part,), order)


def _qkv_of_groups(names: FileTensors, name: str) -> GgufSource | None:
    """Falcon's q, k and v by group: heads of q, then one of k and one of v."""
    kind = name.rpartition(".")[2]
    found = names.block(name, f"attn_qkv.{kind}") if name.endswith(f".query_key_value.{kind}") else None
    if found is None:
        return None
    part, heads = Stored(found), names.number("attention.head_count")
    groups = names.number("attention.head_count_kv", heads)
    own = names.shape(part)[0] // (heads + 2 * groups) * groups
    return names.joined((part,), names.by_unit("attention.head_count_kv", (names.shape(part)[0] - 2 * own, own, own)))


def _latents_and_kernels(names: FileTensors, name: str) -> GgufSource | None:
    """As `_kv_up`; and the convolution of q, k and v, which the file has apart, each as `[1, channels, 1, width]`."""
    if not name.endswith(".conv1d.weight"):
        return _kv_up(names, name)
    found = [names.block(name, f"ssm_conv1d_{each}.weight") for each in "qkv"]
    parts = tuple(Stored(each, heads=True) for each in found if each is not None)
    if len(parts) != len(found):
        return None
    rows, width = names.joined(parts).shape
    return GgufSource(parts, (rows, 1, width))


def _qkvz(names: FileTensors, name: str) -> GgufSource | None:
    """Qwen3-Next's q, k, v and z by head of keys; older files have one tensor of transformers' order."""
    if not name.endswith(".in_proj_qkvz.weight"):
        return None
    qkv, gate = names.block(name, "attn_qkv.weight"), names.block(name, "attn_gate.weight")
    if qkv is None or gate is None:
        return None
    parts = Stored(qkv), Stored(gate)
    both, values = (names.shape(part)[0] for part in parts)
    keys = (both - values) // 2
    return names.joined(parts, names.by_unit("ssm.group_count", (keys, keys, values, values)))


def _gate_and_up(names: FileTensors, name: str) -> GgufSource | None:
    """Gate and up of Granite-MoE's shared expert."""
    if not name.endswith(".shared_mlp.input_linear.weight"):
        return None
    gate, up = (names.block(name, f"ffn_{each}_shexp.weight") for each in ("gate", "up"))
    return None if gate is None or up is None else names.joined((Stored(gate), Stored(up)))


#: Architectures that have some tensors made of others, or in another order.
MADE: dict[str, Callable[[FileTensors, str], GgufSource | None]] = {
    "bloom": _qkv,
    **dict.fromkeys(("deepseek2", "deepseek32", "dots3note", "glm-dsa", "hy_v4"), _kv_up),
    "falcon": _qkv_of_groups,
    "glm5-next": _latents_and_kernels,
    "gptneox": _qkv,
    "granitemoe": _gate_and_up,
    "qwen3next": _qkvz,
}
