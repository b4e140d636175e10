"""Forms of bitsandbytes, written with plain tensor arithmetic."""

from __future__ import annotations

import json
from typing import Any

import torch

from .twins import Form, Tensors

#: The numbers of NF4 (QLoRA, appendix E).
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
#: The library's FP4: a sign, and eight magnitudes out of order.
FP4 = [0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25]
TABLES = {"nf4": NF4, "fp4": FP4 + [-each for each in FP4]}


def bnb_4bit(
    kind: str = "nf4",
    block: int = 64,
    nested: int | None = None,
    storage: torch.dtype = torch.uint8,
    plain: tuple[str, ...] = (),
) -> Form:
    """nested: scales that share a scale."""

    def quantise(_: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        size, table = shape[0] * shape[1], torch.tensor(TABLES[kind])
        codes = torch.randint(0, 16, (size,))
        packed = 16 * codes[::2] + codes[1::2]
        blocks = -(-size // block)
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
        absmax = torch.rand(blocks) + 0.5
        tensors = {"weight": packed.byte().view(storage).unsqueeze(1), "weight.quant_map": table}
        tensors["weight.absmax"] = absmax
        if nested is not None:
            small, table_2 = torch.randint(0, 256, (blocks,)).byte(), torch.rand(256).sort().values
            scales = torch.rand(-(-blocks // nested)) + 0.5
            state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": 0.4375}
            tensors |= {"weight.nested_absmax": scales, "weight.nested_quant_map": table_2, "weight.absmax": small}
            absmax = table_2[small.long()] * scales.repeat_interleave(nested)[:blocks] + 0.4375
        told = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = told
        weight = table[codes] * absmax.repeat_interleave(block)[:size]
        return tensors, weight.view(shape)

    how = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    how |= {"bnb_4bit_use_double_quant": nested is not None, "llm_int8_skip_modules": ["lm_head", *plain]}
    return Form(quantise, how, plain)


def bnb_int8(plain: tuple[str, ...] = ()) -> Form:
    def quantise(_: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        weight, scales = torch.randint(-127, 128, shape).to(torch.int8), torch.rand(shape[0]) * 4
        tensors = {"weight": weight, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        rows = [(row.float() * scale) * (1 / 127) for row, scale in zip(weight, scales, strict=True)]
        return tensors, torch.stack(rows)

    how = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    return Form(quantise, {**how, "llm_int8_skip_modules": list(plain) or None}, plain)
