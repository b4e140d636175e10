"""Values of the fused elementwise kernels against their torch paths on a CPU, over a seeded grid."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ...ops.elementwise import (
    HeadNorms,
    RotaryEmbedding,
    Rotation,
    add_rms_norm,
    rms_norm,
    rotate_and_write,
    silu_and_mul,
)
from .sgmv_values import Row

#: Largest difference, as a share of the largest output: two units in its last place. The kernels round where torch
#: rounds; sums in another order and other approximations of exp and 1/sqrt move a value by a unit, at most twice.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}

WIDTHS = (1, 8, 33, 64, 100, 260)
HEAD_DIMS = (2, 8, 10, 16, 64, 80)
HEADS = ((1, 1), (4, 2), (9, 3), (6, 1), (17, 1), (10, 10))
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """Random values of a launch. spare: columns behind every row of the input. scale: power of ten of the values."""

    seed: int
    tokens: int
    width: int
    heads: tuple[int, int]
    head_dim: int
    spare: int
    scale: int


def cases(seed: int, count: int) -> Iterator[Case]:
    """`count` launches that go through all widths, head sizes and groups of heads."""
    generator = torch.Generator().manual_seed(seed)
    for index in range(count):
        draw = torch.randint(0, 1 << 30, (4,), generator=generator).tolist()
        yield Case(
            draw[0], (1, 5, 2, 0)[draw[1] % 4] if index else 3, WIDTHS[index % len(WIDTHS)], HEADS[index % len(HEADS)],
            HEAD_DIMS[index % len(HEAD_DIMS)], (0, 3, 16)[draw[2] % 3], (0, -3, 2)[draw[3] % 3],
        )  # fmt: skip


class Inputs:
    """Random tensors of a case."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        self._generator = torch.Generator().manual_seed(case.seed)

    def rows(self, width: int) -> torch.Tensor:
        """`[tokens, width]`, rows `width + spare` apart."""
        wide = torch.randn(self.case.tokens, width + self.case.spare, generator=self._generator)
        return (wide * 10.0**self.case.scale).to(self.dtype)[:, :width]

    def weight(self, width: int) -> torch.Tensor:
        return (1 + 0.3 * torch.randn(width, generator=self._generator)).to(self.dtype)

    def places(self, count: int) -> torch.Tensor:
        """`[tokens]` places of `count`; all different but those that fall on place 0."""
        return torch.randperm(count, generator=self._generator)[: self.case.tokens]


Problem = tuple[float, str]


def check_norm(case: Case, dtype: torch.dtype, device: str) -> Problem:
    from ...ops import elementwise_triton

    inputs = Inputs(case, dtype)
    x, weight = inputs.rows(case.width), inputs.weight(case.width)
    got = elementwise_triton.rms_norm(x.to(device), weight.to(device), EPS)
    return _compare(got, rms_norm(x, weight, EPS), dtype)


def check_add_norm(case: Case, dtype: torch.dtype, device: str) -> Problem:
    from ...ops import elementwise_triton

    inputs = Inputs(case, dtype)
    x, residual, weight = inputs.rows(case.width), inputs.rows(case.width), inputs.weight(case.width)
    before, stream = residual.clone(), residual.to(device, copy=True)
    got = elementwise_triton.add_rms_norm(x.to(device), stream, weight.to(device), EPS)
    want = add_rms_norm(x, before, weight, EPS)
    if not torch.equal(stream.cpu(), before):
        return math.inf, "the residual is not the sum"
    return _compare(got, want, dtype)


def check_silu(case: Case, dtype: torch.dtype, device: str) -> Problem:
    from ...ops import elementwise_triton

    gate_up = Inputs(case, dtype).rows(2 * case.width)
    return _compare(elementwise_triton.silu_and_mul(gate_up.to(device)), silu_and_mul(gate_up), dtype)


