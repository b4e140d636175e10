"""Forms of small floating-point numbers with scales, written element by element."""

from __future__ import annotations

from typing import Any

import torch

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
