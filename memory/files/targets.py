"""The projections that an adapter's configuration targets, with the rank and scale of each, and the parts they form.

Tests: tests/memory/files/test_adapter_format.py, tests/core/adapters/test_adapter_patterns.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import lru_cache

from ..pages.adapter_layout import AdapterPart
from ..pages.projections import Projections, Role
from .config import AdapterConfig
from .error import AdapterFormatError, shown
from .module_paths import ExpertForm, ModulePaths
from .names.module_names import ModuleNames
from .peft_names import HEAD, LAYER, UNEMBED
from .slices import SlicedTarget, SliceFactors, check_slices

Targets = dict[tuple[int, str], tuple[int, float]]
"""Rank and scale by layer and projection."""


def targets_of(
    config: AdapterConfig,
    stem: str,
    modules: ModulePaths,
    head_names: Collection[str],
    slices: Mapping[tuple[int, str], SlicedTarget],
    *,
    may_be_none: bool = False,
) -> tuple[Targets, SliceFactors]:
    """(layer, module) → rank and scale of all that the configuration targets; and the factors of slices.

    "all-linear" leaves the embeddings and the head out, as PEFT does; not a head by Tinker's name, as Tinker does.
    head_names, slices: see `AdapterWeights`. may_be_none: the adapter changes a vision tower alone.
    """
    file = config.file
    found = _found(config, stem, modules, head_names)
    targets, named = {}, defaultdict(dict)
    for name, (layer, parts, rank_and_scale) in found.items():
        for module in parts:  # of several paths to a projection the first is the adapter's own
            targets.setdefault((layer, module), rank_and_scale)
        if modules.given_slices and (path := name.partition(modules.name_in(layer, ""))[2]) in modules.given_slices:
            named[layer, parts[0]][path] = rank_and_scale
    factors = check_slices(config, named, slices, targets)
    targets |= _parameter_targets(config, stem, modules, targets)
    if config.ties_weights and modules.ties_trained:
        targets |= _tied_targets(config, targets, modules)
    if not targets and not may_be_none:
        raise AdapterFormatError(
            f"{file}: target_modules, exclude_modules and layers_to_transform match none of {modules.names} "
            f"in the base model's {modules.projections.num_layers} layers{_elsewhere(config, stem, modules)}"
        )
    return targets, factors


def _found(
    config: AdapterConfig, stem: str, modules: ModulePaths, head_names: Collection[str]
) -> dict[str, tuple[int, tuple[str, ...], tuple[int, float]]]:
    """The modules that the configuration targets: layer, projections, rank and scale of each."""
    names, keys = _keys(stem, modules)
    of_model, inner_heads = _model_keys(stem, modules), set(_inner_heads(f"{stem}.")).difference(modules.heads)
    found = {}
    for name, rank_and_scale in config.targets(names).items():
        if name in keys:
            layer, parts = keys[name]
            is_linear = modules.projections[parts[0]].product == Role.PER_LAYER
            is_other = name == UNEMBED or name in inner_heads
            if name not in of_model or is_linear or not _is_passed_over(is_other, head_names, config):
                found[name] = layer, parts, rank_and_scale
        elif not config.targets_all_linear:
            raise AdapterFormatError(
                f"{config.file}: target_modules matches {name}; only {modules.names} are served: "
                "train on these, or exclude the others with exclude_modules"
            )
    return found


@lru_cache(16)
def _keys(stem: str, modules: ModulePaths) -> tuple[ModuleNames, dict[str, tuple[int, tuple[str, ...]]]]:
    """All modules that a pattern may match, and the layer and projections of those that can be targeted here.

    The rest are most of the modules that can't be targeted, by PEFT neither.
    """
    level = f"{stem}." if stem else ""
    keys, inner = {}, []
    for layer in range(modules.projections.num_layers):
        own = modules.in_layer(layer)
        keys |= {f"{level}{modules.name_in(layer, path)}": (layer, parts) for path, parts in own.items()}
        parents = sorted({path.rpartition(".")[0] for path in own})
        names = ["", "mlp.act_fn", "input_layernorm", "post_attention_layernorm", *parents]
        inner += [f"{level}{modules.name_in(layer, name)}".rstrip(".") for name in names]
    keys |= _model_keys(stem, modules)
    others = [f"{level}{name}" for name in (modules.embeddings, modules.layers, "norm", "rotary_emb")]
    others += [*modules.heads, stem] if stem else []  # without a module around the layers there is no head
    return ModuleNames([*dict.fromkeys((*keys, *others, *inner))]), keys


def _model_keys(stem: str, modules: ModulePaths) -> dict[str, tuple[int, tuple[str, ...]]]:
    """As those of `_keys`, of the model's own modules."""
    keys, projections, level = {}, modules.projections, f"{stem}." if stem else ""
    for projection in projections.model:
        if projection.is_rows:
            continue
        found = projections.layers_of(projection.name)[0], (projection.name,)
        if projection.product == Role.EMBEDDING:
            keys[f"{level}{modules.embeddings}"] = found
        elif projection.product == Role.PER_LAYER:
            keys[f"{level}{projection.name}"] = found
        elif stem:
            keys |= dict.fromkeys((*modules.heads, UNEMBED, *_inner_heads(level)), found)
    return keys


