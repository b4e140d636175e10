"""The fused elementwise kernels without a GPU: values in Triton's interpreter against their torch paths, and an offline
compile; a process for each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chorus.ops.elementwise.elementwise import (
    HeadNorms,
    RotaryEmbedding,
    Rotation,
    add_layer_norm,
    add_rms_norm,
    clamped_swiglu,
    gelu_and_mul,
    layer_norm,
    rms_norm,
    rotate_and_write,
    silu_and_mul,
    write_latents,
)
from chorus.ops.elementwise.elementwise_schedule import Gating
from chorus.ops.elementwise.float8_kv import KvScales
from chorus.ops.elementwise.rotation import KvSlots, NewLatents
from chorus.perf.kernels.variants import ELEMENTWISE

from ...processes import run_python

#: Largest difference, as a share of the largest output: two units in its last place. The kernels round where torch
#: rounds; sums in another order and other approximations of exp and 1/sqrt move a value by a unit, at most twice.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}

WIDTHS = (1, 8, 33, 64, 100, 260)
HEAD_DIMS = (2, 8, 10, 16, 64, 80)
HEADS = ((1, 1), (4, 2), (9, 3), (6, 1), (17, 1), (10, 10))
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """Random values of a launch. spare: columns after every row of the input. scale: power of ten of the values."""

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
            draw[0],
            (1, 5, 2, 0)[draw[1] % 4] if index else 3,
            WIDTHS[index % len(WIDTHS)],
            HEADS[index % len(HEADS)],
            HEAD_DIMS[index % len(HEAD_DIMS)],
            (0, 3, 16)[draw[2] % 3],
            (0, -3, 2)[draw[3] % 3],
        )


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


def check_norm(
    case: Case, dtype: torch.dtype, device: str, *, centered: bool = False, add: bool = False, wide: bool = False
) -> Problem:
    """centered: less the mean. add: to the residual first. wide: with weights in float32."""
    from chorus.ops.elementwise import elementwise_triton

    inputs = Inputs(case, dtype)
    x, residual, weight = inputs.rows(case.width), inputs.rows(case.width), inputs.weight(case.width)
    weight = weight.float() + 1e-3 if wide else weight
    if centered:
        here, there = (layer_norm, add_layer_norm), (elementwise_triton.layer_norm, elementwise_triton.add_layer_norm)
    else:
        here, there = (rms_norm, add_rms_norm), (elementwise_triton.rms_norm, elementwise_triton.add_rms_norm)
    if not add:
        return _compare(there[0](x.to(device), weight.to(device), EPS), here[0](x, weight, EPS), dtype)
    before, stream = residual.clone(), residual.to(device, copy=True)
    got = there[1](x.to(device), stream, weight.to(device), EPS)
    want = here[1](x, before, weight, EPS)
    if not torch.equal(stream.cpu(), before):
        return math.inf, "the residual is not the sum"
    return _compare(got, want, dtype)


def check_gating(case: Case, dtype: torch.dtype, device: str, gating: Gating = Gating.SILU) -> Problem:
    from chorus.ops.elementwise import elementwise_triton

    gate_up, numbers = Inputs(case, dtype).rows(2 * case.width), ()
    if gating is Gating.CLAMPED_SWIGLU:
        numbers = 1.702, 7.0
    want = {Gating.SILU: silu_and_mul, Gating.GELU: gelu_and_mul, Gating.CLAMPED_SWIGLU: clamped_swiglu}[gating]
    got = elementwise_triton.gate_and_mul(gate_up.to(device), gating, *numbers)
    return _compare(got, want(gate_up, *numbers), dtype)


def check_gelu(case: Case, dtype: torch.dtype, device: str) -> Problem:
    return check_gating(case, dtype, device, Gating.GELU)


def check_clamped_swiglu(case: Case, dtype: torch.dtype, device: str) -> Problem:
    """What is no number stays none."""
    from chorus.ops.elementwise import elementwise_triton

    broken = torch.tensor([[math.nan, 1.0, 1.0, math.nan]], dtype=dtype, device=device)
    if not elementwise_triton.gate_and_mul(broken, Gating.CLAMPED_SWIGLU, 1.702, 7.0).isnan().all():
        return math.inf, "a NaN is lost"
    return check_gating(case, dtype, device, Gating.CLAMPED_SWIGLU)


@dataclass(frozen=True)
class Turn:
    """How heads are rotated and normalised. share: of a head's elements, or 0 for none."""

    share: float = 1.0
    interleaved: bool = False
    norm: str = ""
    """`each` head, or the `whole` token."""
    wide: bool = False

    def rotated(self, head_dim: int) -> int:
        """Elements of a head that rotate."""
        return max(2, int(head_dim * self.share) // 2 * 2) if self.share else 0


def check_rotary(case: Case, dtype: torch.dtype, device: str, turn: Turn = Turn()) -> Problem:
    """Into the middle one of three layers of a page-outermost arena that is NaN everywhere."""
    from chorus.ops.elementwise import elementwise_triton

    inputs, (heads, kv_heads), head_dim = Inputs(case, dtype), case.heads, case.head_dim
    qkv = inputs.rows((heads + 2 * kv_heads) * head_dim)
    rotation = table = norms = moved = None
    if dim := turn.rotated(head_dim):
        angles = 1e4 ** (-torch.arange(0, dim, 2) / dim)
        rotation = RotaryEmbedding(angles, 600, dtype, interleaved=turn.interleaved).at(inputs.places(600))
        # on a GPU the kernel looks the rows up itself; here the rows of a reversed table are named backwards
        rows = torch.arange(case.tokens - 1, -1, -1, device=device)
        table = Rotation(rotation.cos.flip(0).to(device), rotation.sin.flip(0).to(device), rows, turn.interleaved)
    if turn.norm:
        counts = (heads, kv_heads) if turn.norm == "whole" else (1, 1)
        weights = [inputs.weight(count * head_dim) for count in counts]
        weights = [weight.float() + 1e-3 for weight in weights] if turn.wide else weights
        norms, moved = HeadNorms(*weights, EPS), HeadNorms(*(weight.to(device) for weight in weights), EPS)
    place = inputs.places(4 * 5)
    page, offset = place // 5, place % 5
    arenas = [torch.full((4, 3, 2, 5, kv_heads, head_dim), math.nan, dtype=dtype, device=to) for to in ("cpu", device)]
    want = rotate_and_write(qkv, rotation, norms, KvSlots(arenas[0][:, 1, 0], arenas[0][:, 1, 1], page, offset))
    slots = KvSlots(arenas[1][:, 1, 0], arenas[1][:, 1, 1], page.to(device), offset.to(device))
    got = elementwise_triton.rotate_and_write(qkv.to(device), table, moved, slots)
    written, expected = arenas[1].cpu(), arenas[0]
    if not torch.equal(written.isnan(), expected.isnan()):
        return math.inf, "wrote elsewhere"
    if not torch.equal(written[:, :, 1].nan_to_num(), expected[:, :, 1].nan_to_num()):
        return math.inf, "v is not what was given"
    both = zip((got.cpu(), written.nan_to_num()), (want, expected.nan_to_num()), strict=True)
    if not turn.norm:
        return (0.0, "") if all(torch.equal(a, b) for a, b in both) else (math.inf, "differs, though nothing is summed")
    found = [_compare(a, b, dtype) for a, b in both]
    return max(found)


def check_latents(case: Case, dtype: torch.dtype, device: str, turn: Turn = Turn(interleaved=True)) -> Problem:
    """Into a layer of an arena that is NaN everywhere; queries beside the latents, as one product gives both."""
    from chorus.ops.elementwise import elementwise_triton

    inputs, (heads, _), rotated, key_dim = Inputs(case, dtype), case.heads, case.head_dim, case.seed % 7
    kv_rank, width = min(case.width, 512), rotated + key_dim
    rows = inputs.rows(heads * width + kv_rank + rotated)
    q, kept = rows.split((heads * width, kv_rank + rotated), 1)
    rotation = table = norm = None
    if dim := turn.rotated(rotated):
        angles = 1e4 ** (-torch.arange(0, dim, 2) / dim)
        rotation = RotaryEmbedding(angles, 600, dtype, interleaved=turn.interleaved).at(inputs.places(600))
        table = Rotation(
            rotation.cos.to(device), rotation.sin.to(device), torch.arange(case.tokens, device=device), turn.interleaved
        )
    if turn.norm:
        norm = inputs.weight(kv_rank).float() + 1e-3 if turn.wide else inputs.weight(kv_rank)
    place = inputs.places(4 * 5)
    page, offset = place // 5, place % 5
    arenas = [torch.full((4, 3, 5, 1, kv_rank + rotated), math.nan, dtype=dtype, device=to) for to in ("cpu", device)]
    here, there = arenas[0][:, 1], arenas[1][:, 1]
    slots = KvSlots(here, here, page, offset), KvSlots(there, there, page.to(device), offset.to(device))
    want = write_latents(q.unflatten(1, (heads, width)), NewLatents(kept, kv_rank, norm, EPS), rotation, slots[0])
    q, kept = rows.to(device).split((heads * width, kv_rank + rotated), 1)
    new = NewLatents(kept, kv_rank, None if norm is None else norm.to(device), EPS)
    got = elementwise_triton.write_latents(q.unflatten(1, (heads, width)), new, table, slots[1])
    if not torch.equal(arenas[1].cpu().isnan(), arenas[0].isnan()):
        return math.inf, "wrote elsewhere"
    if not torch.equal(got.cpu(), want):
        return math.inf, "q differs, though nothing is summed"
    if not torch.equal(there[..., kv_rank:].cpu().nan_to_num(), here[..., kv_rank:].nan_to_num()):
        return math.inf, "keys differ, though nothing is summed"
    return _compare(there[..., :kv_rank].nan_to_num(), here[..., :kv_rank].nan_to_num(), dtype)


def check_float8_rotary(case: Case, dtype: torch.dtype, device: str) -> Problem:
    """Into a cache in FP8: the bytes that torch's operators write."""
    from chorus.ops.elementwise import elementwise_triton

    inputs, (heads, kv_heads), head_dim = Inputs(case, dtype), case.heads, case.head_dim
    qkv = inputs.rows((heads + 2 * kv_heads) * head_dim)
    rotation = RotaryEmbedding(1e4 ** (-torch.arange(0, head_dim, 2) / head_dim), 600, dtype).at(inputs.places(600))
    place = inputs.places(4 * 5)
    page, offset = place // 5, place % 5
    scales = KvScales(10.0**case.scale / 100, 0.7)  # most keys are in range, some beyond it
    caches = [
        torch.full((4, 3, 2, 5, kv_heads, head_dim), 0x7F, dtype=torch.uint8, device=to) for to in ("cpu", device)
    ]
    here, there = (each.view(torch.float8_e4m3fn) for each in caches)
    want = rotate_and_write(qkv, rotation, None, KvSlots(here[:, 1, 0], here[:, 1, 1], page, offset, scales))
    table = Rotation(rotation.cos.to(device), rotation.sin.to(device), torch.arange(case.tokens, device=device))
    slots = KvSlots(there[:, 1, 0], there[:, 1, 1], page.to(device), offset.to(device), scales)
    got = elementwise_triton.rotate_and_write(qkv.to(device), table, None, slots)
    if not torch.equal(caches[0], caches[1].cpu()):
        return math.inf, "the cache has other bytes"
    return (0.0, "") if torch.equal(got.cpu(), want) else (math.inf, "q differs")


def check_broken_heads(case: Case, dtype: torch.dtype, device: str, float8: bool = False) -> Problem:
    """A key or value that is not finite becomes a key of NaN and a value of 0, in its token and head alone. Causal
    attention as kernels compute it, with weights of 0 for masked tokens, is then finite for all tokens before it.
    """
    from chorus.ops.elementwise import elementwise_triton

    inputs, (heads, kv_heads), head_dim = Inputs(replace(case, scale=0), dtype), case.heads, case.head_dim
    tokens = case.tokens
    if not tokens:
        return 0.0, ""
    qkv = inputs.rows((heads + 2 * kv_heads) * head_dim).clone()
    at = case.seed % tokens, heads * head_dim + case.seed % (2 * kv_heads * head_dim)
    dim = head_dim if case.seed % 2 else max(2, head_dim // 4 * 2)  # with a rest that is not rotated, or none
    table = [torch.full((tokens, dim), value, dtype=dtype, device=device) for value in (1.0, 0.0)]
    places = torch.arange(tokens, device=device)

    def write(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = torch.zeros(2, tokens, 1, kv_heads, head_dim, device=device).to(torch.float8_e4m3fn if float8 else dtype)
        rotation = Rotation(*table, places)
        slots = KvSlots(k, v, places, torch.zeros_like(places))
        elementwise_triton.rotate_and_write(values.to(device), rotation, None, slots)
        return k[:, 0].cpu().to(dtype), v[:, 0].cpu().to(dtype)

    whole = write(qkv)
    qkv[at] = (math.nan, math.inf, -math.inf)[case.seed % 3]
    k, v = write(qkv)
    token, head = at[0], (at[1] - heads * head_dim) // head_dim % kv_heads
    if not k[token, head].isnan().all() or v[token, head].any():
        return math.inf, "the broken head is not a key of NaN and a value of 0"
    k[token, head], v[token, head] = whole[0][token, head], whole[1][token, head]
    if not (torch.equal(k, whole[0]) and torch.equal(v, whole[1])):
        return math.inf, "another head changed"
    k[token, head], v[token, head] = math.nan, 0.0
    scores = torch.einsum("qhd,khd->hqk", k.float().nan_to_num(), k.float())
    scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -math.inf)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float())
    if not out[:token].isfinite().all() or out[token:, head].isfinite().any():
        return math.inf, "who sees the token is not NaN, or somebody else is"
    return 0.0, ""


def check_broken_float8_heads(case: Case, dtype: torch.dtype, device: str) -> Problem:
    return check_broken_heads(case, dtype, device, float8=True)


#: Of Qwen3 and Phi-3; Gemma 3; OLMo 2, in its own way of rounding and another; GLM-4 and Cohere; Phi-4-mini; SmolLM3.
TURNS = {
    "rotary": Turn(),
    "normed": Turn(norm="each"),
    "wide norms": Turn(norm="each", wide=True),
    "whole norms": Turn(norm="whole"),
    "wide whole norms": Turn(norm="whole", wide=True),
    "interleaved": Turn(interleaved=True),
    "partial": Turn(0.5),
    "partial and interleaved": Turn(0.5, interleaved=True),
    "partial and normed": Turn(0.25, norm="each", wide=True),
    "partial and whole": Turn(0.25, norm="whole"),
    "none": Turn(0),
    "normed alone": Turn(0, norm="each"),
}

CHECKS: dict[str, Callable[[Case, torch.dtype, str], Problem]] = {
    "rms_norm": check_norm,
    "add_rms_norm": partial(check_norm, add=True),
    "wide rms_norm": partial(check_norm, wide=True),
    "wide add_rms_norm": partial(check_norm, add=True, wide=True),
    "layer_norm": partial(check_norm, centered=True),
    "add_layer_norm": partial(check_norm, centered=True, add=True),
    "silu_and_mul": check_gating,
    "gelu_and_mul": check_gelu,
    "clamped_swiglu": check_clamped_swiglu,
    **{f"{name} rotary": partial(check_rotary, turn=turn) for name, turn in TURNS.items()},
    "latents": partial(check_latents, turn=Turn(norm="each", interleaved=True)),
    "latents with wide norms": partial(check_latents, turn=Turn(0.5, norm="each", wide=True)),
    "latents alone": partial(check_latents, turn=Turn(0)),
    "broken heads": check_broken_heads,
    "float8 rotary": check_float8_rotary,
    "broken float8 heads": check_broken_float8_heads,
}


def _compare(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> Problem:
    """The largest difference as a share of the largest output, and a description of each error."""
    if got.dtype is not dtype or got.shape != want.shape:
        return math.inf, f"is {got.dtype} {tuple(got.shape)}, not {dtype} {tuple(want.shape)}"
    if not want.numel():
        return 0.0, ""
    largest = max(float(want.float().abs().max()), torch.finfo(torch.float16).tiny)
    error = float((got.cpu().float() - want.float()).abs().max()) / largest
    return error, "" if error <= TOLERANCE[dtype] else f"differs by {error:.1e} of the largest output"


pytestmark = pytest.mark.triton

launches = st.builds(
    Case,
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 6),
    width=st.integers(1, 70) | st.sampled_from(WIDTHS),
    heads=st.sampled_from(HEADS),
    head_dim=st.integers(1, 20).map(lambda half: 2 * half) | st.sampled_from(HEAD_DIMS),
    spare=st.integers(0, 5),
    scale=st.integers(-3, 2),
)


def interpret() -> None:
    """Run in a process of its own."""
    from ..bf16_interpreter import fix_bf16, rounded

    values = torch.randn(4000) * 10.0 ** torch.randint(-38, 38, (4000,)).float()
    values = torch.cat((values, torch.tensor([0.0, -0.0, np.inf, -np.inf, 1.00390625, 1.01171875, 3.4e38])))
    bits = rounded(values.numpy()).astype(np.int32)
    assert np.array_equal(bits, values.bfloat16().view(torch.int16).numpy().astype(np.int32) & 0xFFFF)
    assert np.isnan(torch.from_numpy(rounded(np.float32([np.nan])).view(np.int16)).view(torch.bfloat16).float()).all()
    fix_bf16()

    @settings(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=launches, name=st.sampled_from(list(CHECKS)), dtype=st.sampled_from(list(TOLERANCE)))
    def equals_the_torch_path(case: Case, name: str, dtype: torch.dtype) -> None:
        with np.errstate(over="ignore"):  # exp of a large number is infinite, as it should be
            _, problem = CHECKS[name](case, dtype, "cpu")
        assert not problem, problem

    equals_the_torch_path()


def test_values_equal_the_torch_path():
    result = run_python("-m", "tests.ops.elementwise.test_elementwise_triton", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_compiles_for_a_gpu_that_is_not_there():
    only = "rms_norm|gate_and_mul|rotate"
    result = run_python("-m", "chorus.perf.kernels", "--compile", "sm_90", "--only", only, "--workers", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = json.loads(result.stdout.splitlines()[-1])["compile"]
    assert {line["group"] for line in lines} == set(ELEMENTWISE)
    for line in lines:
        assert not line["spill_bytes"]
        assert line["wide_loads"]
        assert line["registers"] <= 130, "programs are small, and many must fit a processor"


def test_the_grid_goes_through_all_shapes():
    drawn = list(cases(0, 8))
    assert {case.width for case in drawn} == set(WIDTHS)
    assert {case.head_dim for case in drawn} == set(HEAD_DIMS)
    assert {case.heads for case in drawn} == set(HEADS)


if __name__ == "__main__":
    interpret()
