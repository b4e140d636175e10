"""Engines with bf16 and quantised weights on the native decoder, in rotation: the output projection is quantised, too.

A step is compared with the same step in bf16, and with the time in which the machine reads its bytes. `CHORUS_CPU_ISA`
names the ISA level.

Tests: tests/perf/bench/test_sections.py
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ....core.model.checkpoints.quantization.round_to_nearest import RoundToNearest
from ....ops.library import native_library
from ...report.table import Goal, Table, rows_table
from ..context import Context
from ..timer import ratio
from .levels import CASES, Turns, rates

PLAIN = "bf16"
"""Weights as they are: float32 in a smoke run."""
FORMS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "int8": {"quantization": "int8", "quantize_lm_head": True},
    "int4": {"quantization": "int4", "quantize_lm_head": True},
    "w8a8": {"quantization": "w8a8", "quantize_lm_head": True},
    "w4a8": {"quantization": "w4a8", "quantize_lm_head": True},
}

BARS: dict[str, tuple[float, ...]] = {"w8a8": (1.7, 1.5, 1.3, 0.9), "w4a8": (2.8, 2.0, 1.5, 0.9)}
"""Rates over bf16 that are to be reached, in the order of CASES, on processors with products of bytes."""


def run(context: Context) -> dict[str, Any]:
    """Milliseconds of whole engine steps, the shortest; the rate of bf16 that they have; and the time to read a step's
    bytes as a share of them.
    """
    turns = Turns.of(context)
    adapters = context.mixed_adapters()
    found: dict[str, Any] = {"prompt_tokens": turns.prompt, "level": native_library.level(), "read": 0.0, "rows": []}
    with ExitStack() as stack:
        engines = {name: turns.engine(stack, context, adapters, **fields) for name, fields in FORMS.items()}
        for case, (rows, is_prefill, ranks) in CASES.items():
            with context.row(found, case):
                found["read"] = max(found["read"], rates(context, turns.threads)["read"])
                seconds = turns.run(engines, CASES[case], list(adapters))
                for name, its in seconds.items():
                    num_bytes = _step_bytes(context, name, rows, turns.tokens(is_prefill), ranks)
                    row = {"weights": name, "case": case, "ms": min(its) * 1e3, "megabytes": num_bytes / 1e6}
                    row |= {"share": num_bytes / found["read"] / min(its), "of_plain": min(seconds[PLAIN]) / min(its)}
                    found["rows"].append(row | {"pairs": 1 / ratio(seconds, name, PLAIN)})
    return found


def _step_bytes(context: Context, name: str, rows: int, tokens: tuple[int, int], ranks: tuple[int, ...]) -> int:
    """Bytes that a step reads, each once."""
    geometry, itemsize = context.size.geometry, context.dtype.itemsize
    num_bytes = geometry.step(itemsize, rows, *tokens, ranks)[0]
    if name == PLAIN:
        return num_bytes
    quantiser = RoundToNearest(FORMS[name]["quantization"])
    plain = itemsize * (geometry.layer_params + geometry.head_params)
    head = quantiser.num_bytes(geometry.vocab, geometry.hidden)
    return num_bytes - plain + geometry.layer_bytes(itemsize, quantiser) + head


def goals(values: dict[str, Any]) -> list[Goal]:
    rates_of = {(row["weights"], row["case"]): row["pairs"] for row in values["rows"]}
    return [
        Goal(f"{name} / {PLAIN}", rates_of.get((name, case)), bar, where=case)
        for name, bars in BARS.items()
        for case, bar in zip(CASES, bars, strict=True)
    ]


def tables(values: dict[str, Any]) -> list[Table]:
    columns = (
        "weights | case | ms | MB read: megabytes | share of read limit: share | "
        f"rate over {PLAIN}: of_plain | in pairs: pairs"
    )
    title = (
        f"(q) steps with quantised weights, level {values['level']}, {values['prompt_tokens']} tokens before, "
        f"{values['read'] / 1e9:.1f} GB/s read"
    )
    return [rows_table(title, columns, values["rows"])]
