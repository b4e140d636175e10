"""Azure LLM inference traces: `AzureLLMInferenceTrace_{code,conv}.csv` (2023) and the weeks of 2024, CC-BY-4.0.

Described in Splitwise (ISCA 2024) and DynamoLLM (HPCA 2025). Columns TIMESTAMP, ContextTokens, GeneratedTokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Literal

from .source import Source, TraceRow
from .text import Check, csv_fields


class AzureLLM(Source):
    """Arrivals and lengths of one service; no adapters."""

    format: Literal["azure_llm"]
    provides = frozenset({"arrival", "prompt_tokens", "output_tokens"})

    def rows(self, seed: int = 0) -> Iterator[TraceRow]:
        check = Check(self.path)
        start: datetime | None = None
        for line, (when, prompt, output) in csv_fields(self.path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
            try:
                # 100 ns of resolution, and an offset in the traces of 2024: more than Python's own parser takes
                stamp, _, fraction = when.partition("+")[0].partition(".")
                time = datetime.fromisoformat(stamp)
                start = start or time
                seconds = (time - start).total_seconds() + float(f"0.{fraction or 0}")
            except (ValueError, TypeError):
                mend = "it must be a time like 2023-11-16 18:17:03.9799600"
                raise check.error(line, "TIMESTAMP", when, mend) from None
            check.in_order(line, "TIMESTAMP", when, seconds)
            yield TraceRow(
                seconds,
                prompt_tokens=check.tokens(line, "ContextTokens", prompt),
                output_tokens=check.tokens(line, "GeneratedTokens", output),
            )
