"""Schedules of the launches of Gated DeltaNet; they depend only on shapes.

Tests: tests/ops/test_gated_delta_interpreted.py, tests/core/model/test_paged_states_interpreted.py
"""

from __future__ import annotations

from dataclasses import dataclass

#: Columns of a state that a program has while a prompt's tokens pass.
SCAN_COLUMNS = 16


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


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


@dataclass(frozen=True, slots=True)
class StepConstants:
    """Compile-time constants of a decode step's launch: a layer's shape, and the places of states in pages."""

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    channels: int
    """Of the convolution."""
    conv: int
    """Tokens that the convolution sees."""
    block_k: int
    """`k_dim`, or the next power of two; block_v likewise."""
    block_v: int
    convs_per_page: int
    """How many layers' convolution states fit in a page."""
    heads_per_page: int
    drafts_per_page: int
    """Rows of drafts' inputs."""
    conv_pages: int
    """The state's pages before the first with heads."""
    draft_page: int
    """The state's pages before the first with drafts' inputs."""
    num_pages: int
    """Of a state."""
    most_drafts: int
    """Of a sequence in a step; 0 without speculation."""

    @property
    def draft_elems(self) -> int:
        return self.channels + 2 * self.v_heads


def step_constants(
    k_heads: int,
    v_heads: int,
    k_dim: int,
    v_dim: int,
    conv: int,
    *,
    convs_per_page: int,
    heads_per_page: int,
    conv_pages: int,
    num_pages: int,
    drafts_per_page: int = 0,
    draft_page: int = 0,
    most_drafts: int = 0,
) -> StepConstants:
    """Of a decode step's launch, with a program for each head of values of a sequence. See `StepConstants`."""
    return StepConstants(
        k_heads,
        v_heads,
        k_dim,
        v_dim,
        channels=2 * k_heads * k_dim + v_heads * v_dim,
        conv=conv,
        block_k=_power_of_two(k_dim),
        block_v=_power_of_two(v_dim),
        convs_per_page=convs_per_page,
        heads_per_page=heads_per_page,
        drafts_per_page=drafts_per_page,
        conv_pages=conv_pages,
        draft_page=draft_page,
        num_pages=num_pages,
        most_drafts=most_drafts,
    )


def step_options() -> dict[str, int | bool]:
    """A program holds a head's state in registers: 128 values a thread for 128 × 128. Twice the warps, with half the
    values each, spilled up to 2 KiB.
    """
    return {"num_warps": 4, "enable_fp_fusion": True}


def scan_constants(v_heads: int, k_dim: int, v_dim: int) -> DeltaConstants:
    """Of a launch for a prompt, with a program for some columns of a head."""
    return DeltaConstants(v_heads, k_dim, v_dim, _power_of_two(k_dim), SCAN_COLUMNS)


def scan_options() -> dict[str, int | bool]:
    return {"num_warps": 2, "enable_fp_fusion": True}
