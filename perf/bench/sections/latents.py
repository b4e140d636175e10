"""Decode attention over latents: our kernel and PyTorch's operators, with the ways from heads to latents and back,
compared with the bytes of latents and of these ways' weights.

Tests: tests/perf/bench/test_sections.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ....ops.attention.attention import Attention, AttentionSetup, HeadShape
from ....ops.attention.attention_backend import AttentionBackend, choose_attention
from ....ops.attention.latents import LatentHeads
from ...report.table import Table, rows_table
from ..context import Context
from ..idle_engine import StubDevice
from ..lora_case import layers_for
from .attention import TOLERANCE, WrongValues


class _Shape(NamedTuple):
    """See `core.model.specs.attention.LatentSpec`."""

    heads: int
    key_dim: int
    rotated_dim: int
    value_dim: int
    kv_rank: int


SHAPES = {
    "DeepSeek-V2-Lite": _Shape(16, 128, 64, 128, 512),
    "GLM-4.7-Flash": _Shape(20, 192, 64, 256, 512),
    "DeepSeek-V3": _Shape(128, 128, 64, 128, 512),
}

_SMOKE = {"small": _Shape(4, 16, 8, 24, 32)}

_BLOCK_TOKENS = 16


class _Case:
    """Sequences of `tokens` tokens each, in pages of several layers in random order."""

    def __init__(self, context: Context, its: _Shape, rows: int, tokens: int) -> None:
        self.context, self.its, self.rows, self.lens = context, its, rows, [tokens] * rows
        width, of_heads = its.kv_rank + its.rotated_dim, its.heads * (its.key_dim + its.value_dim)
        moved = rows * (tokens * width + its.heads * (its.key_dim + its.rotated_dim + its.value_dim))
        self.bytes = (moved + of_heads * its.kv_rank) * context.dtype.itemsize
        self.layers = layers_for(self.bytes, context.l2_bytes())
        per_row = -(-tokens // _BLOCK_TOKENS)
        generator = torch.Generator(context.device).manual_seed(context.seed)

        def random(*shape: int) -> torch.Tensor:
            made = torch.empty(shape, dtype=context.dtype, device=context.device)
            return made.normal_(0, 1, generator=generator)

        self.pages = random(rows * per_row + 1, self.layers, _BLOCK_TOKENS, 1, width)
        self.kv_up = random(self.layers, of_heads, its.kv_rank) * its.kv_rank**-0.5
        self.q = random(rows, its.heads, its.key_dim + its.rotated_dim)
        self.heads = [LatentHeads(each, its.heads, its.key_dim, its.rotated_dim) for each in self.kv_up]
        order = torch.randperm(rows * per_row, generator=torch.Generator().manual_seed(context.seed))
        self.table = (order + 1).view(rows, per_row)

    def backends(self) -> dict[str, AttentionBackend]:
        """Ours and PyTorch's."""
        shape = HeadShape(self.its.heads, 1, self.pages.shape[-1], _BLOCK_TOKENS)
        rows, width = self.rows, self.table.shape[1]
        device = torch.device("cpu" if self.context.smoke else "cuda:0")
        setup = AttentionSetup(shape, self.context.dtype, device, rows, width, value_dim=self.its.kv_rank)
        theirs = choose_attention(setup, "torch")
        if not self.context.smoke:
            return {"triton": choose_attention(setup, "triton"), "torch": theirs}
        from ....ops.attention.attention_triton import TritonBackend

        return {
            "triton": TritonBackend(setup, num_sms=4, reason="a smoke run", new_event=StubDevice().event),
            "torch": theirs,
        }

    def plan(self, attention: Attention, rows: int) -> None:
        attention.plan(range(rows + 1), self.table[:rows], self.lens[:rows])

    def attend(self, attention: Attention, rows: int) -> torch.Tensor:
        """Layer 0's result of the first `rows` sequences."""
        self.plan(attention, rows)
        return attention.run_latents(self.q[:rows], self.pages[:, 0], self.heads[0])

    def work(self, attention: Attention) -> Callable[[], None]:
        """A run through all layers with the planned sequences."""

        def run() -> None:
            for layer in range(self.layers):
                attention.run_latents(self.q, self.pages[:, layer], self.heads[layer])

        return run


def run(context: Context) -> dict[str, Any]:
    """Microseconds per layer, and bytes per time as a share of the measured bandwidth."""
    found: dict[str, Any] = {"method": context.timer.method, "bandwidth_bytes_per_s": context.bandwidth(), "rows": []}
    for model, its in (_SMOKE if context.smoke else SHAPES).items():
        for tokens in context.pick((40,), (1024, 4096), (256, 1024, 4096, 16384)):
            for rows in context.pick((1, 3), (1, 8, 64), (1, 4, 16, 64, 128)):
                if rows * tokens <= context.pick(1 << 20, 1 << 18, 1 << 19):
                    with context.row(found, f"{model}: {rows} rows of {tokens} tokens"):
                        found["rows"].append({"model": model, **_measure(context, its, rows, tokens)})
    return found


def _measure(context: Context, its: _Shape, rows: int, tokens: int) -> dict[str, Any]:
    case = _Case(context, its, rows, tokens)
    row: dict[str, Any] = {"count": rows, "tokens": tokens, "layers": case.layers, "bytes": case.bytes}
    attentions = {name: backend.decode(rows) for name, backend in case.backends().items()}
    results = {name: case.attend(attention, rows).float() for name, attention in attentions.items()}
    row["error"] = float((results["triton"] - results["torch"]).abs().max() / results["torch"].abs().max())
    if not row["error"] <= TOLERANCE[context.dtype_name]:
        raise WrongValues(f"differs from torch by {row['error']:.1e} of the largest value")
    for name, attention in attentions.items():
        case.plan(attention, rows)
        seconds = context.timer.time(case.work(attention)).seconds / case.layers
        row |= {f"{name}_us": seconds * 1e6, f"{name}_share": case.bytes / seconds / context.bandwidth()}
    return row


def tables(values: dict[str, Any]) -> list[Table]:
    columns = "model | tokens | rows: count | µs: triton_us | share: triton_share | PyTorch's µs: torch_us"
    title = "(u) decode attention over latents of a layer, share of measured bandwidth"
    return [rows_table(title, f"{columns} | share of PyTorch's: torch_share", values["rows"])]
