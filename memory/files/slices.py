"""Projections of a base model that an adapter has in slices: A and B of some of a projection's rows each.

Together they are an A with all their rows, and a B whose blocks are theirs, so the rank is the sum of their ranks.
Where their scales differ, blocks have the quotients by their target's as factors.

Tests: tests/core/adapters/test_tinker_adapters.py
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

#: By the path of a projection, the names that Tinker gives to its first sections: of Gated DeltaNet, and of Mamba 2.
_SLICES = {
    "linear_attn.in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
    "mamba.in_proj": ("gate_proj", "x_proj"),
}

Target = tuple[int, str]
"""Layer and projection."""


class Slice(NamedTuple):
    """Some rows of a projection."""

    projection: str
    first: int
    rows: int


def slices_of(projections: Projections, renamed: Mapping[str, str]) -> dict[str, Slice]:
    """The slices of a table's projections, by path. renamed: projections with another path, and that."""
    found = {}
    for path, names in _SLICES.items():
        own = next((each for each in projections if each.path == path), None)
        if own is not None and not any(name in projections for name in names):
            module, firsts = renamed.get(own.name, path).rpartition(".")[0], accumulate(own.sections, initial=0)
            for name, first, rows in zip(names, firsts, own.sections, strict=False):
                found[f"{module}.{name}"] = Slice(own.name, first, rows)
    return found


Sides = dict[str, tuple[str, TensorInfo]]
"""Of a slice: name and tensor by side, `A` or `B`."""


SliceFactors = dict[Target, dict[str, float]]
"""By target and path, the factors of slices whose scale is not that of their target."""


class SlicedTarget:
    """The slices of a projection in a layer that a file has."""

    def __init__(self, file: Path, projection: Projection) -> None:
        self._file = file
        self._projection = projection
        self.slices: dict[str, tuple[Slice, Sides]] = {}

    def joined(self, factors: Mapping[str, float]) -> Iterator[tuple[TensorInfo, str]]:
        """A and B of the projection, each with the file's names of it. factors: of slices whose factor is not 1. Raises
        AdapterFormatError.
        """
        ordered = self._ordered
        for path, (own, sides) in ordered:
            rank = self.rank(path)
            self._check(sides, {"A": (rank, self._projection.inputs), "B": (own.rows, rank)})
        inner, outputs = sum(map(self.rank, self.slices)), self._projection.outputs
        firsts = tuple(own.first for _, (own, _) in ordered)
        own_factors = tuple(factors.get(path, 1.0) for path, _ in ordered) if factors else ()
        for side, shape, formula in (
            ("A", (inner, self._projection.inputs), Stacked()),
            ("B", (outputs, inner), Blocks(firsts, outputs, own_factors)),
        ):
            parts = tuple(sides[side][1] for _, (_, sides) in ordered)
            computed = Computed("LoRA", formula, parts, is_larger=False)
            given = " and ".join(sides[side][0] for _, (_, sides) in ordered)
            yield TensorInfo("F32", shape, 0, 0, computed=computed), given

    @property
    def _ordered(self) -> list[tuple[str, tuple[Slice, Sides]]]:
        """The slices in the order of their rows."""
        return sorted(self.slices.items(), key=lambda item: item[1][0].first)

    def rank(self, path: str) -> int:
        """The rank of a slice, by its A."""
        _, sides = self.slices[path]
        shape = sides["A"][1].shape if "A" in sides else ()
        return shape[0] if len(shape) == 2 else 1

    def check_rank(self, path: str, rank: int) -> None:
        """Raise AdapterFormatError unless a slice has the rank that its configuration says."""
        if self.rank(path) != rank:
            name, info = self.slices[path][1]["A"]
            raise AdapterFormatError(
                f"{self._file}: tensor {shown(name)} has shape {shown(list(info.shape))}: its rank is "
                f"{self.rank(path)}, by {CONFIG_FILE} (r, rank_pattern) it is {rank}: mend the wrong one"
            )

    def _check(self, sides: Sides, shapes: Mapping[str, tuple[int, int]]) -> None:
        name, _ = next(iter(sides.values()))
        for side, shape in shapes.items():
            if side not in sides:
                missing = f"{name.rpartition('.lora_')[0]}.lora_{side}.weight"
                raise AdapterFormatError(f"{self._file}: tensor {shown(missing)} is missing; save the adapter again")
            name, info = sides[side]
            if info.shape != shape:
                found = f"tensor {shown(name)} has shape {shown(list(info.shape))}"
                raise AdapterFormatError(
                    f"{self._file}: {found}, {list(shape)} is needed for this slice of {self._projection.name}; "
                    f"{SERVE_WITH_ITS_BASE}"
                )


def check_slices(
    config: AdapterConfig,
    named: Mapping[Target, Mapping[str, tuple[int, float]]],
    given: Mapping[Target, SlicedTarget],
    targets: Mapping[Target, tuple[int, float]],
) -> SliceFactors:
    """The factors of slices whose scale is not their target's. Raises AdapterFormatError unless a configuration names
    the slices that the file has, with their ranks.

    named: by target and path of a slice, its rank and scale by the configuration. targets: rank and scale of targets.
    """
    found: SliceFactors = {}
    for (layer, module), target in given.items():
        own, scale = named.get((layer, module), {}), targets.get((layer, module), (0, 0.0))[1]
        _check_names(config, layer, own, target)
        others = {path: own[path][1] for path in target.slices if own[path][1] != scale}
        if others and not scale:
            raise config.refuse(
                "alpha_pattern", f"slices of {module} in layer {layer} have alpha 0 and others: mend it"
            )
        if others:
            found[layer, module] = {path: other / scale for path, other in others.items()}
    return found


def _check_names(config: AdapterConfig, layer: int, own: Mapping[str, tuple[int, float]], target: SlicedTarget) -> None:
    """Raise AdapterFormatError unless a configuration names the slices of a target, with their ranks. own: as `named`
    of `check_slices`.
    """
    for path in target.slices:
        if path not in own:
            raise AdapterFormatError(
                f"{config.file}: {path} of layer {layer} is not targeted (target_modules, exclude_modules), but "
                "the file has tensors of it; mend either"
            )
        target.check_rank(path, own[path][0])
    missing = [path for path in own if path not in target.slices]
    if missing and not config.targets_all_linear:
        raise AdapterFormatError(
            f"{config.file}: {missing[0]} of layer {layer} is missing in the file, but {CONFIG_FILE} targets it; "
            "narrow target_modules or save the adapter again"
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