def check_rotary(case: Case, dtype: torch.dtype, device: str, normed: bool = False) -> Problem:
    """Into the middle one of three layers of a page-outermost arena that is NaN everywhere."""
    from ...ops import elementwise_triton

    inputs, (heads, kv_heads), head_dim = Inputs(case, dtype), case.heads, case.head_dim
    qkv = inputs.rows((heads + 2 * kv_heads) * head_dim)
    rotary = RotaryEmbedding(1e4 ** (-torch.arange(0, head_dim, 2) / head_dim), 600, dtype)
    rotation = rotary.at(inputs.places(600))
    norms = HeadNorms(inputs.weight(head_dim), inputs.weight(head_dim), EPS) if normed else None
    place = inputs.places(4 * 5)
    page, offset = place // 5, place % 5
    arenas = [torch.full((4, 3, 2, 5, kv_heads, head_dim), math.nan, dtype=dtype, device=to) for to in ("cpu", device)]
    want = rotate_and_write(qkv, rotation, norms, arenas[0][:, 1, 0], arenas[0][:, 1, 1], page, offset)
    # on a GPU the kernel looks the rows up itself; here the rows of a reversed table are named backwards
    rows = torch.arange(case.tokens - 1, -1, -1, device=device)
    table = Rotation(rotation.cos.flip(0).to(device), rotation.sin.flip(0).to(device), rows)
    moved = norms and HeadNorms(norms.q.to(device), norms.k.to(device), EPS)
    got = elementwise_triton.rotate_and_write(
        qkv.to(device), table, moved, arenas[1][:, 1, 0], arenas[1][:, 1, 1], page.to(device), offset.to(device)
    )
    written, expected = arenas[1].cpu(), arenas[0]
    if not torch.equal(written.isnan(), expected.isnan()):
        return math.inf, "wrote elsewhere"
    if not torch.equal(written[:, :, 1].nan_to_num(), expected[:, :, 1].nan_to_num()):
        return math.inf, "v is not what was given"
    both = zip((got.cpu(), written.nan_to_num()), (want, expected.nan_to_num()), strict=True)
    if not normed:
        return (0.0, "") if all(torch.equal(a, b) for a, b in both) else (math.inf, "differs, though nothing is summed")
    found = [_compare(a, b, dtype) for a, b in both]
    return max(found)


def check_normed_rotary(case: Case, dtype: torch.dtype, device: str) -> Problem:
    return check_rotary(case, dtype, device, normed=True)


CHECKS: dict[str, Callable[[Case, torch.dtype, str], Problem]] = {
    "rms_norm": check_norm,
    "add_rms_norm": check_add_norm,
    "silu_and_mul": check_silu,
    "rotary": check_rotary,
    "normed rotary": check_normed_rotary,
}


def _compare(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> Problem:
    """The largest difference as a share of the largest output, and what is wrong, if anything."""
    if got.dtype is not dtype or got.shape != want.shape:
        return math.inf, f"is {got.dtype} {tuple(got.shape)}, not {dtype} {tuple(want.shape)}"
    if not want.numel():
        return 0.0, ""
    largest = max(float(want.float().abs().max()), torch.finfo(torch.float16).tiny)
    error = float((got.cpu().float() - want.float()).abs().max()) / largest
    return error, "" if error <= TOLERANCE[dtype] else f"differs by {error:.1e} of the largest output"


def run_grid(seed: int, count: int, device: str = "cpu") -> list[Row]:
    """`count` launches per kernel and dtype; on a CPU in Triton's interpreter."""
    rows = []
    for name, check in CHECKS.items():
        for dtype in TOLERANCE:
            row, begin = Row(name, str(dtype).removeprefix("torch.")), time.perf_counter()
            for index, case in enumerate(cases(seed, count)):
                with np.errstate(over="ignore"):  # exp of a large number is infinite, as it should be
                    error, problem = check(case, dtype, device)
                row.launches += 1
                row.worst = max(row.worst, error)
                if problem:
                    row.failures.append(f"case {index} ({case}): {problem}")
            row.seconds = time.perf_counter() - begin
            rows.append(row)
    return rows
