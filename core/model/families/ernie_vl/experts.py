"""Experts of images' positions (ERNIE 4.5 VL).

Tests: tests/core/media/test_image_experts.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from ...specs.feed_forward import Experts


@dataclass(frozen=True, kw_only=True)
class ErnieVlExperts(Experts):
    """Positions of images go to further experts instead, as many, with a router of their own."""

    image_size: int
    """Width of the further experts."""

    @property
    def of_images(self) -> Experts:
        """The mixture that positions of images go to: the further experts, and the same shared one."""
        return replace(self, size=self.image_size)

    @property
    def widths(self) -> dict[str, int]:
        """See `Experts.widths`."""
        return {**super().widths, "images' experts": self.image_size}

    def share(self, size: int) -> Self:
        """See `Experts.share`."""
        return replace(super().share(size), image_size=self.image_size // size)