def _inner_heads(level: str) -> tuple[str, str]:
    """Names of a head that trainers have among the modules of the model's parent."""
    return f"{level}{UNEMBED}", f"{level}{HEAD}"


def _parameter_targets(
    config: AdapterConfig, stem: str, modules: ModulePaths, targets: Collection[tuple[int, str]]
) -> Targets:
    """The targets that the configuration names as parameters. targets: those that it names as modules."""
    if not config.parameters:
        return {}
    names, keys = _parameter_keys(stem, modules)
    _check_parameters(config, names, keys, modules)
    found = {}
    for name, rank_and_scale in config.parameter_targets(names).items():
        layer, parts = keys[name]
        for module in parts:
            if (layer, module) in targets:
                raise AdapterFormatError(
                    f"{config.file}: target_parameters matches {name}, and target_modules its module; "
                    "PEFT takes one of them"
                )
            found[layer, module] = rank_and_scale
    return found


def _check_parameters(config: AdapterConfig, names: ModuleNames, keys: Collection[str], modules: ModulePaths) -> None:
    """Raise AdapterFormatError for parameters that are not served, or that the file has no tensors of. A tower has
    others, which are checked with it.
    """
    tower = modules.tower
    of_tower = [] if tower is None else [f".model.{name}" for name in tower.matrices.values()]
    without = {f".{key.rsplit('.', 2)[0]}.weight" for key in keys}  # modules of modules have no weight of their own
    for each in set(config.parameters).difference(modules.no_parameters):
        is_of_none = any(name.endswith(f".{each}") for name in without)  # PEFT, too, passes these over
        is_of_tower = any(name.endswith(f".{each}") for name in of_tower)
        if not is_of_none and not is_of_tower and not names.with_tail(each):
            served = ", ".join(dict.fromkeys(LAYER.split(key)[-1] for key in keys))
            raise AdapterFormatError(
                f"{config.file}: target_parameters has {shown(each)}, which is none of the parameters that are served "
                f"and that the file has tensors of: {served}; train on these"
            )


@lru_cache(16)
def _parameter_keys(stem: str, modules: ModulePaths) -> tuple[ModuleNames, dict[str, tuple[int, tuple[str, ...]]]]:
    """As `_keys`, of the parameters that PEFT may target as matrices."""
    _, keys = _keys(stem, modules)
    model = set(_model_keys(stem, modules))
    found = {f"{key}.weight": its for key, its in keys.items() if key not in model}
    if modules.experts is ExpertForm.STACKED:
        level = f"{stem}." if stem else ""
        for path, parts in modules.stacked_experts:
            layers = modules.projections.layers_of(parts[0])
            found |= {f"{level}{modules.name_in(layer, path)}": (layer, parts) for layer in layers}
    return ModuleNames([*found]), found


