"""Our decode attention without a GPU: values in Triton's interpreter against float64, and an offline compile; a process
for each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chorus.ops.attention.attention import AttentionSetup, HeadShape, Scores
from chorus.ops.attention.attention_schedule import PARTS, attention_splits, tile_tokens
from chorus.ops.attention.latents import LatentHeads
from chorus.ops.elementwise.float8_kv import UNSCALED, KvScales, rounded

from ...processes import run_python

#: Largest difference from float64, as a share of the largest value: weights and the result are rounded once each.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}

DUMMY = 0

#: Multiprocessors of a device on which no row of a case is shared, and of one on which all are that can be.
NONE_SHARED, ALL_SHARED = 1, 1000


@dataclass(frozen=True)
class Case:
    """Rows of one token each. lens: tokens of each row, its own among them."""

    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    lens: tuple[int, ...]
    seed: int = 0
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    float8: KvScales | None = None
    """Keys and values are in FP8 with these scales."""
    has_sinks: bool = False
    value_dim: int | None = None
    """Of latents."""

    @property
    def kv_scales(self) -> KvScales:
        return self.float8 or UNSCALED

    @property
    def scores(self) -> Scores:
        return Scores(self.scale, self.window, self.softcap, self.has_sinks)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.heads, self.kv_heads, self.head_dim, self.block_tokens


#: Lengths of one token, at edges of pages and tiles, of several parts, and of parts of two tiles (in float32 over 512
#: tokens of 256 elements); GQA of 1, 2, 3, 4, 8 and 16 heads, and heads that fill no power of two.
CASES = [
    Case(4, 2, 64, 16, (1, 64, 65, 130)),
    Case(8, 2, 128, 16, (31, 32, 65), seed=1),
    Case(2, 2, 64, 16, (16, 17), seed=2),
    Case(8, 1, 96, 5, (37, 5), seed=3),
    Case(6, 2, 16, 1, (7, 1, 140), seed=4),
    Case(16, 1, 32, 32, (33, 129), seed=5),
    Case(2, 1, 256, 16, (530, 16), seed=6),
    Case(4, 2, 64, 16, (1, 64, 65, 330), seed=7, window=40, scale=0.2),
    Case(4, 1, 32, 4, (7, 129), seed=8, window=1, softcap=2.0),
    Case(2, 2, 32, 16, (33, 300), seed=9, softcap=0.7),
    Case(4, 2, 64, 16, (1, 64, 65, 130), seed=10, float8=UNSCALED),
    Case(8, 1, 96, 5, (37, 5), seed=11, float8=KvScales(0.02, 0.3)),
    Case(2, 1, 256, 16, (530, 16), seed=12, float8=KvScales(0.01, 0.01)),
    Case(4, 1, 32, 4, (7, 129), seed=13, window=40, softcap=2.0, scale=0.2, float8=KvScales(0.5, 0.001)),
    Case(8, 1, 512, 16, (130, 16), seed=16, scale=0.1),
    Case(16, 2, 64, 16, (1, 64, 65, 330), seed=14, window=40, has_sinks=True),
    Case(6, 2, 32, 16, (33, 300), seed=15, softcap=0.7, has_sinks=True, float8=KvScales(0.5, 0.1)),
    Case(20, 1, 40, 16, (1, 64, 330), seed=17, scale=0.2, value_dim=32),
    Case(5, 1, 34, 5, (37, 5), seed=18, value_dim=24),
    Case(2, 1, 576, 16, (530, 16), seed=19, value_dim=512),
    Case(20, 1, 40, 16, (1, 64, 330), seed=20, value_dim=32, has_sinks=True),
]


class Inputs:
    """Random q and caches in the middle one of three layers; all that no row may see is NaN."""

    def __init__(self, case: Case, dtype: torch.dtype, device: str) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.seed)
        counts = [-(-length // case.block_tokens) for length in case.lens]
        order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        self.table = torch.full((len(counts), max(counts) + 1), DUMMY)
        width = case.value_dim or case.head_dim
        shape = sum(counts) + 1, 3, 2, case.block_tokens, case.kv_heads, case.head_dim
        arena = torch.full(shape, math.nan).to(torch.float8_e4m3fn if case.float8 else dtype)
        stored = arena.view(torch.uint8) if case.float8 else arena
        self.q = torch.randn(len(counts), case.heads, case.head_dim, generator=generator).to(dtype)
        self.want = torch.zeros(len(counts), case.heads * width, dtype=torch.float64)
        self.sinks = (3 * torch.randn(case.heads, generator=generator)).to(dtype) if case.has_sinks else None
        self.largest = 0.0
        for row, (length, pages) in enumerate(zip(case.lens, self.tables, strict=True)):
            self.table[row, : len(pages)] = torch.tensor(pages)
            k, v = torch.randn(2, length, case.kv_heads, case.head_dim, generator=generator).to(dtype)
            token = torch.arange(length)
            at = self.table[row, token // case.block_tokens], token % case.block_tokens
            if case.float8:
                parts = [rounded(part, scale) for part, scale in zip((k, v), case.float8, strict=True)]
                stored[:, 1, 0][at], stored[:, 1, 1][at] = (part.view(torch.uint8) for part in parts)
                k, v = (part.double() * scale for part, scale in zip(parts, case.float8, strict=True))
            else:
                stored[:, 1, 0][at], stored[:, 1, 1][at] = k, v
            v = v if case.value_dim is None else k[..., :width]
            self.largest = max(self.largest, float(v.abs().max()))
            k, v = (part.double().repeat_interleave(case.heads // case.kv_heads, 1) for part in (k, v))
            scores = torch.einsum("hd,thd->ht", self.q[row].double(), k) * (case.scale or case.head_dim**-0.5)
            if case.softcap is not None:
                scores = case.softcap * (scores / case.softcap).tanh()
            if case.window is not None:
                scores[:, : max(0, length - case.window)] = -math.inf
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks.double()[:, None]), 1)
            weights = scores.softmax(-1)[:, :length]
            self.want[row] = torch.einsum("ht,thd->hd", weights, v).flatten()
        self.q, self.arena = self.q.to(device), arena.to(device)
        self.sinks = None if self.sinks is None else self.sinks.to(device)

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.arena[:, 1, 0], self.arena[:, 1, 1]

    def run(self, attention: Any, rows: list[int | None]) -> torch.Tensor:
        """The result of some rows, as a step of decode rows; None: of padding, whose page is the dummy one."""
        table = torch.stack([torch.full_like(self.table[0], DUMMY) if at is None else self.table[at] for at in rows])
        lens = [1 if at is None else self.case.lens[at] for at in rows]
        q = torch.stack([torch.zeros_like(self.q[0]) if at is None else self.q[at] for at in rows])
        attention.plan(range(len(rows) + 1), table, lens)
        return self.attend(attention, q)

    def attend(self, attention: Any, q: torch.Tensor) -> torch.Tensor:
        """Run planned attention. Heads over latents are the latents themselves."""
        its, caches = self.case, self.caches
        if its.value_dim is None:
            return attention.run(q, *caches, scores=its.scores, sinks=self.sinks, kv_scales=its.kv_scales)
        same = torch.eye(its.value_dim, dtype=q.dtype, device=q.device).repeat(2 * its.heads, 1)
        heads = LatentHeads(same, its.heads, its.value_dim, its.head_dim - its.value_dim)
        return attention.run_latents(q, caches[0], heads, scores=its.scores, sinks=self.sinks)


def new_backend(case: Case, dtype: torch.dtype, device: str, num_sms: int = 4, **more: Any) -> Any:
    from chorus.ops.attention.attention_triton import TritonBackend

    if device == "cpu":
        more["new_event"] = lambda: SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    pages = -(-max(case.lens) // case.block_tokens) + 1
    setup = AttentionSetup(HeadShape(*case.shape), dtype, torch.device(device), max_rows=16, max_pages_per_row=pages)
    setup = replace(setup, scores=(case.scores,), float8_kv=case.float8 is not None, value_dim=case.value_dim)
    return TritonBackend(setup, num_sms, reason="", **more)


def check_values(case: Case, dtype: torch.dtype, device: str) -> str:
    """All rows in one step, shared by programs and not; twice, as values left by the first launch must not matter."""
    inputs, everyone = Inputs(case, dtype, device), list(range(len(case.lens)))
    for num_sms, reads_float8 in ((NONE_SHARED, False), (ALL_SHARED, case.float8 is not None)):
        backend = new_backend(case, dtype, device, num_sms)
        if reads_float8:  # as on newer GPUs
            backend._reads_bits = False  # noqa: SLF001
        attention = backend.decode(len(everyone))
        for _ in range(2):
            got = inputs.run(attention, everyone).double().cpu()
            error = float((got - inputs.want).abs().max()) / inputs.largest
            if not error <= TOLERANCE[dtype]:
                return f"differs by {error:.1e} of the largest value with {num_sms} multiprocessors"
    return ""


def check_company(case: Case, dtype: torch.dtype, device: str) -> str:
    """A row's bits: alone, at any position of any bucket, with padding, shared or not, and after a prompt."""
    inputs, everyone = Inputs(case, dtype, device), list(range(len(case.lens)))
    backends = [new_backend(case, dtype, device, num_sms) for num_sms in (NONE_SHARED, 40, ALL_SHARED)]
    want = [inputs.run(backends[0].decode(1), [row])[0] for row in everyone]
    for backend in backends:
        for rows in ([everyone[0]], [*everyone[::-1], None], [None, *everyone, *everyone[:2]]):
            got = inputs.run(backend.decode(len(rows)), rows)
            for place, row in enumerate(rows):
                if row is not None and not torch.equal(got[place], want[row]):
                    return f"row {row} has other bits at place {place} of {len(rows)}"
        ragged, split = backend.ragged(), 2
        table, lens = inputs.table[[0, *everyone]], [max(2, case.lens[0]), *case.lens]
        ragged.plan([0, split, *range(split + 1, split + 1 + len(everyone))], table, lens)
        q = torch.cat((inputs.q[:1], inputs.q[:1], inputs.q))
        found = inputs.attend(ragged, q)
        if not torch.equal(found[split:], torch.stack(want)):
            return "rows behind a prompt have other bits"
    return ""


