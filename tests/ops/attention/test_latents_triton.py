"""The launches of adapters on kv_b_proj without a GPU: values in Triton's interpreter against PyTorch's operators, and
an offline compile; a process for each.
"""

from __future__ import annotations

import json
import random

import pytest
import torch

from chorus.ops.attention.latents import AbsorbedLora, absorbed, expanded
from chorus.ops.attention.latents_schedule import supports_heads
from chorus.ops.lora.sgmv import AdapterRows, Segments
from chorus.ops.lora.sgmv_tables import SgmvTables, TableSizes

from ...processes import run_python

pytestmark = pytest.mark.triton

HEADS, KEY, VALUE, KV_RANK, LAYERS = 3, 16, 8, 24, 2
WIDTH = HEADS * (KEY + VALUE)

#: Largest difference, as a share of the largest output.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Adapters:
    """Adapters with rank-rows of another module before those of this one, in an arena that is NaN elsewhere."""

    def __init__(self, rng: random.Random, page_elems: int, dtype: torch.dtype) -> None:
        self.rng, self.generator, self.dtype = rng, torch.Generator().manual_seed(rng.randrange(1 << 30)), dtype
        self.arena = torch.full((3000, page_elems), float("nan"), dtype=dtype)
        self.free = list(range(1, 3000))
        rng.shuffle(self.free)

    def new(self, rank: int) -> AdapterRows:
        """One that changes the module in layer 1, perhaps in layer 0, or one that doesn't change it."""
        other, has_module = 8 * self.rng.randint(0, 2), self.rng.random() < 0.85
        slab = other + (KV_RANK + WIDTH if has_module else 8)
        layers = self.rng.choice(([0, rank * slab], [-1, 0]))
        values = torch.randn((1 + max(layers) // max(1, rank * slab)) * rank * slab, generator=self.generator)
        size = self.arena.shape[1]
        pages = [self.free.pop() for _ in range(-(-len(values) // size))]
        run = torch.full((len(pages) * size,), float("nan"))
        run[: len(values)] = values
        self.arena[pages] = run.view(-1, size).to(self.dtype)
        places = ([other], [other + KV_RANK]) if has_module else ([-1], [-1])
        return AdapterRows(pages, rank, self.rng.choice((0.5, 2.0)), slab, *places, layers)


def check(seed: int, dtype: torch.dtype) -> str:
    """A decode step, with tokens of no adapter, of one, and of one beside another that is taken off."""
    from chorus.ops.attention.latents_triton import LatentLora

    rng = random.Random(seed)
    it = Adapters(rng, rng.choice((16, 40, 96, 512)), dtype)
    adapters = [it.new(rng.choice((1, 3, 8, 16, 17, 40))) for _ in range(4)]
    terms, segments, tokens = rng.choice((1, 2)), Segments(), rng.randint(1, 7)
    for token in range(tokens):
        for rows in rng.sample(adapters, rng.randint(0, terms)):
            segments.add(token, token + 1, rows)
    slab = max(rows.slab_elems for rows in adapters)
    sizes = TableSizes(
        8, LAYERS, max(len(rows.pages) for rows in adapters), 64, 64, 1, it.arena.shape[1], slab, modules=1, max_terms=2
    )
    tables = SgmvTables(sizes)
    num_tiles = tables.plan(segments, 1, terms=terms)
    add = LatentLora(it.arena, tables, 0, heads=HEADS, key=KEY, value=VALUE, kv_rank=KV_RANK, terms=tables.terms)
    kv_up = torch.randn(WIDTH, KV_RANK, generator=it.generator).to(dtype)
    reference = AbsorbedLora(it.arena.float(), segments, 1, 0, WIDTH)
    spare = torch.randn(tokens, HEADS, 40, generator=it.generator).to(dtype)
    q, x = spare[..., :KEY], spare[..., 16 : 16 + KV_RANK]
    for absorbs, given, product in (
        (True, q, lambda rows: absorbed(rows, kv_up.to(rows.dtype))),
        (False, x, lambda rows: expanded(rows, kv_up.to(rows.dtype), KEY)),
    ):
        got = product(given.float()).to(dtype)
        add(got, given, 1, tables.tiles, num_tiles + 2, absorbs=absorbs)
        want = (reference.absorb if absorbs else reference.expand)(given.float(), product)
        error = float((got.float() - want).abs().max() / want.abs().max())
        if not error <= TOLERANCE[dtype]:
            return f"seed {seed}, {dtype}, {terms} terms, absorbs {absorbs}: differs by {error:.1e}"
    return ""


def interpret() -> None:
    """Run in a process of its own."""
    from ..bf16_interpreter import fix_bf16

    fix_bf16()
    for seed in range(30):
        for dtype in TOLERANCE if seed < 10 else [torch.float32]:
            problem = check(seed, dtype)
            assert not problem, problem


def test_values_equal_the_torch_path():
    result = run_python(
        "-c", "from tests.ops.attention.test_latents_triton import *; interpret()", TRITON_INTERPRET="1"
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_compiles_for_a_gpu_that_is_not_there():
    result = run_python("-m", "chorus.perf.kernels", "--compile", "sm_90", "--only", "add_to_heads", "--workers", "1")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = json.loads(result.stdout.splitlines()[-1])["compile"]
    assert lines
    assert not any(line["spill_bytes"] for line in lines)


def test_heads_begin_where_loads_may():
    assert supports_heads(128, 128, 2)
    assert supports_heads(16, 24, 4)
    assert not supports_heads(12, 8, 2)
    assert not supports_heads(8, 12, 2)
