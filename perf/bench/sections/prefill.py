"""Prefill of whole prompts, measured as time to first token on an idle engine, compared with the floor."""

from __future__ import annotations

from statistics import median
from typing import Any

from ...report.table import Table, rows_table
from ..context import Context
from ..subject import Subject

RANK = 16


def run(context: Context) -> dict[str, Any]:
    """Prompt tokens per second: the base model, and with an adapter on all projections."""
    lengths = context.pick(
        (8, 32), (128, 512, 2048, 8192), (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384), cpu=(128, 512)
    )
    repeats = context.pick(1, 3, 7)
    adapters = context.adapters(RANK, 1)
    (name,) = adapters
    found: dict[str, Any] = {"rows": []}
    longest = max(lengths)
    with Subject(context, adapters, max_seqs=1, max_batched=longest, max_len=longest + 16) as subject:
        subject.load([name])
        for tokens in lengths:
            for adapter in (None, name):
                with context.row(found, f"prefill of {tokens} tokens, {adapter or 'base'}", subject.abort_all):
                    subject.first_token_seconds(tokens, adapter)
                    seconds = median(subject.first_token_seconds(tokens, adapter) for _ in range(repeats))
                    floor = context.floors(1, tokens, (RANK,) if adapter else ())
                    found["rows"].append(
                        {
                            "tokens": tokens,
                            "rank": RANK if adapter else 0,
                            "ms": seconds * 1e3,
                            "tokens_per_s": tokens / seconds,
                            "floor_ms": floor.prefill * 1e3,
                            "flops": floor.prefill_flops,
                            "over_floor": seconds / floor.prefill,
                        }
                    )
    return found


def tables(values: dict[str, Any]) -> list[Table]:
    columns = "tokens | adapter: rank | ms | tokens/s: tokens_per_s | floor ms: floor_ms | time/floor: over_floor"
    return [rows_table("(d) prefill", columns, values["rows"])]