def _is_passed_over(is_other: bool, head_names: Collection[str], config: AdapterConfig) -> bool:
    """True for a module of the model that a configuration matches and does not mean: a head's other name where the
    file has no head, and what "all-linear" leaves out. is_other: it is such a name.
    """
    if is_other:
        return UNEMBED not in head_names if config.targets_all_linear else not head_names
    return config.targets_all_linear


def _tied_targets(config: AdapterConfig, targets: Targets, modules: ModulePaths) -> Targets:
    """The head, if the embeddings are targeted: PEFT saves it as a target of its own, with the embeddings' A and B and
    so their rank, but with the scale that the patterns give its own name.
    """
    projections = modules.projections
    embedding, head = (projections.of_role(each) for each in (Role.EMBEDDING, Role.HEAD))
    if embedding is None or head is None:
        return {}
    found, name = targets.get((0, projections.name_of(embedding))), projections.name_of(head)
    if found is None:
        return {}
    return {(projections.layers_of(name)[0], name): (found[0], config.scale_of(modules.heads[0]))}


def _elsewhere(config: AdapterConfig, stem: str, modules: ModulePaths) -> str:
    """The targets that a configuration without any would have if every layer had every projection."""
    level, projections = f"{stem}." if stem else "", modules.projections
    parts_of = {
        f"{level}{modules.name_in(layer, path)}": (layer, parts[0])
        for layer in range(projections.num_layers)
        for path, parts in modules.by_path.items()
    }
    found = config.targets(ModuleNames([*parts_of]))
    if not found:
        return ""
    layer, name = parts_of[next(iter(found))]
    return f": {name} is not in layer {layer}, but in {layers_with(projections, name)}"


def layers_with(projections: Projections, name: str) -> str:
    """The layers that have a projection, as ranges."""
    runs: list[list[int]] = []
    for layer in projections.layers_of(name):
        if runs and runs[-1][-1] == layer - 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return f"layer{'s' if runs[1:] or runs[0][1:] else ''} {', '.join('-'.join(map(str, run)) for run in runs)}"


def parts_of(targets: Targets, projections: Projections) -> tuple[AdapterPart, ...]:
    """Group targets by rank, scale and set of layers, which thus have all of them; in the order of their first
    layers. Those of the model and of mixtures of experts are in parts of their own. Targets may have any order.
    """
    experts: dict[tuple[int, str, int, float], list[int]] = defaultdict(list)
    layers: dict[tuple[int, float, str, tuple[int, ...]], list[int]] = defaultdict(list)
    for (layer, module), (rank, scale) in targets.items():
        projection = projections[module]
        if projection.expert is None:
            layers[rank, scale, module, tuple(range(projection.experts))].append(layer)
        else:
            experts[layer, projections.name_of_all(module), rank, scale].append(projection.expert)
    for (layer, module, rank, scale), numbers in experts.items():
        layers[rank, scale, module, tuple(sorted(numbers))].append(layer)
    modules: dict[tuple[int, float, tuple[int, ...], tuple[int, ...], bool, bool], list[str]] = defaultdict(list)
    for (rank, scale, module, own), numbers in layers.items():
        its = projections[module]
        modules[rank, scale, tuple(sorted(numbers)), own, its.is_of_model, its.is_of_mixture].append(module)
    parts = (
        AdapterPart(rank, scale, numbers, tuple(sorted(names, key=projections.id)), experts=own)
        for (rank, scale, numbers, own, *_), names in modules.items()
    )
    return tuple(sorted(parts, key=lambda part: (part.layers, projections.id(part.targets[0]), part.experts)))
