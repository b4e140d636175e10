"""Where a base model has the projections that adapters may change, by the names that PEFT gives them.

Adapters of bases that keep several projections in one matrix are read as adapters of each: they share A `[rank, in]`,
and each has its rows of B `[out, rank]`.

Tests: tests/memory/files/test_adapter_forms.py, tests/memory/files/test_many_tensors.py
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

from ..pages.projections import Projection, Projections, Role, UnitRows
from .config import IN_TOWER
from .names.layer_numbers import Renumbers
from .slices import Slice, slices_of
from .tokens.base_tokens import BaseTokens
from .tower_shapes import TowerShapes
from .whole_copies import BaseRows

_NESTED = ".base_layer"

#: Names that projections of experts have in some models, and in all of Tinker's adapters.
_LETTERS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}

#: Paths that several projections share in some models, each with the names of these in the order of rows.
_STACKED = {
    "self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "mlp.gate_up_proj": ("gate_proj", "up_proj"),
}


#: Names of modules around the layers of most models.
AROUND = ("model", "language_model", "text_model")


class ExpertForm(StrEnum):
    """How a file has A and B of experts."""

    EACH = "each"
    """Tensors of each expert."""

    TOGETHER = "together"
    """As Tinker has those of a projection of all experts: A `[experts, rank, in]` and B `[experts, out, rank]`, either
    with one expert's where all share it."""

    STACKED = "stacked"
    """As PEFT has those of a parameter of all experts: A `[experts · rank, in]`, and B `[out, rank · experts]`."""


