"""Forms of integers with scales, written with plain tensor arithmetic as their publishers describe them."""

from __future__ import annotations

from typing import Any

import torch

from .twins import Form, Tensors

#: AutoAWQ: which of eight consecutive outputs the nibbles of a word hold, from the lowest.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def pack_rows(values: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """int32 words of each row's integers, low bits first; the last word may be filled up with zeros."""
    each = 32 // bits
    filled = torch.nn.functional.pad(values.long(), (0, -values.shape[1] % each))
    fields = filled.unflatten(1, (-1, each))[..., order or list(range(each))]
    words = (fields << bits * torch.arange(each)).sum(2)
    return (words - ((words >> 31) << 32)).int()


def draw(shape: tuple[int, ...], least: int, most: int) -> torch.Tensor:
    return torch.randint(least, most + 1, shape)


def draw_scales(shape: tuple[int, ...], bits: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Scales that make weights of about 1."""
    return ((torch.rand(shape) + 0.5) / 2 ** (bits - 2)).to(dtype)


def product(values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_of: list[int]) -> torch.Tensor:
    """`(values − zeros) · scales` in float32, column by column. values `[out, in]`, the others `[out, groups]`."""
    return (values - zeros[:, group_of]).float() * scales[:, group_of].float()


def awq(group: int | None = 8, plain: tuple[str, ...] = (), **how: Any) -> Form:
    def quantise(_: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = shape
        length = group or inputs
        values, zeros = draw(shape, 0, 15), draw((outputs, inputs // length), 0, 15)
        scales = draw_scales((outputs, inputs // length), 4)
        tensors = {
            "qweight": pack_rows(values.T, 4, AWQ_ORDER),
            "qzeros": pack_rows(zeros.T, 4, AWQ_ORDER),
            "scales": scales.T,
        }
        return tensors, product(values, zeros, scales, [j // length for j in range(inputs)])

    config = {"quant_method": "awq", "bits": 4, "group_size": group or -1, "version": "gemm", "zero_point": True}
    return Form(quantise, {**config, "modules_to_not_convert": list(plain), **how}, plain)


def gptq(
    bits: int = 4,
    group: int | None = 8,
    *,
    act_order: bool = False,
    v2: bool = False,
    has_order: bool = True,
    plain: tuple[str, ...] = (),
    has_head: bool = False,
    **how: Any,
) -> Form:
    def quantise(_: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = shape
        length, most = group or inputs, 2**bits - 1
        groups = -(-inputs // length)
        group_of = [j // length for j in range(inputs)]
        if act_order:
            group_of = [group_of[j] for j in torch.randperm(inputs).tolist()]
        values = draw(shape, 0, most)
        zeros = draw((outputs, groups), 0 if v2 else 1, most)
        scales = draw_scales((outputs, groups), bits)
        tensors = {
            "qweight": pack_rows(values, bits).T,
            "qzeros": pack_rows((zeros if v2 else zeros - 1).T, bits),
            "scales": scales.T,
        }
        if has_order:
            tensors["g_idx"] = torch.tensor(group_of, dtype=torch.int32)
        return tensors, product(values, zeros, scales, group_of)

    config: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": act_order}
    config |= {"sym": False, "lm_head": has_head, "damp_percent": 0.01, "true_sequential": True}
    config |= {"checkpoint_format": "gptq_v2"} if v2 else {}
    return Form(quantise, config | how, plain, has_head)


def compressed_integers(
    bits: int = 4,
    strategy: str = "group",
    group: int = 8,
    *,
    is_packed: bool = True,
    symmetric: bool = True,
    act_order: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Form:
    """compressed-tensors' `pack-quantized` and `int-quantized`."""
    half = 2 ** (bits - 1)

    def quantise(_: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = shape
        length = group if strategy == "group" else inputs
        groups = -(-inputs // length)
        group_of = [j // length for j in range(inputs)]
        tensors: Tensors = {}
        if act_order:
            group_of = [group_of[j] for j in torch.randperm(inputs).tolist()]
            tensors["weight_g_idx"] = torch.tensor(group_of, dtype=torch.int32)
        values = draw(shape, -half, half - 1)
        of = (1, 1) if strategy == "tensor" else (outputs, groups)
        scales, zeros = draw_scales(of, bits, dtype), draw(of, -half, half - 1) * (not symmetric)
        if is_packed:
            tensors |= {"weight_packed": pack_rows(values + half, bits), "weight_shape": torch.tensor(shape)}
        else:
            tensors["weight"] = values.to(torch.int8)
        tensors["weight_scale"] = scales.reshape(1) if strategy == "tensor" else scales
        if not symmetric:
            packs = is_packed and strategy != "tensor"
            stored = pack_rows((zeros + half).T, bits).T if packs else zeros.to(torch.int8)
            tensors["weight_zero_point"] = stored.reshape(1) if strategy == "tensor" else stored
        return tensors, product(values, zeros.expand(outputs, -1), scales.expand(outputs, -1), group_of)

    args: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    args |= {"dynamic": False, "group_size": group if strategy == "group" else None}
    args |= {"actorder": "group"} if act_order else {}
    return Form(quantise, compressed("pack-quantized" if is_packed else "int-quantized", args))


def compressed(layout: str, weights: dict[str, Any], **how: Any) -> dict[str, Any]:
    """A `quantization_config` of one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "format": layout}
    return {**config, "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None, **how}


def compressed_mixed() -> Form:
    """Two groups with formats of their own, and modules that are left plain by expressions and by names."""
    small, large = compressed_integers(4, symmetric=False), compressed_integers(8, "channel", is_packed=False)
    groups = {
        "group_0": small.how["config_groups"]["group_0"],
        "group_1": {
            **large.how["config_groups"]["group_0"],
            "targets": [r"re:.*\.mlp\.(gate|up|gate_up)_proj$"],
            "format": "int-quantized",
        },
    }

    def quantise(module: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        return (large if module.endswith(("gate_proj", "up_proj")) else small).quantise(module, shape)

    ignored = ["lm_head", r"re:.*layers\.0\.self_attn\..*", "model.layers.1.mlp.down_proj"]
    plain = [f"layers.0.self_attn.{each}_proj" for each in ("q", "k", "v", "qkv", "o")] + ["layers.1.mlp.down_proj"]
    return Form(quantise, {**small.how, "config_groups": groups, "ignore": ignored}, plain)
