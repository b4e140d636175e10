"""What copying a prefix's KV layer by layer could gain on a CPU, while it computes the rest of the prompt.

The copy of a prefix's pages from host memory is a memcpy by the processor that computes: what runs beside takes time
from the step, unless cores are idle. So the copy's share of the processor time of copy and products bounds what
streaming by layer could hide. Both are counted on one thread, as processor time, which other programs change little:
`python -m chorus.perf.bench.copy_beside`.

Tests: tests/perf/bench/test_copy_beside.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from ..report.command import conclude, parser
from ..report.table import rows_table
from .models.sizes import SIZES, Geometry


@dataclass(frozen=True)
class Case:
    """A prompt of which the beginning is copied."""

    geometry: Geometry
    prefix: int
    """Tokens that are copied."""
    rest: int
    """Tokens that are computed."""


def measure(case: Case, rounds: int, processor: Callable[[], float] = time.process_time) -> dict[str, Any]:
    """Processor seconds of the copy and of the products of all layers, in turns; medians.

    processor: its time so far.
    """
    geometry = case.geometry
    num_bytes = 2 * geometry.kv_elems_per_token * case.prefix
    images = [np.ones(num_bytes // geometry.layers, np.uint8) for _ in range(geometry.layers)]
    pages = [np.zeros_like(image) for image in images]
    columns = geometry.layer_params // geometry.layers // geometry.hidden
    weights = [torch.randn(geometry.hidden, columns, dtype=torch.bfloat16) for _ in range(geometry.layers)]
    rows = torch.randn(case.rest, geometry.hidden, dtype=torch.bfloat16)

    def copy() -> None:
        for page, image in zip(pages, images, strict=True):
            np.copyto(page, image)

    def compute() -> None:
        for weight in weights:
            _ = rows @ weight

    spent: dict[str, list[float]] = {"copy": [], "compute": []}
    for turn in range(rounds + 1):
        for name, call in (("copy", copy), ("compute", compute)):
            before = processor()
            call()
            used = processor() - before
            if turn:  # the first touches memory
                spent[name].append(used)
    copied, computed = median(spent["copy"]), median(spent["compute"])
    return {"num_bytes": num_bytes, "copy": copied, "compute": computed, "share": copied / (copied + computed)}


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["125m", "135m"])
    command.add_argument("--prefix", type=int, default=2000, help="tokens that are copied")
    command.add_argument("--rest", type=int, nargs="+", default=[16, 64, 256], help="tokens that are computed")
    command.add_argument("--rounds", type=int, default=7)
    args = command.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for size in args.sizes:
        for rest in args.rest:
            found = measure(Case(SIZES[size].geometry, args.prefix, rest), args.rounds)
            rows.append({"size": size, "rest": rest, **found})
    columns = "model: size | rest | MB copied: num_bytes * 1e-6 | copy, ms: copy * 1e3 | products, ms: compute * 1e3"
    rows_table("processor time", f"{columns} | share of the copy: share", rows).show()
    return conclude({"rows": rows}, True)


if __name__ == "__main__":
    sys.exit(main())
