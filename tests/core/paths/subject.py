"""A row of the table of paths: what is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..tiny_families import ADAPTERS

Adapters = tuple[str | None, ...]


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with adapters, and its answers in transformers + peft, as `Tiny` has them.

    make: is called once in a process.
    """

    name: str
    make: Callable[[], Any]
    adapters: Adapters = (None, *ADAPTERS)
    """Whose requests are served beside each other; None is the base model."""

    merged: str = "r3-all"
    """The adapter that is merged into the weights where a path merges one."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of all its engines."""

    lacks: str | None = None
    """What the native decoder says that it lacks, so that PyTorch's operators compute the model; None if nothing."""

    lacks_on_ranks: str | None = None
    """What the native decoder lacks for a share of it alone."""

    has_experts: bool = False
    """True if the native library computes mixtures of experts within PyTorch's steps."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """What a path needs and this row is refused → what the error says."""

    untold: Mapping[str, str] = field(default_factory=dict)
    """What a path needs, and why no comparison can be made of it."""

    family: str = ""
    """Whose weights are saved again in bfloat16."""

    most_tokens: int = 24
    """Longest answer that is asked for: of a long one not every choice is clear where the reference rounds."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of its configuration in bfloat16."""

    bound: float = 3e-2
    """Relative L2 error of bfloat16 logits that is taken for rounding."""

    @cached_property
    def it(self) -> Any:
        return self.make()

    @property
    def kernels(self) -> tuple[str, ...]:
        """Values of `cpu_kernels` by which it is computed in different ways."""
        own = "native" if self.lacks is None else "auto" if self.has_experts else None
        return ("torch",) if own is None else (own, "torch")

    def why_untold(self, needs: tuple[str, ...]) -> str | None:
        """Why a path that needs all this tells nothing of the row; None if it does."""
        return next((self.untold[each] for each in needs if each in self.untold), None)

    def why_refused(self, needs: tuple[str, ...], kernels: str) -> str | None:
        """A pattern of the error that a path which needs all this ends in; None if it serves."""
        if kernels == "native" and "ranks" in needs and self.lacks_on_ranks is not None:
            return self.lacks_on_ranks
        return next((self.refused[each] for each in needs if each in self.refused), None)
