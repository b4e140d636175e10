"""Readers of published traces that list requests, one a row.

Azure LLM inference traces, `AzureLLMInferenceTrace_{code,conv}.csv` (2023) and the weeks of 2024, CC-BY-4.0, are
described in Splitwise (ISCA 2024) and DynamoLLM (HPCA 2025). Azure Functions invocation trace of 2021 (MAF2): CaraServe
(§7.1) and dLoRA (§7.1) take each function, or each group of functions, for one adapter. Mooncake's traces (FAST 2025)
are Apache-2.0. GenTD26, Alibaba's trace of a text-to-image service with LoRA adapters (SoCC 2025), is for research use
only. Its `lora_request_trace.csv` was published in two forms, of which the one that names each request's adapters in
order is read: it has no times, and its lengths are characters of image prompts.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Literal

from .source import SHOWN, Source, TraceRow
from .text import Rows

#: Prompt tokens that a hash id of Mooncake's stands for.
BLOCK_TOKENS = 512

_MOST_ARGS = 1 << 16  # characters of a request's `lora_args`


class AzureLLM(Source):
    """Arrivals and lengths of one service; no adapters."""

    format: Literal["azure_llm"]
    provides = frozenset({"arrival", "prompt_tokens", "output_tokens"})

    def rows(self, seed: int = 0) -> Iterator[TraceRow]:
        file = Rows(self.path)
        start: datetime | None = None
        for when, prompt, output in file.csv("TIMESTAMP", "ContextTokens", "GeneratedTokens"):
            try:
                # 100 ns of resolution, and an offset in the traces of 2024: more than Python's own parser takes
                stamp, _, fraction = when.partition("+")[0].partition(".")
                time = datetime.fromisoformat(stamp)
                start = start or time
                seconds = (time - start).total_seconds() + float(f"0.{fraction or 0}")
            except (ValueError, TypeError):
                raise file.error("TIMESTAMP", when, "it must be a time like 2023-11-16 18:17:03.9799600") from None
            seconds = file.in_order("TIMESTAMP", when, seconds)
            lengths = file.tokens("ContextTokens", prompt), file.tokens("GeneratedTokens", output)
            yield TraceRow(seconds, None, *lengths)


class AzureFunctions(Source):
    """Arrivals (end_timestamp − duration, seconds), functions as adapters, and their apps as tenants.

    Names are the beginnings of hashes.
    """

    format: Literal["azure_functions"]
    provides = frozenset({"arrival", "adapter", "tenant"})

    def rows(self, seed: int = 0) -> Iterator[TraceRow]:
        file = Rows(self.path)
        names: dict[str, str] = {}
        for app, function, end, took in file.csv("app", "func", "end_timestamp", "duration"):
            if not function:
                raise file.error("func", function, "it must name the function")
            seconds = file.number("end_timestamp", end) - file.number("duration", took, 0.0)
            file.in_order("end_timestamp - duration", seconds, seconds)
            tenant = names.setdefault(app, app[:SHOWN]) if app else None
            yield TraceRow(seconds, names.setdefault(function, function[:SHOWN]), tenant=tenant)


class Mooncake(Source):
    """Arrivals, lengths and prefix hashes: one id for every 512 prompt tokens; no adapters."""

    format: Literal["mooncake"]
    provides = frozenset({"arrival", "prompt_tokens", "output_tokens", "hash_ids"})

    def rows(self, seed: int = 0) -> Iterator[TraceRow]:
        file, names = Rows(self.path), ("timestamp", "input_length", "output_length", "hash_ids")
        for found in file.json(*names):
            stamp, prompt, output, ids = (found[name] for name in names)
            seconds = file.in_order("timestamp", stamp, file.number("timestamp", stamp, 0.0) / 1000)
            length = file.tokens("input_length", prompt)
            blocks = -(-length // BLOCK_TOKENS)
            ids = file.ids("hash_ids", ids)
            if len(ids) != blocks:
                mend = f"{length} tokens have {blocks} blocks of {BLOCK_TOKENS}; give one id for each"
                raise file.error("hash_ids", ids, mend)
            tokens = file.tokens("output_length", output)
            yield TraceRow(seconds, None, length, tokens, hash_ids=ids, hash_block_tokens=BLOCK_TOKENS)


class LoraSequence(Source):
    """Adapters in order of request.

    As published, column lora_args: a list of objects, each with its adapter's modelVersionId; or converted, columns row
    and lora_ids: ids parted by spaces. A request with several adapters counts for its first, one with none for the base
    model.
    """

    format: Literal["lora_sequence"]
    provides = frozenset({"adapter"})

    def rows(self, seed: int = 0) -> Iterator[TraceRow]:
        file = Rows(self.path)
        if "lora_args" in file.header():
            for (text,) in file.csv("lora_args"):
                yield TraceRow(adapter=_first_adapter(file, text))
            return
        for row, ids in file.csv("row", "lora_ids"):
            file.in_order("row", row, file.tokens("row", row, 0))
            yield TraceRow(adapter=next(iter(ids.split()), None))


def _first_adapter(file: Rows, text: str) -> str | None:
    """The first adapter of a `lora_args`, which is written as JSON or as Python writes a list."""
    mend = "it must be a list of objects with a modelVersionId each, or empty"
    if text.strip() in ("", "null", "None", "NULL", "nan"):
        return None
    found: Any = None
    if len(text) <= _MOST_ARGS:
        for parse in (json.loads, ast.literal_eval):
            try:
                found = parse(text)
                break
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise file.error("lora_args", text, mend)
    if not found:
        return None
    name = found[0].get("modelVersionId")
    if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
        raise file.error("lora_args", text, mend)
    return str(name)
