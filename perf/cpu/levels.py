"""The native decoder at each level of instructions, as shares of what the machine allows.

    python -m chorus.perf.cpu.levels --isa avx2,avx512

Per level, in turns within one run: the rate at which the threads read memory, the rate of the level's products in
registers, and steps of a random model: decode of one row and of eight, of eight with an adapter each, prefill of eight
prompts. A decode step is bound by the bytes that it reads (layers, head, keys and values; not the embedding) or by its
products, whichever takes longer; prefill by its products. Of every time the shortest counts.

With `--other /path/to/_native_avx512.so`, another build against ours of the level that is used here (`CHORUS_CPU_ISA`
names another), step by step in turns of a few steps, so that whatever else the machine does hits both alike: the median
over the turns of (other's time / ours), above 1 when ours is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...core.model.native_decoder import PackedWeights
from ...core.model.weights import LayerWeights
from ...memory.pages import hugepages
from ...memory.pages.adapter_layout import AdapterLayout, AdapterPart
from ...memory.pages.arena import Arena
from ...memory.pages.layout import MODULES, PageLayout
from ...ops import native, native_library
from ...ops.elementwise import rotary_table
from ...ops.native_descriptors import ELEMENT_OF
from ...ops.sgmv import AdapterRows, Segments
from ..report.command import conclude, parser
from ..report.table import Table
from .workload import Geometry

#: name → the step of `STEPS`
MEASURED = {"decode 1": "decode 1", "decode 8": "decode 8", "mixed 8": "decode 8, mixed", "prefill": "prefill 8 of 128"}
BUFFER_BYTES = 512 << 20
ROUNDS = 4_000_000  # of products in registers: some milliseconds


BLOCK_TOKENS = 16

#: name → (rows, tokens of each, tokens that each has before, whether rows have adapters)
STEPS = {
    "decode 1": (1, 1, 160, False),
    "decode 8": (8, 1, 160, False),
    "decode 8, mixed": (8, 1, 160, True),
    "decode 32, mixed": (32, 1, 160, True),
    "8 of 2 tokens, mixed": (8, 2, 160, True),
    "prefill 300": (1, 300, 0, False),
    "prefill 8 of 128": (8, 128, 0, False),
    "prefill 4 of 100, mixed": (4, 100, 0, True),
}


class Bench:
    """A random model with eight adapters on all modules, in memory as the engine has it, and steps over it."""

    def __init__(self, geometry: Geometry, ranks: list[int], dtype: torch.dtype) -> None:
        self.geometry, g = geometry, geometry
        generator = torch.Generator().manual_seed(0)

        q, kv = g.heads * g.head_dim, g.kv_heads * g.head_dim
        widths = ((q + 2 * kv, g.hidden), (g.hidden, q), (2 * g.ffn, g.hidden), (g.hidden, g.ffn))
        packed = PackedWeights([*(widths * g.layers), (g.vocab, g.hidden)], dtype)

        def weight(out: int, width: int) -> torch.Tensor:
            return packed.add((torch.randn(out, width, generator=generator) * width**-0.5).to(dtype))

        self.layout = PageLayout(g.layers, g.kv_heads, g.head_dim, BLOCK_TOKENS, dtype.itemsize)
        dims = {name.split(".")[1]: shape for name, shape in g.module_dims.items()}
        parts = [AdapterPart(rank, 1.0, tuple(range(g.layers)), MODULES) for rank in ranks]
        placed = [AdapterLayout.build([part], dims, g.layers, self.layout.page_elems, dtype.itemsize) for part in parts]
        kv_pages = max(rows * -(-(count + before) // BLOCK_TOKENS) for rows, count, before, _ in STEPS.values())
        self.first_page = iter(range(kv_pages, 1 << 30))
        self.adapters = []
        for part, place in zip(parts, placed, strict=True):
            pages = [next(self.first_page) for _ in range(place.num_pages)]
            slabs = place.parts[0].slabs
            where = slabs.slab_elems, slabs.a_offset, slabs.b_offset, place.parts[0].first_elem
            self.adapters.append(AdapterRows(pages, part.rank, part.rank**-0.5, *where))
        arena = Arena(self.layout, next(self.first_page), dtype, "cpu").pages
        arena.copy_(0.1 * torch.randn(arena.shape, generator=generator))
        norm = torch.ones(g.hidden)
        layers = [LayerWeights(norm, norm, *(weight(*shape) for shape in widths)) for _ in range(g.layers)]
        cos, sin = rotary_table(1e4 ** (-torch.arange(0, g.head_dim, 2) / g.head_dim), g.positions)
        embed = torch.randn(g.vocab, g.hidden, generator=generator).to(dtype)
        self.model = native.NativeModel(
            g.hidden, g.ffn, g.heads, g.kv_heads, g.head_dim, g.vocab, BLOCK_TOKENS, 1e-5, layers, embed,
            packed.add(embed), norm, cos, sin, arena,
        )  # fmt: skip

    def step(self, rows: int, count: int, before: int, mixed: bool) -> tuple:
        """Arguments of `NativeDecoder.forward`; logits of every row's last token."""
        pages = -(-(count + before) // BLOCK_TOKENS)
        table = torch.arange(rows * pages).view(rows, pages)
        positions = torch.arange(before, before + count).repeat(rows)
        page = table[torch.arange(rows).repeat_interleave(count), positions // BLOCK_TOKENS]
        plan = native.NativeRows()
        plan.plan(range(0, rows * count + 1, count), table, [before + count] * rows)
        segments = Segments()
        for row in range(rows if mixed else 0):
            segments.add(row * count, row * count + count, self.adapters[row % len(self.adapters)])
        ids = torch.randint(0, self.geometry.vocab, (rows * count,), generator=torch.Generator().manual_seed(1))
        last = torch.arange(count - 1, rows * count, count)
        return ids, positions, page.contiguous(), positions % BLOCK_TOKENS, plan, last, segments


def race(ours: Callable[[], object], other: Callable[[], object], seconds: float) -> tuple[float, list[float]]:
    """Seconds of one step of ours, the median; and of every turn other's time over ours."""

    def timed(run: Callable[[], object], times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - begin) / times

    times = max(1, int(0.02 / max(1e-6, min(timed(ours, 3), timed(other, 3)))))
    own, ratios, end = [], [], time.perf_counter() + seconds
    while time.perf_counter() < end:  # A-B-B-A
        a, b = timed(ours, times), timed(other, times)
        b, a = b + timed(other, times), a + timed(ours, times)
        own.append(a / 2)
        ratios.append(b / a)
    return statistics.median(own), ratios


def cost(shape: Geometry, itemsize: int, rows: int, count: int, before: int) -> tuple[float, float]:
    """Bytes that a step reads, and floating-point operations that it makes; logits of each row's last token."""
    keys = rows * sum(range(before + 1, before + count + 1))
    weights = shape.layer_params + shape.head_params
    num_bytes = itemsize * (weights + rows * (before + count) * shape.kv_elems_per_token)
    attention = 4 * shape.layers * shape.hidden * keys
    return num_bytes, 2 * rows * (count * shape.layer_params + shape.head_params) + attention


def shares(shape: Geometry, itemsize: int, best: dict[str, float]) -> dict[str, float]:
    """best: seconds of the steps, and the rates `read` and `products`."""
    found = {}
    for name, step in MEASURED.items():
        rows, count, before, mixed = STEPS[step]
        num_bytes, flops = cost(shape, itemsize, rows, count, before)
        by_bytes, by_products = num_bytes / best["read"], flops / best["products"]
        if mixed:
            found[name] = best["decode 8"] / best[name]
        else:
            found[name] = (by_products if count > 1 else max(by_bytes, by_products)) / best[name]
    return found


def measure(isa: str, bench: Bench, dtype: torch.dtype, threads: int, seconds: float) -> dict[str, float]:
    """Shortest seconds of the steps at a level, and the highest rates."""
    os.environ[native_library.ISA] = isa
    library = native_library.library()
    assert library is not None
    decoder = native.NativeDecoder(bench.model, threads)
    decoder.kept = ()
    steps = {name: bench.step(*STEPS[step]) for name, step in MEASURED.items()}
    memory = hugepages.zeros((BUFFER_BYTES,), torch.uint8).fill_(1)
    rates: dict[str, Callable[[], float]] = {
        "read": lambda: library.chorus_read_rate(threads, memory.data_ptr(), BUFFER_BYTES),
        "products": lambda: library.chorus_product_rate(threads, ELEMENT_OF[dtype], ROUNDS),
    }
    best = dict.fromkeys(rates, 0.0) | dict.fromkeys(steps, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, rate in rates.items():
            best[name] = max(best[name], rate())
        for name, step in steps.items():
            for _ in range(1 if name == "prefill" else 8):
                began = time.perf_counter()
                decoder.forward(*step)
                best[name] = min(best[name], time.perf_counter() - began)
    decoder.close()
    return best


def beside(args: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    """Another build's steps beside ours."""
    ours = native.NativeDecoder(bench.model, args.threads)
    other_library = native_library.opened(args.other)
    native.library = lambda: other_library
    other = native.NativeDecoder(bench.model, args.threads)
    native.library = native_library.library
    ours.kept = other.kept = ()
    table, found = Table("two builds", ["step", "ms", "tokens/s", "other/ours", "quarters"]), {}
    for name, (rows, count, before, mixed) in STEPS.items():
        step = bench.step(rows, count, before, mixed)
        own, ratios = race(lambda step=step: ours.forward(*step), lambda step=step: other.forward(*step), args.seconds)
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        table.add(name, own * 1e3, rows * count / own, middle, f"{low:.3f}…{high:.3f}")
        found[name] = {"seconds": own, "other_over_ours": middle}
    table.show()
    return {"native_builds": found}


def compare(args: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    """Levels beside each other."""
    dtype = getattr(torch, args.dtype)
    head = ["level", "read GB/s", "products GFLOP/s"]
    table = Table("of what the machine allows; mixed of decode 8", [*head, *(f"{name} ms, share" for name in MEASURED)])
    result: dict[str, dict[str, float]] = {}
    for isa in args.isa.split(","):
        best = measure(isa, bench, dtype, args.threads, args.seconds)
        found = shares(args.geometry, dtype.itemsize, best)
        times = (f"{best[name] * 1e3:.2f}  {share:.2f}" for name, share in found.items())
        table.add(isa, f"{best['read'] / 1e9:.1f}", f"{best['products'] / 1e9:.0f}", *times)
        result[isa] = {**best, **{f"{name} share": share for name, share in found.items()}}
    table.show()
    return {"levels": result}


def main() -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--isa", default=",".join(native_library.levels()), help="levels; default: all that are built and run here")
    add("--other", type=Path, metavar="FILE", help="another build, to compare ours with in place of levels")
    add("--threads", type=int, default=2)
    add("--seconds", type=float, default=30.0, help="of each level, or of each kind of step of two builds")
    add("--ranks", default="8,16,32,64,8,16,32,64")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--geometry", type=Geometry.parse, default=Geometry(), help="as of perf.cpu; default: 125m")
    args = command.parse_args()
    bench = Bench(args.geometry, [int(rank) for rank in args.ranks.split(",")], getattr(torch, args.dtype))
    return conclude((compare if args.other is None else beside)(args, bench), ok=True)


if __name__ == "__main__":
    sys.exit(main())
