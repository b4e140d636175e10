"""GEMMs of few rows with the base weights: our kernel compared with cuBLAS, including the activation if there is
one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....core.model.batch import GemmBackend
from ....core.model.program.torch_gemm import multiply
from ....ops.gemm.small_gemm_schedule import MAX_ROWS, fewest_rows
from ...kernels.cost import Cost, gemm_cost
from ...report.table import Table, rows_table
from ..context import Context
from ..lora_case import layers_for
from .attention import TOLERANCE, WrongValues

#: Name → group of projections, and whether the activation follows the GEMM; it is timed with it, because our kernel
#: does both in one launch.
CASES = {"qkv": ("qkv", False), "o": ("o", False), "gate and up": ("gate_up", True), "down": ("down", False)}

#: GEMM backends without adapters.
WAYS = GemmBackend.LIBRARY, GemmBackend.SMALL


class _Case:
    """A group's weights of several layers, and rows; every backend multiplies each layer with the same rows."""

    def __init__(self, context: Context, name: str, rows: int) -> None:
        group, self.gate = CASES[name]
        d_in, modules = context.size.geometry.groups[group]
        d_out = sum(width for _, _, width in modules)
        itemsize = context.dtype.itemsize
        self.layers = layers_for(d_in * d_out * itemsize, context.l2_bytes(), 32)
        generator = torch.Generator(context.device).manual_seed(context.seed)

        def draw(*shape: int) -> torch.Tensor:
            values = torch.empty(*shape, dtype=context.dtype, device=context.device)
            return values.normal_(0, 1, generator=generator)

        self.weights = [draw(d_out, d_in) / d_in**0.5 for _ in range(self.layers)]
        self.x = draw(rows, d_in)
        self.cost: Cost = gemm_cost(rows, d_in, d_out // 2 if self.gate else d_out, itemsize, silu=self.gate)

    def product(self, backend: GemmBackend, weight: torch.Tensor) -> torch.Tensor:
        return multiply(backend, self.x, weight, gate=self.gate)

    def work(self, backend: GemmBackend) -> Callable[[], None]:
        def run() -> None:
            for weight in self.weights:
                self.product(backend, weight)

        return run

    def error(self, backend: GemmBackend) -> float:
        """Largest difference from the library's result, relative to the largest."""
        want, got = (self.product(each, self.weights[0]).float() for each in (GemmBackend.LIBRARY, backend))
        return float((got - want).abs().max() / want.abs().max())

    def changing_rows(self, backend: GemmBackend) -> list[int]:
        """Rows whose bits change when computed alone, by a launch with as many tile rows."""
        x, whole, found = self.x, self.product(backend, self.weights[0]), []
        for row in range(len(x)):
            self.x = x[row : row + 1].repeat(fewest_rows(len(x)), 1)
            if not torch.equal(self.product(backend, self.weights[0])[0], whole[row]):
                found.append(row)
        self.x = x
        return found


def run(context: Context) -> dict[str, Any]:
    """Microseconds per GEMM, and bytes per time as a share of the measured bandwidth."""
    found: dict[str, Any] = {"method": context.timer.method, "bandwidth_bytes_per_s": context.bandwidth(), "rows": []}
    for name in CASES:
        for count in context.pick((1, 3), (1, 16, 32, MAX_ROWS), (1, 2, 4, 8, 16, 24, 32, 48, MAX_ROWS)):
            with context.row(found, f"product {name}, {count} rows"):
                found["rows"].append(_measure(context, name, count))
    return found


def _measure(context: Context, name: str, count: int) -> dict[str, Any]:
    case = _Case(context, name, count)
    row: dict[str, Any] = {"product": name, "count": count, "layers": case.layers, "bytes": case.cost.bytes}
    for backend in WAYS:
        if backend is not GemmBackend.LIBRARY:
            error = case.error(backend)
            if not error <= TOLERANCE[context.dtype_name]:
                raise WrongValues(f"{name} by {backend}: differs from the library by {error:.1e} of the largest output")
            if changing := case.changing_rows(backend):
                raise WrongValues(f"{name} by {backend}: rows {changing} of {count} have other bits alone")
            row[f"{backend}_error"] = error
        seconds = context.timer.time(case.work(backend)).seconds / case.layers
        row[f"{backend}_us"] = seconds * 1e6
        row[f"{backend}_share"] = case.cost.bytes / seconds / context.bandwidth()
    row["over_library"] = row[f"{GemmBackend.SMALL}_us"] / row[f"{GemmBackend.LIBRARY}_us"]
    return row


def tables(values: dict[str, Any]) -> list[Table]:
    columns = "product | rows: count"
    for backend in WAYS:
        columns += f" | {backend} µs: {backend}_us | share, {backend}: {backend}_share"
    title = "(h) products of few rows, share of measured bandwidth"
    return [rows_table(title, f"{columns} | ours/library: over_library", values["rows"])]
