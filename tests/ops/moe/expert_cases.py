"""Matrices of experts and where rows go, for tests of their products."""

from __future__ import annotations

import torch

from chorus.ops.gemm.narrow_weights import NarrowWeight, keep, keep_float4, stack

#: (form, inputs, group): whole rows and groups, with an input that no block divides; every group of MXFP4 has 32.
NARROW = [
    ("int8", 72, 72),
    ("int4", 192, 64),
    ("int4 zeros", 320, 128),
    ("int4 zeros", 160, 160),
    ("fp8", 200, 128),
    ("fp8", 40, 40),
    ("mxfp4", 32, 32),
    ("mxfp4", 288, 32),
]

#: Forms that are multiplied in wide tiles, likewise; plain weights, too.
WIDE = [
    ("plain", 72, 0),
    ("int8", 72, 72),
    ("int4", 192, 64),
    ("int4 zeros", 320, 128),
    ("fp8", 200, 128),
    ("mxfp4", 288, 32),
]


def narrow_stack(
    form: str, experts: int, outputs: int, inputs: int, group: int, dtype: torch.dtype, device: str = "cpu"
) -> NarrowWeight:
    """Random matrices of experts in a form of `NARROW`."""
    generator, where = torch.Generator().manual_seed(3), torch.device(device)

    def whole(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int8)

    def matrix() -> NarrowWeight:
        groups = -(-inputs // group)
        scales = torch.rand(outputs, groups, generator=generator) / 32 + 1 / 64
        if form == "mxfp4":
            doubles = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8)
            numbers = doubles[whole(0, 8, outputs, inputs).long()] * (1 - 2 * whole(0, 2, outputs, inputs))
            exponents = whole(-6, 2, outputs, groups).float()
            exponents[0, 0], exponents[-1, -1] = -127, 20  # the least one, a subnormal number, and a large one
            return keep_float4(numbers, torch.exp2(exponents), dtype=dtype, device=where)
        if form == "fp8":
            values = (torch.randn(outputs, inputs, generator=generator) * 8).to(torch.float8_e4m3fn)
            return keep(values, scales, None, bits=8, group=group, dtype=dtype, device=where)
        bits = int(form[3])
        half = 1 << bits - 1
        zeros = whole(-half, half - 1, outputs, groups) if form.endswith("zeros") else None
        values = whole(-half, half - 1, outputs, inputs)
        return keep(values, scales, zeros, bits=bits, group=group, dtype=dtype, device=where)

    found = stack([matrix() for _ in range(experts)])
    assert found is not None and found.shape == (experts, outputs, inputs)
    return found


def chosen_experts(rows, experts, each, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, experts, generator=generator).topk(each).indices
