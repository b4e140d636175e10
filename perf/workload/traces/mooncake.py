"""Mooncake's traces (FAST 2025): JSON lines with timestamp (ms), input_length, output_length, hash_ids; Apache-2.0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from .json_lines import json_lines
from .source import Source, TraceRow
from .text import Check

#: Prompt tokens that a hash id stands for.
BLOCK_TOKENS = 512


class Mooncake(Source):
    """Arrivals, lengths and prefix hashes: one id for every 512 prompt tokens; no adapters."""

    format: Literal["mooncake"]
    provides = frozenset({"arrival", "prompt_tokens", "output_tokens", "hash_ids"})

    def rows(self, seed: int = 0) -> Iterator[TraceRow]:
        check = Check(self.path)
        names = ("timestamp", "input_length", "output_length", "hash_ids")
        for line, found in json_lines(self.path, names):
            stamp, prompt, output, ids = (found[name] for name in names)
            seconds = check.number(line, "timestamp", stamp, 0.0) / 1000
            check.in_order(line, "timestamp", stamp, seconds)
            length = check.tokens(line, "input_length", prompt)
            blocks = -(-length // BLOCK_TOKENS)
            ids = check.ids(line, "hash_ids", ids)
            if len(ids) != blocks:
                mend = f"{length} tokens have {blocks} blocks of {BLOCK_TOKENS}; give one id for each"
                raise check.error(line, "hash_ids", ids, mend)
            tokens = check.tokens(line, "output_length", output)
            yield TraceRow(seconds, None, length, tokens, hash_ids=ids, hash_block_tokens=BLOCK_TOKENS)
