"""Decode attention over latents: our kernel and PyTorch's operators, with the ways from heads to latents and back,
compared with the bytes of latents and of these ways' weights.

Tests: tests/perf/bench/test_sections.py
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ....ops.attention.attention import HeadShape
from ....ops.attention.attention_backend import AttentionBackend, choose_attention
from ....ops.attention.latents import LatentHeads
from ...report.table import Table, rows_table
from ..context import Context
from ..lora_case import layers_for
from .attention import TOLERANCE, PagedRows, WrongValues, ours_or


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


class _Case(PagedRows):
    """Over latents that all heads share."""

    def __init__(self, context: Context, its: _Shape, rows: int, tokens: int) -> None:
        super().__init__(context, rows, tokens, _BLOCK_TOKENS)
        self.its = its
        width, of_heads = its.kv_rank + its.rotated_dim, its.heads * (its.key_dim + its.value_dim)
        moved = rows * (tokens * width + its.heads * (its.key_dim + its.rotated_dim + its.value_dim))
        self.bytes = (moved + of_heads * its.kv_rank) * context.dtype.itemsize
        self.layers = layers_for(self.bytes, context.l2_bytes())
        self.pages = self.random(self.num_pages, self.layers, _BLOCK_TOKENS, 1, width)
        self.q = self.random(rows, its.heads, its.key_dim + its.rotated_dim)
        kv_up = self.random(self.layers, of_heads, its.kv_rank) * its.kv_rank**-0.5
        self.heads = [LatentHeads(each, its.heads, its.key_dim, its.rotated_dim) for each in kv_up]

    def backends(self) -> dict[str, AttentionBackend]:
        """Ours and PyTorch's."""
        shape = HeadShape(self.its.heads, 1, self.pages.shape[-1], _BLOCK_TOKENS)
        setup = self.setup(shape, value_dim=self.its.kv_rank)
        return {"triton": ours_or("triton", setup, self.context.smoke), "torch": choose_attention(setup, "torch")}

    def run(self, attention: Any, layer: int, rows: int) -> torch.Tensor:
        return attention.run_latents(self.q[:rows], self.pages[:, layer], self.heads[layer])


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
        row |= case.measured(attention, name, case.bytes)
    return row


def tables(values: dict[str, Any]) -> list[Table]:
    columns = "model | tokens | rows: count | µs: triton_us | share: triton_share | PyTorch's µs: torch_us"
    title = "(u) decode attention over latents of a layer, share of measured bandwidth"
    return [rows_table(title, f"{columns} | share of PyTorch's: torch_share", values["rows"])]
