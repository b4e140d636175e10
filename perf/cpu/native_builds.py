"""Two builds of the native decoder against each other, step by step in one process.

    python -m chorus.perf.cpu.native_builds --other /path/to/_native_avx512.so

Ours is of the level that is used here (`CHORUS_CPU_ISA` names another). Both compute the same steps of one random model
in turns of a few steps, so that whatever else the machine does hits both alike. Reported is the median over the turns
of (other's time / ours), above 1 when ours is faster.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ...core.model.native_decoder import PackedWeights
from ...core.model.weights import LayerWeights
from ...memory.pages.adapter_layout import AdapterLayout, AdapterPart
from ...memory.pages.arena import Arena
from ...memory.pages.layout import MODULES, PageLayout
from ...ops import native, native_library
from ...ops.elementwise import rotary_table
from ...ops.sgmv import AdapterRows, Segments
from ..report.command import conclude, parser
from .workload import Geometry

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


def open_library(path: Path) -> ctypes.CDLL:
    """A build of the decoder. ValueError where its descriptors are not ours: it would read them wrongly."""
    found = ctypes.CDLL(str(path))
    ours = native_library.library()
    found.chorus_descriptors.restype = ctypes.c_int64
    if found.chorus_descriptors() != ours.chorus_descriptors():
        raise ValueError(f"{path} takes other descriptors; compare it with the benchmark of the checkout it is from")
    for name in ("chorus_decoder_create", "chorus_decoder_forward", "chorus_decoder_destroy"):
        function = getattr(found, name)
        function.restype, function.argtypes = getattr(ours, name).restype, getattr(ours, name).argtypes
    return found


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


def main() -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--other", type=Path, required=True, help="the library to compare with the package's")
    add("--threads", type=int, default=2)
    add("--seconds", type=float, default=8.0, help="of each kind of step")
    add("--ranks", default="8,16,32,64,8,16,32,64")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--steps", default=";".join(STEPS), help="apart by semicolons; default: all")
    add("--geometry", type=Geometry.parse, default=Geometry(), help="as of perf.cpu; default: 125m")
    args = command.parse_args()
    bench = Bench(args.geometry, [int(rank) for rank in args.ranks.split(",")], getattr(torch, args.dtype))
    ours = native.NativeDecoder(bench.model, args.threads)
    other_library = open_library(args.other)
    native.library = lambda: other_library
    other = native.NativeDecoder(bench.model, args.threads)
    native.library = native_library.library
    ours.kept = other.kept = ()
    result = {}
    print(f"{'step':26}{'ms':>9}{'tokens/s':>10}{'other/ours':>12}{'quarters':>16}")
    for name in args.steps.split(";"):
        rows, count, before, mixed = STEPS[name]
        step = bench.step(rows, count, before, mixed)
        own, ratios = race(lambda step=step: ours.forward(*step), lambda step=step: other.forward(*step), args.seconds)
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(f"{name:26}{own * 1e3:9.3f}{rows * count / own:10.0f}{middle:12.3f}{low:9.3f}…{high:.3f}", flush=True)
        result[name] = {"seconds": own, "other_over_ours": middle}
    return conclude({"native_builds": result}, ok=True)


if __name__ == "__main__":
    sys.exit(main())