def check_broken_key(case: Case, dtype: torch.dtype, device: str) -> str:
    """A key of NaN with a value of 0 makes the heads that see it NaN, and leaves all others as they are."""
    inputs, everyone = Inputs(case, dtype, device), list(range(len(case.lens)))
    for num_sms in (NONE_SHARED, ALL_SHARED):
        attention = new_backend(case, dtype, device, num_sms).decode(len(everyone))
        whole = inputs.run(attention, everyone)
        for row in (0, len(everyone) - 1):
            token = max((case.lens[row] - 1) // 2, case.lens[row] - (case.window or case.lens[row]))
            page, offset = inputs.tables[row][token // case.block_tokens], token % case.block_tokens
            k, v = inputs.caches
            kept = k[page, offset, -1].clone(), v[page, offset, -1].clone()
            k[page, offset, -1], v[page, offset, -1] = math.nan, 0.0
            got = inputs.run(attention, everyone)
            k[page, offset, -1], v[page, offset, -1] = kept
            first = (case.kv_heads - 1) * case.heads // case.kv_heads * (case.value_dim or case.head_dim)
            if not got[row, first:].isnan().all():
                return f"a head of row {row} that sees the key is not NaN"
            got[row, first:] = whole[row, first:]
            if not torch.equal(got, whole):
                return f"a key of row {row} reached others"
    return ""


CHECKS: dict[str, Callable[[Case, torch.dtype, str], str]] = {
    "values": check_values,
    "company": check_company,
    "broken key": check_broken_key,
}


def interpret(name: str) -> None:
    """Run in a process of its own."""
    from ..bf16_interpreter import fix_bf16

    fix_bf16()
    for case in CASES:
        dtypes = TOLERANCE if (case in CASES[:2] or case.float8) and name == "values" else (torch.float32,)
        for dtype in dtypes:
            problem = CHECKS[name](case, dtype, "cpu")
            assert not problem, f"{case}, {dtype}: {problem}"


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CHECKS)
def test_in_the_interpreter(name):
    command = f"from tests.ops.attention.test_attention_triton import *; interpret({name!r})"
    result = run_python("-c", command, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.timeout(600)
def test_compiles_for_a_gpu_that_is_not_there():
    only = r"attend_rows (heads\.(128|96)|float8-llama)"
    result = run_python("-m", "chorus.perf.kernels", "--compile", "sm_90", "--only", only, "--workers", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = json.loads(result.stdout.splitlines()[-1])["compile"]
    assert {line["group"] for line in lines} == {"heads.128", "heads.96", "float8-llama.128"}
    for line in lines:
        assert not line["spill_bytes"]
        assert line["matrix"] == "mma.m16n8k16" or line["dtype"] == "fp32"
        assert line["loads_before"] <= 2, "keys wait for a row's place in the list and for its pages"


@pytest.mark.triton
def test_what_launches_are_given_begins_on_16_bytes():
    """Also where rows are too short to be shared; else Triton's own way would launch, which takes the host 20 µs."""
    from chorus.ops.attention.attention_triton import TritonBackend

    setup = AttentionSetup(HeadShape(4, 2, 16, 4), torch.float32, torch.device("cpu"), 2, max_pages_per_row=2)
    backend = TritonBackend(setup, num_sms=1, reason="", new_event=object)
    assert all(splits == 1 for splits, _ in backend._splits)  # noqa: SLF001
    given = backend._partial  # noqa: SLF001
    assert not any(each.data_ptr() % 16 for each in given)


def test_programs_per_row():
    """Rows that fill the device alone are shared only where they are long; fewer rows, by as many as it takes."""
    tile = tile_tokens(128, 2)
    assert tile == 64
    assert attention_splits(1, 8, 8192, tile, 132) == (PARTS, 2)
    assert attention_splits(1, 8, 512, tile, 132) == (8, 2), "no more than a row has tiles"
    assert attention_splits(8, 8, 8192, tile, 132) == (5, 2)
    assert attention_splits(32, 8, 4096, tile, 132) == (1, 64)
    assert attention_splits(32, 8, 131072, tile, 132) == (8, 64)
    assert {tile_tokens(head_dim, 2) for head_dim in (16, 64, 96, 256)} == {32, 64, 128}
