"""The gap between decode steps and their floors, from measured times and counted launches, as Markdown tables.

`python -m chorus.perf.bench.estimate`: times, floors and shares are of a run on a GPU that `--results` names, launches
of a layer are counted now, without one (`launches`). The gain of each idea is arithmetic on both:

* expand in our product (up to 32 rows): launches that go from LoRA steps alone, each at what a LoRA launch takes above
  its bytes;
* our product up to 64 rows: `--edge-us` go for each product of a layer and the logits';
* persistent SGMV: adapters' bytes at `--share` of the bandwidth instead of SGMV's share.

Then the same of mixtures: that run's steps with one adapter in the weights and others in an eighth of the sequences.
Programs that go take `--program-ns` with them, and launches `--launch-us`.

Then the bytes of quantised projections. In decode steps of up to 64 rows our kernel reads them as they are kept. In
larger steps and prompts they are read, widened in memory, and read again by the library, or read once by the kernel
that has them as the first operand: its tiles of rows run one after the other and find them in the L2 cache.

Tests: tests/perf/bench/test_launches.py
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...core.model.checkpoints.quantization.round_to_nearest import Name, RoundToNearest
from ...ops.gemm.small_gemm_schedule import MAX_EXPANDED_ROWS, MAX_ROWS
from ...ops.lora.sgmv_schedule import decode
from ..report.command import parser
from ..report.table import shown
from .launches import decode_launches
from .models.sizes import SIZES

RESULTS = Path(__file__).parents[1] / "results" / "h100-2026-11-22-e391802" / "result.json"
_BUCKETS = 1, 8, 16, 32, 64

#: Tiles of that run's mixtures, and of theirs today, relative to the sequences of a step.
_ALL, _SHARE = 1, 4

#: Launches of SGMV one after the other, in which a tile had one adapter.
_PASSES = 2

#: Kinds of quantised weights that GPUs keep narrow.
_QUANTISED: tuple[Name, ...] = ("int8", "fp8", "int4")

#: Most sequences of a step that our GEMM kernel took at that run's commit. No file of the run says which steps used it.
_MOST_OURS = 16


def estimate(sections: dict[str, Any], launches: Sequence[dict[str, Any]], edge_us: float, share: float) -> list[str]:
    """Lines of the table. sections: of a result file, for Llama-3.1-8B. launches: counted by `decode_launches`."""
    layers = SIZES["llama-3.1-8b"].geometry.layers
    counts = {(row["adapters"], row["by"]): row["all"] for row in launches if row["step"] == "decode"}
    reached = {
        cell["tokens"]: cell["share"]
        for cell in sections["sgmv"]["cells"]
        if cell["ranks"] == "16" and cell["popularity"] == "distinct"
    }
    rows = [row for row in sections["decode"]["buckets"] if row["bucket"] in _BUCKETS]
    columns = [
        _column(row, layers, counts=counts, reached=reached[row["bucket"]], edge_us=edge_us, share=share)
        for row in rows
    ]
    lines = [_line("decode step", [f"{row['bucket']} rows" if row["bucket"] > 1 else "1 row" for row in rows])]
    lines.append(_line("---", ["---"] * len(rows)))
    return lines + [_line(name, [shown(column[name]) for column in columns]) for name in columns[0]]


def _column(
    row: dict[str, Any], layers: int, counts: dict[tuple[str, str], int], reached: float, edge_us: float, share: float
) -> dict[str, Any]:
    few, expands = row["bucket"] <= _MOST_OURS, row["bucket"] <= MAX_EXPANDED_ROWS
    by = "small" if few else "library"
    base, lora, fused = counts["none", by], counts["each row", by], counts["each row", "fused"]
    gone = (lora - fused) - (base - counts["none", "small"])
    base_ms, lora_ms, floor, adapters = (
        row[name] for name in ("base_ms", "lora_ms", "base_floor_ms", "adapters_floor_ms")
    )
    more = (lora_ms - base_ms - adapters) / layers / (lora - base)
    products = (4 * layers + 1) * edge_us * 1e-3
    return {
        "launches a layer, base": base,
        "launches a layer, LoRA": lora,
        "with expand in our product": fused if expands else None,
        "base: µs a launch above the floor": (base_ms - floor) / layers / base * 1e3,
        "LoRA: µs a launch more, above the adapters' floor": more * 1e3,
        "base / floor": base_ms / floor,
        "with our product up to 64 rows": None if few else (base_ms - products) / floor,
        "(LoRA less adapters' floor) / base": (lora_ms - adapters) / base_ms,
        "the same, with expand in our product": (
            (lora_ms - more * layers * gone - adapters) / base_ms if expands else None
        ),
        "with persistent SGMV": None if few else (lora_ms - adapters * (1 / reached - 1 / share + 1)) / base_ms,
    }


def mixtures(
    sections: dict[str, Any], launches: Sequence[dict[str, Any]], program_ns: float, launch_us: float
) -> list[str]:
    """Lines of the table of mixtures; see `estimate`."""
    geometry = SIZES["llama-3.1-8b"].geometry
    of_layer = next(row["LoRA"] for row in launches if row["step"] == "merged" and row["by"] == "library")
    rows = [row for row in sections["merged"]["rows"] if row["mix"] == "mixture"]
    columns = []
    for row in rows:
        schedule = decode(row["bucket"], sections["merged"]["rank"])
        programs = geometry.layers * sum(
            len(modules) * schedule.lanes * schedule.splits(inputs)
            + sum(-(-width // schedule.block_n) for _, _, width in modules)
            for inputs, modules in geometry.groups.values()
        )
        before, quarter = (_PASSES * programs * -(-row["bucket"] // share) for share in (_ALL, _SHARE))
        now = quarter // _PASSES
        of_tiles = row["merged_ms"] - (before - quarter) * program_ns * 1e-6
        gone = (_PASSES - 1) * of_layer * geometry.layers
        of_now = of_tiles - (quarter - now) * program_ns * 1e-6 - gone * launch_us * 1e-3
        columns.append(
            {
                "programs of LoRA, tiles for all rows, in two passes": f"{before / 1e6:.2f} M",
                "tiles for a quarter, in two passes": f"{quarter / 1e6:.2f} M",
                "tiles for a quarter, in one pass (now)": f"{now / 1e6:.2f} M",
                "base / mixture, measured": f"{row['base_ms'] / row['merged_ms']:.3f}",
                "with tiles for a quarter": f"{row['base_ms'] / of_tiles:.3f}",
                "and in one pass (now)": f"{row['base_ms'] / of_now:.3f}",
            }
        )
    lines = [_line("counted, of a step", [f"{row['bucket']} rows" for row in rows]), _line("---", ["---"] * len(rows))]
    return lines + [_line(name, [column[name] for column in columns]) for name in columns[0]]


def widened(sections: dict[str, Any]) -> list[str]:
    """Lines of the table of quantised weights: bytes of all layers' projections that a step moves, and the least time
    for them at the bandwidth that the run measured.
    """
    geometry, bandwidth = SIZES["llama-3.1-8b"].geometry, sections["limits"]["read"]["bytes_per_s"]
    dense = geometry.layer_bytes(2, None)
    columns = {}
    for name in _QUANTISED:
        narrow = geometry.layer_bytes(2, RoundToNearest(name))
        columns[name] = narrow, narrow + 2 * dense, narrow
    columns = {"bf16": (dense,) * 3, **columns}
    lines = [_line("bytes of projections", columns), _line("---", ["---"] * len(columns))]
    more = "more rows, and prompts"
    for place, name in enumerate((f"up to {MAX_ROWS} rows", f"{more}, widened", f"{more}, operands swapped")):
        moved = [each[place] for each in columns.values()]
        lines.append(_line(f"{name}: GB", [f"{each / 1e9:.2f}" for each in moved]))
        lines.append(_line(f"{name}: ms at least", [f"{1e3 * each / bandwidth:.2f}" for each in moved]))
    return lines


def _line(name: str, cells: Iterable[str]) -> str:
    return f"| {' | '.join((name, *cells))} |"


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--results", type=Path, default=RESULTS, help="of perf.bench, on a GPU")
    command.add_argument("--edge-us", type=float, default=2.5, help="of a product's launch that early weights save")
    command.add_argument("--share", type=float, default=0.85, help="of the bandwidth that a persistent SGMV reaches")
    command.add_argument("--program-ns", type=float, default=0.78, help="of a program that finds no work")
    command.add_argument("--launch-us", type=float, default=1.8, help="of a launch of LoRA, without its bytes")
    args = command.parse_args(argv)
    sections = json.loads(args.results.read_text("utf-8"))["sections"]
    with tempfile.TemporaryDirectory(prefix="chorus-launches-") as directory:
        launches = decode_launches(Path(directory))
    print("\n".join(estimate(sections, launches, args.edge_us, args.share)))
    print("", *mixtures(sections, launches, args.program_ns, args.launch_us), sep="\n")
    print("", *widened(sections), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
