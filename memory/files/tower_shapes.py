"""What a vision tower has that adapters may change.

Tests: tests/core/media/test_tower_adapters.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class TowerShapes(Protocol):
    """What a tower has."""

    @property
    def linear(self) -> Mapping[str, tuple[int, ...]]:
        """Linear layers and patch convolutions, by name, with the shape of their weight; and `matrices`."""
        ...

    @property
    def matrices(self) -> Mapping[str, str]:
        """Modules of `linear` that are no layers: each has a matrix as a parameter, here by its whole name."""
        ...

    @property
    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        """All parameters, by name, with their shapes."""
        ...

    @property
    def copied(self) -> tuple[str, ...]:
        """Last parts of the names of modules that adapters may have whole."""
        ...

    def has(self, name: str) -> bool:
        """True if a tensor of an adapter, by its plain name, is in the tower."""
        ...

    def current(self, name: str) -> str:
        """A module's name now, of one that an earlier version of transformers gave it."""
        ...