class StackedSides(StrEnum):
    """Which versions of PEFT take the inputs of a parameter of all experts for its outputs. Their A and B are in each
    other's place: A is `[experts · rank, out]`, and B `[in, rank · experts]`.

    Before 0.19 PEFT took every parameter for `[experts, in, out]`, and since then for `[experts, out, in]`, unless the
    module says otherwise.
    """

    BEFORE = "before 0.19"
    """Parameters are `[experts, out, in]`."""

    SINCE = "since 0.19"
    """Parameters are `[experts, in, out]` (Llama 4)."""

    NEVER = "never"
    """Parameters are `[experts, in, out]`, and the module says so (gpt-oss)."""

    BY_TRANSFORMERS = "before 0.19 with transformers 5"
    """Parameters are `[experts, out, in]`, but were `[experts, in, out]` in transformers 4 (Qwen3-VL-MoE)."""


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

    around: tuple[str, ...] = AROUND
    """Names of modules that may be around the layers, each inside another."""

    further: tuple[tuple[str, str], ...] = ()
    """A projection, and another path that it has in a version of the model, or in a trainer's."""

    layers: str = "layers"
    """The name before a layer's number."""

    places: tuple[int | None, ...] = ()
    """By layer, the number of its invocation of a shared block, for which `{}` stands in paths: transformers has these
    modules in lists, with others' that the layer never calls. None, or no entry: the layer has no such path.
    """

    shared: tuple[frozenset[str], ...] = ()
    """By layer, projections that other layers share; no entry: it shares none."""

    embeddings: str = "embed_tokens"
    """The name of the token embeddings."""

    heads: tuple[str, ...] = ("lm_head",)
    """Names of the output projection in the model, of which an adapter has one."""

    head_has_bias: bool = False

    norms_embeddings: bool = False
    """The module of token embeddings normalises its rows."""

    model_type: str | None = None
    """The model's `model_type`, by which PEFT chooses modules; None: not known."""

    vocab_size: int | None = None
    """None: not known."""

    further_embeddings: int = 0
    """Rows of the model's embeddings behind those of `vocab_size`, which have no effect."""

    further_logits: int = 0
    """Rows of its output projection, likewise."""

    hidden_size: int | None = None
    """Likewise."""

    expert_names: tuple[tuple[str, str], ...] = ()
    """A projection of experts, and the path of an expert's, with `{}` for its number, where that is not its own."""

    stacked_experts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Paths of parameters `[experts, out, in]`, and the projections of experts whose rows are stacked there, in order.
    """

    stacked_alternate: bool = False
    """In these parameters the rows of two projections alternate, rather than follow one another."""

    stacked_sides: StackedSides = StackedSides.BEFORE

    are_swapped: bool | None = None
    """True if an adapter has A and B of these parameters swapped; None: not known yet."""

    experts: ExpertForm | None = None
    """How an adapter has them; None: it has none."""

    given_slices: frozenset[str] = frozenset()
    """Paths of all slices of projections that an adapter has in slices; see `slices`."""

    slice_factors: tuple[tuple[int, str, str, float], ...] = ()
    """Layer, projection and path of slices with a factor of their own, and that: see `slices`."""

    given_together: tuple[str, ...] = ()
    """Paths at which an adapter has tensors of all experts together."""

    absent: frozenset[str] = frozenset()
    """Projections that an adapter without tensors of them does not have, whatever its configuration says: a model has
    them as modules, as parameters or not at all, by the version that it was trained with.
    """

    biased: tuple[tuple[str, ...], ...] | None = None
    """By layer, the projections with a bias; None: not known."""

    is_tied: bool = False
    """True if the output projection is the token embeddings."""

    no_parameters: tuple[str, ...] = ()
    """Ends of parameters' names that an adapter may have of a similar model's, and that match nothing."""

    numbers: Renumbers | None = None
    """How a model numbers its layers where several stand under one number, or has a part of the last one behind all;
    None: each layer has its number, and all of its parts.
    """

    head_part: str = ""
    """The name of the part that has the output projection in a model whose class has none itself (Llama 4)."""

    is_tie_known: bool = True
    """False for an adapter of such a model. PEFT asks the whole model, which does not say that the two are tied: the
    projection has nothing of what PEFT trains of the embeddings.
    """

    units: tuple[tuple[str, UnitRows], ...] = ()
    """Own paths of projections of `fused` whose rows the base model has by unit, and where these are in its matrix."""

    tower: TowerShapes | None = field(default=None, compare=False, repr=False)
    """The vision tower, where images are served; None: adapters' tensors there have no effect."""

    base_rows: BaseRows | None = field(default=None, compare=False, repr=False)
    """The base model's own rows, with which adapters' copies are compared; None: they are not at hand."""

    base_tokens: BaseTokens | None = field(default=None, compare=False, repr=False)
    """The tokens of the base model's tokenizer; None: they are not known."""

    def name_in(self, layer: int, path: str) -> str:
        """The name of a module of a layer, among those around its layers."""
        name = f"{self.layers}.{layer}.{path}"
        return name if self.numbers is None else self.numbers.given(name)

    def has_bias(self, layer: int, module: str) -> bool:
        """True if a projection may have a bias."""
        return self.biased is None or module in self.biased[layer]

    def is_shared(self, layer: int, module: str) -> bool:
        """True if a projection is of a block that several layers share."""
        return layer < len(self.shared) and module in self.shared[layer]

    @property
    def ties_trained(self) -> bool:
        """True if PEFT trains the output projection with the embeddings."""
        return self.is_tied and self.is_tie_known

    @cached_property
    def by_path(self) -> dict[str, tuple[str, ...]]:
        """Each path that PEFT may target, and the projections that it is, in the table's order: several parts, or
        several forms, of which a layer has one.
        """
        renamed, fused = dict(self.renamed), {part: path for path, parts in self.fused for part, _ in parts}
        found: dict[str, tuple[str, ...]] = {}
        for projection in self.projections:
            if projection.is_rows or projection.experts or projection.name in self.absent:
                continue
            name = projection.name
            path = fused.get(name) or renamed.get(name) or projection.path
            path = f"model.{self.embeddings}" if projection.product == Role.EMBEDDING else path
            found[path] = (*found.get(path, ()), name)
        return found

    def in_layer(self, layer: int) -> dict[str, tuple[str, ...]]:
        """`by_path` of the projections that a layer has, and of experts' those that an adapter has: each one's, or all
        of a projection by the adapter's own path and then by other paths that its configuration may have.
        """
        names = {projection.name for projection in self.projections.layers[layer]}
        own, place = ((path, self._in(names, path)) for path in self.by_path), self._place(layer)
        found = {path.replace("{}", place): parts for path, parts in own if parts}
        if self.experts is ExpertForm.EACH:
            found |= {
                path: (own.name,)
                for path, own in self.each_expert.items()
                if self.projections.name_of_all(own.name) in names
            }
        elif self.experts is ExpertForm.TOGETHER:
            found |= {path: parts for path, (name, parts) in self._together_parts.items() if name in names}
        own_slices = ((path, self.slices[path].projection) for path in sorted(self.given_slices))
        return found | {path: (name,) for path, name in own_slices if name in names}

    def _place(self, layer: int) -> str:
        """The number of `places`; nothing where the layer has none."""
        return str(self.places[layer]) if layer < len(self.places) and self.places[layer] is not None else ""

    @cached_property
    def _numbered(self) -> re.Pattern[str] | None:
        """A pattern of paths that have a number of `places`; None: no path has."""
        paths = [path.split("{}") for _, path in self.renamed if "{}" in path]
        either = "|".join(f"(?<={re.escape(begin)})([0-9]+)(?={re.escape(end)}$)" for begin, end in paths)
        return re.compile(either) if paths else None

    def without_number(self, layer: int, path: str) -> str | None:
        """A path in a layer, with `{}` for a number of `places`; None for a module that the layer never calls."""
        if self._numbered is None or (found := self._numbered.search(path)) is None:
            return path
        is_own = found[0] == self._place(layer)
        return f"{path[: found.start()]}{{}}{path[found.end() :]}" if is_own else None

    @cached_property
    def slices(self) -> dict[str, Slice]:
        """The slices of projections, by path, in which an adapter may have them."""
        return slices_of(self.projections, dict(self.renamed))

    def _in(self, names: set[str], path: str) -> tuple[str, ...]:
        """Of a path's projections those that are among `names`; of parts all or none."""
        parts = self.by_path[path]
        if path in dict(self.fused):
            return parts if names.issuperset(parts) else ()
        return tuple(filter(names.__contains__, parts))

    @cached_property
    def _together_parts(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """By the paths of `together` that an adapter or its configuration may have: a projection, and each expert's."""
        own = {self.together[path].name for path in self.given_together}
        others = (path for path, each in self.together.items() if each.name in own)
        return {
            path: (each.name, tuple(each.of_expert(number).name for number in range(each.experts)))
            for path in dict.fromkeys((*self.given_together, *others))
            for each in (self.together[path],)
        }

    @cached_property
    def together(self) -> dict[str, Projection]:
        """The projections of experts by the paths at which an adapter may have tensors of all of them."""
        experts = [each for each in self.projections if each.experts]
        around = [each.path for each in experts]
        around += [path.replace(".{}.", ".") for _, path in self.expert_names]
        around += [path for path, _ in self.stacked_experts]
        found = {}
        for module, each in product(dict.fromkeys(path.rpartition(".")[0] for path in around), experts):
            name = each.name.rpartition(".")[2]
            found |= {f"{module}.{last}": each for last in (name, self._letters[name])}
        return found

    @property
    def _letters(self) -> dict[str, str]:
        """Tinker's names of projections of experts; without gates the first is that of up."""
        has_gates = any(each.experts and each.name.endswith(".gate_proj") for each in self.projections)
        return _LETTERS if has_gates else _LETTERS | {"up_proj": _LETTERS["gate_proj"]}

    @cached_property
    def empty(self) -> frozenset[str]:
        """Paths of projections that experts do not have, where Tinker writes tensors without values."""
        around = {path.rpartition(".")[0] for path in self.together}
        found = {f"{module}.{last}" for module in around for last in (*_LETTERS, *_LETTERS.values())}
        return frozenset(found - self.together.keys())

    @cached_property
    def each_expert(self) -> dict[str, Projection]:
        """The projections of each expert by their paths, under the names that `expert_names` has."""
        named = dict(self.expert_names)
        return {
            named[each.name].format(number) if each.name in named else own.path: own
            for each in self.projections
            for number in range(each.experts)
            for own in (each.of_expert(number),)
        }

    @cached_property
    def stacked_modules(self) -> dict[str, tuple[tuple[Projection, ...], ...]]:
        """The modules with parameters of `stacked_experts`, and the projections of each of their parameters."""
        found: dict[str, list[tuple[Projection, ...]]] = defaultdict(list)
        for path, names in self.stacked_experts:
            found[path.rpartition(".")[0]].append(tuple(map(self.projections.__getitem__, names)))
        return {module: tuple(parts) for module, parts in found.items()}

    @property
    def usual_names(self) -> dict[str, str]:
        """Last parts of names of embeddings and heads, and the usual ones; also Tinker's of a head. Of a vision tower's
        modules `IN_TOWER`.
        """
        heads = (head.rpartition(".")[2] for head in self.heads)
        tower = dict.fromkeys(() if self.tower is None else self.tower.copied, IN_TOWER)
        own = {"unembed_tokens": "lm_head", self.embeddings: "embed_tokens", **dict.fromkeys(heads, "lm_head")}
        return own | tower

    @property
    def num_matrices(self) -> int:
        """All that an adapter may have A and B of, in all layers."""
        return sum(max(1, each.experts) for layer in self.projections.layers for each in layer)

    def further_rows(self, module: str) -> int:
        """`further_logits` or `further_embeddings`. module: `lm_head` or `embed_tokens`."""
        return self.further_logits if module == "lm_head" else self.further_embeddings

    def as_given(self, paths: Collection[str], stems: Collection[str]) -> ModulePaths:
        """Where an adapter has these projections whose tensors are at `paths` in a layer. stems: names of what is
        around its layers.

        It may have been trained with one matrix for several of them where this model has one for each, or the other way
        round.
        """
        parts = {self.projections[name].path for _, stacked in self.fused for name, _ in stacked}
        usual = _STACKED.keys() - {path for path, _ in self.fused}
        is_tie_known = not self.head_part or not any(each.startswith(f"{self.head_part}.") for each in stems)
        is_usual = (usual | parts | self.slices.keys()).isdisjoint(paths) and not self.projections.mixture
        if is_usual and is_tie_known:
            return self
        return _as_given(self, frozenset(paths), is_tie_known, self.base_rows, self.base_tokens, self.tower)

    def with_sides(self, *, are_swapped: bool) -> ModulePaths:
        """Where an adapter has these projections whose A and B of stacked experts are so."""
        return _with_sides(self, are_swapped, self.base_rows, self.base_tokens, self.tower)

    @cached_property
    def usual(self) -> dict[str, str]:
        """Paths of single projections that are not their own, and their own."""
        own = self.projections
        found = {path: own[module].path for module, path in (*self.renamed, *self.further)}
        return found | {path: each.path for path, each in self.each_expert.items() if path != each.path}

    @cached_property
    def stacked(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """Paths of several projections: each one's own path, and how many rows it has."""
        own = self.projections
        return {path: tuple((own[module].path, rows) for module, rows in parts) for path, parts in self.fused}

    @cached_property
    def matrices(self) -> dict[str, tuple[str, int]]:
        """By projection that is in a matrix of several, the name and the rows of that."""
        own = ((path.rpartition(".")[2], parts) for path, parts in self.fused)
        return {part: (name, sum(rows for _, rows in parts)) for name, parts in own for part, _ in parts}

    @cached_property
    def names(self) -> str:
        """Names for PEFT's `target_modules`."""
        last = (path if "{}" in path else path.rpartition(".")[2] for path in self.by_path)
        return ", ".join(dict.fromkeys(last))


@lru_cache(64)
def _as_given(
    modules: ModulePaths,
    paths: frozenset[str],
    is_tie_known: bool,
    base_rows: BaseRows | None,
    base_tokens: BaseTokens | None,
    tower: TowerShapes | None,
) -> ModulePaths:
    """See `ModulePaths.as_given`. base_rows, base_tokens, tower: those of `modules`; equal modules may be of several
    models.
    """
    own = modules.projections
    sliced = {modules.slices[path].projection for path in modules.slices.keys() & paths}
    paths |= {own[name].path for name in sliced}
    fused = {
        path: parts
        for path, parts in modules.fused
        if path in paths or paths.isdisjoint(own[name].path for name, _ in parts)
    }
    for path, names in _STACKED.items():
        if path in paths and path not in fused and all(name in own for name in names):
            fused[path] = tuple((name, own[name].outputs) for name in names)
    places = [*modules.renamed, *((name, own[name].path) for name in modules.absent)]
    places = [(name, path) for name, path in places if name in modules.absent] + [*modules.further]
    given = dict(reversed([(name, path) for name, path in places if path in paths]))
    renamed = {**dict(modules.renamed), **given}
    return replace(
        modules,
        fused=tuple(fused.items()),
        renamed=tuple((name, path) for name, path in renamed.items() if path != own[name].path),
        absent=modules.absent.difference(given),
        is_tie_known=is_tie_known,
        given_slices=frozenset(path for path, each in modules.slices.items() if each.projection in sliced),
        base_rows=base_rows,
        base_tokens=base_tokens,
        tower=tower,
        **_experts_as_given(modules, paths),
    )


@lru_cache(64)
def _with_sides(
    modules: ModulePaths,
    are_swapped: bool,
    base_rows: BaseRows | None,
    base_tokens: BaseTokens | None,
    tower: TowerShapes | None,
) -> ModulePaths:
    """See `ModulePaths.with_sides`, and `_as_given` for the last three."""
    return replace(modules, are_swapped=are_swapped, base_rows=base_rows, base_tokens=base_tokens, tower=tower)


def _experts_as_given(modules: ModulePaths, paths: frozenset[str]) -> dict[str, Any]:
    """The fields that say how an adapter has experts."""
    named = not paths.isdisjoint(path for path, own in modules.each_expert.items() if path != own.path)
    if named or not paths.isdisjoint(own.path for own in modules.each_expert.values()):
        return {"experts": ExpertForm.EACH, "expert_names": modules.expert_names if named else ()}
    if given := tuple(path for path in modules.together if path in paths):
        return {"experts": ExpertForm.TOGETHER, "given_together": given}
    if not modules.stacked_modules.keys().isdisjoint(map(without_nesting, paths)):
        return {"experts": ExpertForm.STACKED}
    return {}


def without_nesting(path: str) -> str:
    """The path of a module that PEFT nests once for each of its parameters but the last."""
    while path.endswith(_NESTED):
        path = path.removesuffix(_NESTED)
    return path
