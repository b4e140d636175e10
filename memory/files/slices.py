"""Projections of a base model that an adapter has in slices: A and B of some of a projection's rows each.

Together they are an A with all their rows, and a B whose blocks are theirs, so the rank is the sum of their ranks.

Tests: tests/core/test_tinker_adapters.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ..pages.projections import Projection, Projections
from .config import CONFIG_FILE, AdapterConfig
from .error import AdapterFormatError, shown
from .formulas import Blocks, Stacked
from .tensor_info import Computed, TensorInfo
from .unserved import SERVE_WITH_ITS_BASE

#: By the path of a projection, the names that trainers give to its sections (Tinker's, of Gated DeltaNet).
_SLICES = {"linear_attn.in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v")}

Target = tuple[int, str]
"""Layer and projection."""


class Slice(NamedTuple):
    """Some rows of a projection."""

    projection: str
    first: int
    rows: int


def slices_of(projections: Projections) -> dict[str, Slice]:
    """The slices of a table's projections, by path."""
    found = {}
    for path, names in _SLICES.items():
        own = next((each for each in projections if each.path == path), None)
        if own is not None:
            firsts = accumulate(own.sections, initial=0)
            for name, first, rows in zip(names, firsts, own.sections, strict=False):
                found[f"{path.rpartition('.')[0]}.{name}"] = Slice(own.name, first, rows)
    return found


Sides = dict[str, tuple[str, TensorInfo]]
"""Of a slice: name and tensor by side, `A` or `B`."""


class SlicedTarget:
    """The slices of a projection in a layer that a file has."""

    def __init__(self, file: Path, projection: Projection) -> None:
        self._file = file
        self._projection = projection
        self.slices: dict[str, tuple[Slice, Sides]] = {}

    def joined(self) -> Iterator[tuple[TensorInfo, str]]:
        """A and B of the projection, each with the file's names of it. Raises AdapterFormatError."""
        ordered = sorted(self.slices.items(), key=lambda item: item[1][0].first)
        rank = self._rank(ordered[0][1][1])
        for path, (own, sides) in ordered:
            self._check(path, sides, {"A": (rank, self._projection.inputs), "B": (own.rows, rank)})
        inner, outputs = rank * len(ordered), self._projection.outputs
        firsts = tuple(own.first for _, (own, _) in ordered)
        for side, shape, formula in (
            ("A", (inner, self._projection.inputs), Stacked()),
            ("B", (outputs, inner), Blocks(firsts, outputs)),
        ):
            parts = tuple(sides[side][1] for _, (_, sides) in ordered)
            computed = Computed("LoRA", formula, parts, rank, is_larger=False)
            given = " and ".join(sides[side][0] for _, (_, sides) in ordered)
            yield TensorInfo("F32", shape, 0, 0, computed=computed), given

    def _rank(self, sides: Sides) -> int:
        shape = sides["A"][1].shape if "A" in sides else ()
        return shape[0] if len(shape) == 2 else 1

    def _check(self, path: str, sides: Sides, shapes: Mapping[str, tuple[int, int]]) -> None:
        name, _ = next(iter(sides.values()))
        for side, shape in shapes.items():
            if side not in sides:
                missing = f"{name.rpartition('.lora_')[0]}.lora_{side}.weight"
                raise AdapterFormatError(f"{self._file}: tensor {shown(missing)} is missing; save the adapter again")
            name, info = sides[side]
            if info.shape != shape:
                found = f"tensor {shown(name)} has shape {shown(list(info.shape))}"
                raise AdapterFormatError(
                    f"{self._file}: {found}, {list(shape)} is needed for a slice of {self._projection.name} with the "
                    f"ranks of the others; {SERVE_WITH_ITS_BASE}"
                )


def check_slices(
    config: AdapterConfig,
    named: Mapping[Target, Mapping[str, tuple[int, float]]],
    given: Mapping[Target, SlicedTarget],
) -> None:
    """Raise AdapterFormatError unless a configuration names the slices that the file has, with one rank and scale.

    named: by target and path of a slice, its rank and scale by the configuration.
    """
    for (layer, module), target in given.items():
        own = named.get((layer, module), {})
        for path in target.slices:
            if path not in own:
                raise AdapterFormatError(
                    f"{config.file}: {path} of layer {layer} is not targeted (target_modules, exclude_modules), but "
                    "the file has tensors of it; mend either"
                )
        missing = [path for path in own if path not in target.slices]
        if missing and not config.targets_all_linear:
            raise AdapterFormatError(
                f"{config.file}: {missing[0]} of layer {layer} is missing in the file, but {CONFIG_FILE} targets it; "
                "narrow target_modules or save the adapter again"
            )
        first, *others = target.slices
        if differing := [path for path in others if own[path] != own[first]]:
            raise config.refuse(
                "rank_pattern", f"{first} and {differing[0]} are of one matrix: train them with one rank and alpha"
            )


def by_target(
    file: Path,
    listed: Mapping[str, TensorInfo],
    names: Mapping[str, tuple[int, str, str]],
    modules: Mapping[str, Slice],
    projections: Projections,
) -> dict[Target, SlicedTarget]:
    """The slices that a file has. names: of their tensors: layer, path and side. modules: slices by path."""
    found: dict[Target, SlicedTarget] = {}
    parts: dict[tuple[int, str], Sides] = defaultdict(dict)
    for name, (layer, path, side) in names.items():
        parts[layer, path][side] = name, listed[name]
    for (layer, path), sides in parts.items():
        own = modules[path]
        target = layer, own.projection
        if target not in found:
            found[target] = SlicedTarget(file, projections[own.projection])
        found[target].slices[path] = own, sides
    return found
