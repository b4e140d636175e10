"""Schedules of the launches of Gated DeltaNet; they depend only on shapes.

Tests: tests/ops/mixers/test_gated_delta_interpreted.py, tests/core/model/test_paged_states_interpreted.py
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..elementwise.elementwise_schedule import power_of_two

#: Columns of a state that a program has while a prompt's tokens pass.
SCAN_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class DeltaConstants:
    """Compile-time constants of a prompt's launch."""

    v_heads: int
    k_dim: int
    v_dim: int
    block_k: int
    """`k_dim`, or the next power of two."""
    block_v: int
    """Columns of a state that a program has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConstants:
    """Compile-time constants of a decode step's launch: a layer's shape, and the places of states in pages.

    The launch has a program for each head of values of a sequence.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    channels: int = field(init=False)
    """Of the convolution."""
    conv: int
    """Tokens that the convolution sees."""
    block_k: int = field(init=False)
    """`k_dim`, or the next power of two; block_v likewise."""
    block_v: int = field(init=False)
    convs_per_page: int
    """How many layers' convolution states fit in a page."""
    heads_per_page: int
    drafts_per_page: int = 0
    """Rows of drafts' inputs."""
    conv_pages: int
    """The state's pages before the first with heads."""
    draft_page: int = 0
    """The state's pages before the first with drafts' inputs."""
    num_pages: int
    """Of a state."""
    most_drafts: int = 0
    """Of a sequence in a step; 0 without speculation."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim)
        object.__setattr__(self, "block_k", power_of_two(self.k_dim))
        object.__setattr__(self, "block_v", power_of_two(self.v_dim))

    @property
    def draft_elems(self) -> int:
        return self.channels + 2 * self.v_heads


def step_options() -> dict[str, int | bool]:
    """A program holds a head's state in registers: 128 values a thread for 128 × 128. Twice the warps, with half the
    values each, spilled up to 2 KiB.
    """
    return {"num_warps": 4, "enable_fp_fusion": True}


def scan_constants(v_heads: int, k_dim: int, v_dim: int) -> DeltaConstants:
    """Of a launch for a prompt, with a program for some columns of a head."""
    return DeltaConstants(v_heads, k_dim, v_dim, power_of_two(k_dim), SCAN_COLUMNS)


def scan_options() -> dict[str, int | bool]:
    return {"num_warps": 2, "enable_fp_fusion": True}
