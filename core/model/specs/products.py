"""Projections of which layers write products, side by side.

Tests: tests/core/model/compose/test_build.py
"""

from __future__ import annotations

from typing import NamedTuple

from ....memory.pages.projections import Projection


class Proj(NamedTuple):
    """One of the projections of a product: what adapters may change, by its path. See `Projection`."""

    path: str
    outputs: int

    units: int = 1
    """Equal parts that TP ranks share, of inputs where the product is summed over ranks; 1: each has all of it."""

    bias: bool = False
    sections: tuple[int, ...] = ()
    section_units: tuple[int, ...] = ()
    form: str = ""
    is_bypassed: bool = False
    why_no_bias: str = ""
    bias_factor: float = 1.0
    scales: str = ""

    def of(self, product: str, inputs: int, *, rows: bool = False, merges: bool = True) -> Projection:
        """The projection as tables of adapters have it."""
        return Projection(
            self.path,
            product,
            inputs,
            self.outputs,
            self.units,
            self.sections,
            section_units=self.section_units,
            form=self.form,
            is_bypassed=self.is_bypassed,
            why_no_bias=self.why_no_bias,
            bias_factor=self.bias_factor,
            is_row_parallel=rows,
            merges=merges,
            scales=self.scales,
        )
