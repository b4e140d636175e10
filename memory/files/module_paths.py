"""Where a base model has the projections that adapters may change, by the names that PEFT gives them.

Adapters of bases that keep several projections in one matrix are read as adapters of each: they share A `[rank, in]`,
and each has its rows of B `[out, rank]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..pages.layout import MODULES

_MLP = ("gate_proj", "up_proj", "down_proj")


def usual_path(module: str) -> str:
    """A projection's path in a layer of a Llama model."""
    return f"{'mlp' if module in _MLP else 'self_attn'}.{module}"


@dataclass(frozen=True)
class ModulePaths:
    """Paths in a layer of a base model. Others than Llama's are listed."""

    renamed: tuple[tuple[str, str], ...] = ()
    """A projection, and its path."""

    fused: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    """A path, and the projections whose rows are stacked there: the name of each, and how many rows it has."""

    left_out: tuple[str, ...] = ()
    """Beginnings of names in the base model that text does not need, such as a vision tower's."""

    @cached_property
    def by_path(self) -> dict[str, tuple[str, ...]]:
        """Each path that PEFT may target, and the projections that it is, in `MODULES`' order."""
        renamed, fused = dict(self.renamed), {part: path for path, parts in self.fused for part, _ in parts}
        found: dict[str, tuple[str, ...]] = {}
        for module in MODULES:
            path = fused.get(module) or renamed.get(module) or usual_path(module)
            found[path] = (*found.get(path, ()), module)
        return found

    @cached_property
    def usual(self) -> dict[str, str]:
        """Paths of single projections that are not Llama's, and what Llama calls them."""
        return {path: usual_path(module) for module, path in self.renamed}

    @cached_property
    def stacked(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Paths of several projections: Llama's path of each, and how many rows it has."""
        return {path: tuple((usual_path(module), rows) for module, rows in parts) for path, parts in self.fused}

    @cached_property
    def names(self) -> str:
        """What PEFT's `target_modules` may name."""
        return ", ".join(path.rpartition(".")[2] for path in self.by_path)


LLAMA_PATHS = ModulePaths()
