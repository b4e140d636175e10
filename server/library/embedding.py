"""Results of `LLM.embed` and `LLM.classify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """The vector of one input."""

    embedding: np.ndarray
    """`[hidden or dimensions]` float32."""
    prompt_token_ids: tuple[int, ...]
    adapter: str | None = None
    """`NAME@VERSION` of the adapter used; None: the base model."""


@dataclass(frozen=True, slots=True, eq=False)
class Classification:
    """The class of one input."""

    label: str
    """Of the highest value: the model's name of it, or `LABEL_` and its number."""
    probs: np.ndarray
    """`[labels]`: probabilities, or the head's values without an activation."""
    prompt_token_ids: tuple[int, ...]
    adapter: str | None = None
    """`NAME@VERSION` of the adapter used; None: the base model."""
