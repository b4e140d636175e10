"""Forms of small floating-point numbers with scales, written with plain tensor arithmetic."""

from __future__ import annotations

from typing import Any

import torch

from .integer_forms import compressed
from .twins import Form, Tensors


def fp8(scheme: str, plain: tuple[str, ...] = (), end: str = "weight_scale", **how: Any) -> Form:
    """scheme: `tensor`, `channel` or `block`, of 5 × 7."""

    def quantise(_: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        weight, (rows, columns) = torch.randn(shape), shape
        height, width = {"tensor": (rows, columns), "channel": (1, columns), "block": (5, 7)}[scheme]
        scale = torch.empty(-(-rows // height), -(-columns // width))
        stored, product = torch.empty(shape).to(torch.float8_e4m3fn), torch.empty(shape)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                at = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
                scale[i, j] = weight[at].abs().max() / 448
                stored[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
                product[at] = stored[at].float() * scale[i, j]
        return {"weight": stored, end: scale.reshape(()) if scheme == "tensor" else scale}, product

    return Form(quantise, {"quant_method": "fp8", "modules_to_not_convert": list(plain), **how}, plain)


def fbgemm_fp8() -> Form:
    """Channels, with a bound of activations."""
    channels = fp8("channel", plain=("layers.0.mlp.down_proj",))

    def quantise(module: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        tensors, weight = channels.quantise(module, shape)
        return {**tensors, "input_scale_ub": torch.ones(1)}, weight

    how = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": list(channels.plain)}
    return Form(quantise, how, channels.plain)


def fp8_exponents() -> Form:
    """Blocks whose scales are stored as E8M0."""

    def quantise(_: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        stored = torch.randn(shape).to(torch.float8_e4m3fn)
        exponents = torch.randint(124, 130, (-(-shape[0] // 8), -(-shape[1] // 8)), dtype=torch.uint8)
        scales = torch.tensor([[2.0 ** (exponent - 127) for exponent in row] for row in exponents.tolist()])
        of_weights = scales.repeat_interleave(8, 0).repeat_interleave(8, 1)[: shape[0], : shape[1]]
        product = stored.float() * of_weights
        return {"weight": stored, "weight_scale_inv": exponents.view(torch.float8_e8m0fnu)}, product

    return Form(quantise, {"quant_method": "fp8", "weight_block_size": [8, 8], "scale_fmt": "ue8m0"})


#: E2M1 by its four bits: a sign, two bits of exponent, one of mantissa.
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Two numbers a byte, the first in the low bits."""
    return (codes[:, ::2] + 16 * codes[:, 1::2]).byte()


def fp4(group: int, how: dict[str, Any], packed: str = "weight_packed", one: str = "") -> Form:
    """NVFP4, whose scales have a further one named `one`, or MXFP4."""

    def quantise(_: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        codes, (outputs, inputs) = torch.randint(0, 16, shape), shape
        groups = -(-inputs // group)
        tensors = {packed: pack_fp4(codes)}
        if one:
            stored, further = (torch.rand(outputs, groups) * 400 + 1).to(torch.float8_e4m3fn), torch.rand(1) + 0.5
            further = further * 500 if "global" in one else further / 500
            scales = stored.float() / further if "global" in one else stored.float() * further
            tensors |= {"weight_scale": stored, one: further if "global" in one else further.reshape(())}
        else:
            stored = torch.randint(122, 128, (outputs, groups), dtype=torch.uint8)
            tensors["weight_scale"], scales = stored, 2.0 ** (stored.float() - 127)
        return tensors, torch.tensor(FP4)[codes] * scales.repeat_interleave(group, 1)[:, :inputs]

    return Form(quantise, how)


def compressed_fp8(strategy: str) -> Form:
    args: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    args |= {"block_structure": [5, 7]} if strategy == "block" else {}
    return Form(fp8(strategy).quantise, compressed("float-quantized", args))


def compressed_fp4(layout: str, group: int, one: str = "") -> Form:
    args = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "group_size": group}
    args |= {"strategy": "tensor_group" if one else "group"}
    return fp4(group, compressed(layout, args), one=one)


def modelopt(algorithm: str, plain: tuple[str, ...] = (), file: str = "") -> Form:
    """file: `hf_quant_config.json`, or none for config.json."""
    form = fp8("tensor") if algorithm == "FP8" else fp4(16, {}, "weight", "weight_scale_2")
    excluded = ["lm_head", *(f"*{each}" for each in plain)]
    inner = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": excluded}
    flat = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": excluded, "producer": {"name": "modelopt"}}
    return Form(form.quantise, {"quantization": inner} if file else flat, plain, file=file)
