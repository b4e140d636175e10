"""Decode attention alone: our kernel, FlashInfer's decode wrapper and its XQA kernel, used as in steps, compared with
the bytes of KV.

Tests: tests/perf/bench/test_sections.py
"""

from __future__ import annotations

from typing import Any

import torch

from ....ops.attention.attention import AttentionSetup, HeadShape, PagedAttention
from ....ops.attention.attention_backend import AttentionBackend, AttentionUnavailable, choose_attention
from ....ops.elementwise.float8_kv import DTYPE as FLOAT8
from ...kernels.cost import attention_cost
from ...report.table import Table, rows_table
from ..context import Context
from ..idle_engine import StubDevice
from ..lora_case import layers_for

#: Largest difference from the library's values, relative to the largest.
TOLERANCE = {"bfloat16": 2.0**-6, "float32": 1e-4}

#: Sequences that are compared with torch's results, and with their own results when alone.
_CHECKED = 2

BACKENDS = ("triton", "flashinfer", "xqa")


class WrongValues(ArithmeticError):
    """A kernel's result differs from the library's, or its bits differ for a row alone."""


class PagedRows:
    """Sequences of `tokens` tokens each, in pages of several layers in random order."""

    def __init__(self, context: Context, rows: int, tokens: int, block_tokens: int) -> None:
        self.context, self.rows, self.lens = context, rows, [tokens] * rows
        self._generator = torch.Generator(context.device).manual_seed(context.seed)
        per_row = -(-tokens // block_tokens)
        order = torch.randperm(rows * per_row, generator=torch.Generator().manual_seed(context.seed))
        self.table = (order + 1).view(rows, per_row)
        self.num_pages = rows * per_row + 1
        self.layers = 1

    def random(self, *shape: int) -> torch.Tensor:
        made = torch.empty(shape, dtype=self.context.dtype, device=self.context.device)
        return made.normal_(0, 1, generator=self._generator)

    def setup(self, shape: HeadShape, **more: Any) -> AttentionSetup:
        device = torch.device("cpu" if self.context.smoke else "cuda:0")
        return AttentionSetup(shape, self.context.dtype, device, self.rows, self.table.shape[1], **more)

    def plan(self, attention: Any, rows: int) -> None:
        attention.plan(range(rows + 1), self.table[:rows], self.lens[:rows])

    def run(self, attention: Any, layer: int, rows: int) -> torch.Tensor:
        """A layer's result of the first `rows` sequences."""
        raise NotImplementedError

    def attend(self, attention: Any, rows: int) -> torch.Tensor:
        """Layer 0's result of the first `rows` sequences."""
        self.plan(attention, rows)
        return self.run(attention, 0, rows)

    def measured(self, attention: Any, name: str, num_bytes: int) -> dict[str, float]:
        """Microseconds of a layer in a run through all of them, and the share of the bandwidth."""
        self.plan(attention, self.rows)

        def work() -> None:
            for layer in range(self.layers):
                self.run(attention, layer, self.rows)

        seconds = self.context.timer.time(work).seconds / self.layers
        return {f"{name}_us": seconds * 1e6, f"{name}_share": num_bytes / seconds / self.context.bandwidth()}


def ours_or(name: str, setup: AttentionSetup, smoke: bool) -> AttentionBackend:
    """The backend of that name; in a smoke run our kernel is interpreted. Raises AttentionUnavailable."""
    if not smoke:
        return choose_attention(setup, name)  # pyright: ignore[reportArgumentType]
    if name != "triton":
        raise AttentionUnavailable("there is no GPU")
    from ....ops.attention.attention_triton import TritonBackend

    return TritonBackend(setup, num_sms=4, reason="a smoke run", new_event=StubDevice().event)


class _Case(PagedRows):
    """With heads of their own."""

    def __init__(self, context: Context, rows: int, tokens: int) -> None:
        geometry = context.size.geometry
        block_tokens = geometry.page_layout(context.dtype.itemsize).block_tokens
        super().__init__(context, rows, tokens, block_tokens)
        self.shape = HeadShape(geometry.heads, geometry.kv_heads, geometry.head_dim, block_tokens)
        self.cost = attention_cost(self.lens, *self.shape, context.dtype.itemsize, kv_itemsize=context.kv_itemsize)
        self.layers = layers_for(self.cost.bytes, context.l2_bytes())
        heads, kv_heads, head_dim, _ = self.shape
        pages = self.random(self.num_pages, self.layers, 2, block_tokens, kv_heads, head_dim)
        self.pages = pages.to(FLOAT8) if context.float8_kv else pages
        self.q = self.random(rows, heads, head_dim)

    def run(self, attention: Any, layer: int, rows: int) -> torch.Tensor:
        return attention.run(self.q[:rows], self.pages[:, layer, 0], self.pages[:, layer, 1])


def run(context: Context) -> dict[str, Any]:
    """Microseconds per layer, and bytes per time as a share of the measured bandwidth."""
    found: dict[str, Any] = {
        "method": context.timer.method,
        "bandwidth_bytes_per_s": context.bandwidth(),
        "absent": {},
        "rows": [],
    }
    for tokens in context.pick((40,), (256, 1024, 4096), (256, 1024, 4096, 16384)):
        for rows in context.pick((1, 3), (1, 8, 32, 64), (1, 2, 4, 8, 16, 32, 64, 128)):
            if rows * tokens <= context.pick(1 << 20, 1 << 18, 1 << 19):  # sizes that certainly fit in memory
                with context.row(found, f"attention of {rows} rows of {tokens} tokens"):
                    found["rows"].append(_measure(context, rows, tokens, found["absent"]))
    return found


def _measure(context: Context, rows: int, tokens: int, absent: dict[str, str]) -> dict[str, Any]:
    case = _Case(context, rows, tokens)
    row: dict[str, Any] = {"count": rows, "tokens": tokens, "layers": case.layers, "bytes": case.cost.bytes}
    checked = min(rows, _CHECKED)
    want = case.attend(PagedAttention(case.shape, context.device), checked).float()
    for name in BACKENDS:
        if name in absent:
            continue
        try:
            backend = ours_or(name, case.setup(case.shape, float8_kv=context.float8_kv), context.smoke)
        except AttentionUnavailable as error:
            absent[name] = str(error)
            continue
        attention = backend.decode(rows)
        whole = case.attend(attention, rows)
        error = float((whole[:checked].float() - want).abs().max() / case.pages[:, 0, 1].float().abs().max())
        if not error <= TOLERANCE[context.dtype_name]:
            raise WrongValues(f"{name}: differs from torch by {error:.1e} of the largest value")
        if name == "triton" and not torch.equal(case.attend(backend.decode(1), 1)[0], whole[0]):
            raise WrongValues("a row has other bits alone")
        row |= {f"{name}_error": error, **case.measured(attention, name, case.cost.bytes)}
    if "flashinfer_us" in row:
        row["over_flashinfer"] = row["triton_us"] / row["flashinfer_us"]
    return row


def tables(values: dict[str, Any]) -> list[Table]:
    columns = "tokens | rows: count"
    for name in BACKENDS:
        columns += f" | {name} µs: {name}_us | share, {name}: {name}_share"
    title = "(j) decode attention of a layer, share of measured bandwidth"
    return [rows_table(title, f"{columns} | ours/FlashInfer: over_flashinfer", values["rows"])]
