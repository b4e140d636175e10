"""The native decoder at each level of instructions, as shares of what the machine allows.

    python -m chorus.perf.cpu.levels --isa avx2,avx512

Per level, in turns within one run: the rate at which the threads read memory, the rate of the level's products in
registers, and steps of a random model: decode of one row and of eight, of eight with an adapter each, prefill of eight
prompts. A decode step is bound by the bytes that it reads (layers, head, keys and values; not the embedding) or by its
products, whichever takes longer; prefill by its products. Of every time the shortest counts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch

from ...memory.pages import hugepages
from ...ops import native, native_library
from ..report.command import conclude, parser
from ..report.table import Table
from .native_builds import STEPS, Bench
from .workload import Geometry

#: name → the step of `native_builds`
MEASURED = {"decode 1": "decode 1", "decode 8": "decode 8", "mixed 8": "decode 8, mixed", "prefill": "prefill 8 of 128"}
BUFFER_BYTES = 512 << 20
ROUNDS = 4_000_000  # of products in registers: some milliseconds


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
        "products": lambda: library.chorus_product_rate(threads, dtype.itemsize, ROUNDS),
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


def main() -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--isa", default=",".join(native_library.levels()), help="levels; default: all that are built and run here")
    add("--threads", type=int, default=2)
    add("--seconds", type=float, default=30.0, help="of each level")
    add("--ranks", default="8,16,32,64,8,16,32,64")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--geometry", type=Geometry.parse, default=Geometry(), help="as of perf.cpu; default: 125m")
    args = command.parse_args()
    dtype = getattr(torch, args.dtype)
    bench = Bench(args.geometry, [int(rank) for rank in args.ranks.split(",")], dtype)
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
    return conclude({"levels": result}, ok=True)


if __name__ == "__main__":
    sys.exit(main())
