"""Where a base model has the projections that adapters may change, by the names that PEFT gives them.

Adapters of bases that keep several projections in one matrix are read as adapters of each: they share A `[rank, in]`,
and each has its rows of B `[out, rank]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from ..pages.projections import Projections
from .whole_copies import BaseRows


@dataclass(frozen=True)
class ModulePaths:
    """Paths in a layer of a base model: a projection's own, unless it is listed."""

    projections: Projections

    renamed: tuple[tuple[str, str], ...] = ()
    """A projection, and its path."""

    fused: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    """A path, and the projections whose rows are stacked there: the name of each, and how many rows it has."""

    left_out: tuple[str, ...] = ()
    """Beginnings of names in the base model that text does not need, such as a vision tower's."""

    vocab_size: int | None = None
    """None: not known."""

    is_tied: bool = False
    """True if the output projection is the token embeddings."""

    base_rows: BaseRows | None = field(default=None, compare=False, repr=False)
    """The base model's own rows, with which adapters' copies are compared; None: they are not at hand."""

    @cached_property
    def by_path(self) -> dict[str, tuple[str, ...]]:
        """Each path that PEFT may target, and the projections that it is, in the table's order."""
        renamed, fused = dict(self.renamed), {part: path for path, parts in self.fused for part, _ in parts}
        found: dict[str, tuple[str, ...]] = {}
        for projection in self.projections:
            if projection.is_rows:
                continue
            name = projection.name
            path = fused.get(name) or renamed.get(name) or projection.path
            found[path] = (*found.get(path, ()), name)
        return found

    def in_layer(self, layer: int) -> dict[str, tuple[str, ...]]:
        """`by_path` of the projections that a layer has."""
        names = {projection.name for projection in self.projections.layers[layer]}
        return {path: parts for path, parts in self.by_path.items() if names.issuperset(parts)}

    @cached_property
    def usual(self) -> dict[str, str]:
        """Paths of single projections that are not their own, and their own."""
        return {path: self.projections[module].path for module, path in self.renamed}

    @cached_property
    def stacked(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Paths of several projections: each one's own path, and how many rows it has."""
        own = self.projections
        return {path: tuple((own[module].path, rows) for module, rows in parts) for path, parts in self.fused}

    @cached_property
    def names(self) -> str:
        """Names for PEFT's `target_modules`."""
        return ", ".join(path.rpartition(".")[2] for path in self.by_path)
