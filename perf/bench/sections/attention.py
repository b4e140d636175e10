"""Decode attention alone: our kernel, FlashInfer's decode wrapper and its XQA kernel, used as in steps, compared with
the bytes of KV.

Tests: tests/perf/bench/test_sections.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from ....ops.attention.attention import AttentionSetup, HeadShape, PagedAttention
from ....ops.attention.attention_backend import AttentionBackend, AttentionUnavailable, choose_attention
from ....ops.elementwise.float8_kv import DTYPE as FLOAT8
from ...kernels.cost import attention_cost
from ...report.table import Table, rows_table
from ..context import Context
from ..idle_engine import StubDevice
from ..lora_case import layers_for

#: Largest difference from torch's attention, relative to the largest value.
TOLERANCE = {"bfloat16": 2.0**-6, "float32": 1e-4}

#: Sequences that are compared with torch's results, and with their own results when alone.
_CHECKED = 2

Compared = Literal["triton", "flashinfer", "xqa"]

BACKENDS: tuple[Compared, ...] = ("triton", "flashinfer", "xqa")


class WrongValues(ArithmeticError):
    """A backend's result differs from torch's, or our kernel's bits differ for a sequence alone."""


class _Case:
    """Sequences of `context_tokens` tokens each in pages of several layers, in random order."""

    def __init__(self, context: Context, rows: int, context_tokens: int) -> None:
        geometry, device = context.size.geometry, context.device
        layout = geometry.page_layout(context.dtype.itemsize)  # for its tokens
        self.context, self.rows, self.lens = context, rows, [context_tokens] * rows
        self.shape = HeadShape(geometry.heads, geometry.kv_heads, geometry.head_dim, layout.block_tokens)
        itemsize, kv_itemsize = context.dtype.itemsize, context.kv_itemsize
        self.cost = attention_cost(self.lens, *self.shape, itemsize, kv_itemsize=kv_itemsize)
        self.layers = layers_for(self.cost.bytes, context.l2_bytes())
        per_row = layout.pages_for_tokens(context_tokens)
        generator = torch.Generator(device).manual_seed(context.seed)
        heads, kv_heads, head_dim, block_tokens = self.shape
        pages = torch.empty(
            (rows * per_row + 1, self.layers, 2, block_tokens, kv_heads, head_dim), dtype=context.dtype, device=device
        )
        pages.normal_(0, 1, generator=generator)
        self.pages = pages.to(FLOAT8) if context.float8_kv else pages
        self.q = torch.empty(rows, heads, head_dim, dtype=context.dtype, device=device)
        self.q.normal_(0, 1, generator=generator)
        order = torch.randperm(rows * per_row, generator=torch.Generator().manual_seed(context.seed))
        self.table = (order + 1).view(rows, per_row)

    def backend(self, name: Compared) -> AttentionBackend:
        """The backend of that name. Raises AttentionUnavailable."""
        device = torch.device("cpu" if self.context.smoke else "cuda:0")
        rows, width = self.rows, self.table.shape[1]
        setup = AttentionSetup(self.shape, self.context.dtype, device, rows, width, float8_kv=self.context.float8_kv)
        if not self.context.smoke:
            return choose_attention(setup, name)
        if name != "triton":
            raise AttentionUnavailable("there is no GPU")
        from ....ops.attention.attention_triton import TritonBackend

        return TritonBackend(setup, num_sms=4, reason="a smoke run", new_event=StubDevice().event)

    def plan(self, attention: Any, rows: int) -> None:
        attention.plan(range(rows + 1), self.table[:rows], self.lens[:rows])

    def attend(self, attention: Any, rows: int) -> torch.Tensor:
        """Layer 0's result of the first `rows` sequences."""
        self.plan(attention, rows)
        return attention.run(self.q[:rows], self.pages[:, 0, 0], self.pages[:, 0, 1])

    def work(self, attention: Any) -> Callable[[], None]:
        """A run through all layers with the planned sequences."""

        def run() -> None:
            for layer in range(self.layers):
                attention.run(self.q, self.pages[:, layer, 0], self.pages[:, layer, 1])

        return run


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
            backend = case.backend(name)
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
        case.plan(attention, rows)
        sample = context.timer.time(case.work(attention))
        seconds = sample.seconds / case.layers
        row |= {
            f"{name}_error": error,
            f"{name}_us": seconds * 1e6,
            f"{name}_share": case.cost.bytes / seconds / context.bandwidth(),
        }
    if "flashinfer_us" in row:
        row["over_flashinfer"] = row["triton_us"] / row["flashinfer_us"]
    return row


def tables(values: dict[str, Any]) -> list[Table]:
    columns = "tokens | rows: count"
    for name in BACKENDS:
        columns += f" | {name} µs: {name}_us | share, {name}: {name}_share"
    title = "(j) decode attention of a layer, share of measured bandwidth"
    return [rows_table(title, f"{columns} | ours/FlashInfer: over_flashinfer", values["rows"])]
