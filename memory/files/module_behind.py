"""A module behind all layers, which this program has in the last one.

Tests: tests/memory/files/names/test_layer_numbers.py
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from .names.layer_numbers import GivenNames


@dataclass(frozen=True, slots=True)
class ModuleBehind:
    """Names of a module in a model whose layers have others (Qwen4-Exp); as `LayerNumbers` for layers."""

    last: int
    """The last layer's number."""

    module: str

    def given(self, name: str) -> str:
        """The module's name, without a layer, of a part that the last layer has here."""
        begin, found, rest = name.partition(f"layers.{self.last}.{self.module}")
        is_whole = not begin or begin.endswith(".")
        return begin + self.module + rest if found and is_whole and rest[:1] in ("", ".") else name

    def own(self, name: str) -> str:
        """The name in the last layer of what has this one behind all layers."""
        begin, found, rest = name.partition(self.module)
        is_whole = (not begin or begin.endswith(".")) and rest[:1] in ("", ".")
        return (
            f"{begin}layers.{self.last}.{self.module}{rest}" if found and is_whole and "layers." not in begin else name
        )

    def named(self, names: Container[str]) -> Container[str]:
        """See `LayerNumbers.named`."""
        return GivenNames(self, names)
