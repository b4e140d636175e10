"""Steps of models of other families, each in turns with Llama's, on a CPU.

A family's decode step reads the weights of its layers and head once, of a mixture those of the experts that some row
goes to; each sequence reads and writes its recurrent states. The time that the threads need to read so many bytes is a
share of the step's; `over Llama` compares these shares.

Tests: tests/perf/bench/test_sections.py
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from ....core.model.read_config import read_model_config
from ....core.model.specs.config import ModelConfig
from ...report.table import Table, rows_table
from ..context import Context
from ..models.families import FAMILIES
from ..subject import Subject
from ..timer import in_turns
from .levels import decode, prefill, rates

FIRST = "llama"

#: Case → number of sequences, and whether they are prompts.
CASES = {"decode, 1 row": (1, False), "decode, 8 rows": (8, False), "prefill, 4 prompts": (4, True)}

_MEMORY = 256 << 20  # of pages: recurrent states take more than KV


def run(context: Context) -> dict[str, Any]:
    """Milliseconds of whole engine steps, the shortest, tokens per second, and what memory allows as a share of it."""
    prompt, steps, rounds = context.pick((8, 2, 1), (64, 16, 4), (128, 16, 12))
    others = context.pick(["qwen3-moe"], [*FAMILIES][1:], [*FAMILIES][1:])
    threads = context.pick(1, torch.get_num_threads(), torch.get_num_threads())
    limits: dict[str, Any] = {"max_seqs": 8, "max_batched": 4 * prompt, "max_len": prompt + steps + 24}
    limits |= {"memory_bytes": context.pick(4 << 20, _MEMORY, _MEMORY), "threads": threads}
    limits |= {"block_tokens": 64}  # a part of a recurrent state must fit into a page
    found: dict[str, Any] = {"prompt_tokens": prompt, "rows": []}
    for family in others:
        with context.row(found, family), ExitStack() as stack:
            engines: dict[str, Subject] = {}
            for name in (FIRST, family):
                subject = Subject(context, {}, size=replace(context.size, family=name), **limits)
                engines[name] = stack.enter_context(subject)
            rows = [row for case in CASES for row in _case(context, engines, case, (prompt, steps, rounds))]
            have = {row["family"] for row in found["rows"]}
            found["rows"] += sorted((row for row in rows if row["family"] not in have), key=lambda row: row["order"])
    return found


def _case(context: Context, engines: dict[str, Subject], case: str, size: tuple[int, int, int]) -> list[dict[str, Any]]:
    (count, is_prefill), (prompt, steps, rounds) = CASES[case], size
    step = prefill if is_prefill else decode
    seconds = in_turns(
        {name: partial(step, each, [None] * count, prompt, steps) for name, each in engines.items()}, rounds
    )
    read, rows = rates(context, torch.get_num_threads())["read"], count * (prompt if is_prefill else 1)
    configs = {name: read_model_config(each.model) for name, each in engines.items()}
    best = {name: min(seconds[name]) for name in engines}
    # prompts compute: their weights for each token are what is compared
    needed = {
        name: weights_of(it, 1 if is_prefill else rows) * context.dtype.itemsize
        + (0 if is_prefill else rows * state_bytes(it))
        for name, it in configs.items()
    }
    shares = {name: needed[name] / read / best[name] for name in engines}
    return [
        {
            "family": name,
            "case": case,
            "order": order,
            "ms": best[name] * 1e3,
            "tokens_per_s": rows / best[name],
            "share": shares[name],
            "over_first": shares[name] / shares[FIRST],
        }
        for order, name in enumerate(engines)
    ]


def weights_of(config: ModelConfig, rows: int) -> float:
    """Weights of layers and head that a step of so many rows multiplies with: of a mixture those of the experts that
    some row is expected to go to, if each goes to any.
    """
    total = float(config.vocab_size * config.hidden_size)
    for layer, projections in zip(config.layers, config.projections.layers, strict=True):
        for each in projections:
            share = 1.0
            if each.experts and layer.experts is not None:
                share = 1 - (1 - layer.experts.routing.per_token / layer.experts.count) ** rows
            total += each.num_weights * share
    return total


def state_bytes(config: ModelConfig) -> int:
    """Bytes of a sequence's recurrent states, which are float32, read and written in a step of one token."""
    if (recurrent := config.recurrent) is None:
        return 0
    further = 0 if config.lookup is None else config.num_lookups * config.lookup.state_elems
    own = config.num_recurrent_layers * (prod(recurrent.recurrent_shape) + prod(recurrent.conv_shape))
    return 2 * 4 * (own + further)


def tables(values: dict[str, Any]) -> list[Table]:
    columns = "family | case | ms | tokens/s: tokens_per_s | share of limit: share | over Llama: over_first"
    return [rows_table(f"(v) steps of families, {values['prompt_tokens']} tokens before", columns, values["rows"])]
