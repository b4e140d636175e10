"""Tensors of an adapter with one value for each output of a module: DoRA's magnitudes, trained biases, biases of B, and
scales.

Tests: tests/memory/files/test_vectors.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ..pages.adapter_layout import VectorTarget
from ..pages.projections import Projection, Projections
from .config import CONFIG_FILE, AdapterConfig
from .error import AdapterFormatError, shown
from .module_paths import ModulePaths
from .tensor_file import TensorFile
from .unserved import MERGE, mend_of

#: Ends of the names, and the field of `VectorTarget` that says whether there is one.
MAGNITUDE, BIAS, LORA_BIAS = "lora_magnitude_vector", "bias", "lora_B.bias"
OUTPUT_SCALE, INPUT_SCALE = "output_scale", "input_scale"

#: Other ends that PEFT writes, and the usual ones.
ENDS = {f"{MAGNITUDE}.weight": MAGNITUDE, f"base_layer.{BIAS}": BIAS}

#: Regular expression of all ends.
PATTERN = r"lora_magnitude_vector(?:\.weight)?|lora_B\.bias|(?:base_layer\.)?bias|output_scale|input_scale"

_OTHER_BIAS = (
    "is a bias of something other than a projection, which is not supported; train with bias='lora_only' or 'none'"
)

_OTHER_SCALE = f"scales outputs of something other than a projection of a layer; {MERGE}"

NO_INPUT_SCALE = (
    "scales inputs, which is served of down_proj in a gated feed-forward part alone, and where up_proj is a matrix of "
    f"its own; {MERGE}"
)

#: Module of a layer → rank and scale of LoRA.
Targets = Mapping[tuple[int, str], tuple[int, float]]


def vector_targets(
    file: TensorFile, keys: Mapping[tuple[int, str], str], config: AdapterConfig, targets: Targets, modules: ModulePaths
) -> tuple[VectorTarget, ...]:
    """The modules with vectors, in the order of layers and projections.

    keys: of every module of a layer, the beginning of its tensors' names. Raises AdapterFormatError if a vector is
    missing, has another shape than the module has outputs, or has no place in the base model.
    """
    found = []
    for (layer, module), key in keys.items():
        is_target = (layer, module) in targets
        has_bias = config.bias != "none" and f"{key}.{BIAS}" in file.tensors
        is_of_mixture = modules.projections[module].is_of_mixture
        if has_bias and not is_of_mixture:
            _check_bias(
                f"{file.path}: tensor {key}.{BIAS} is a bias of {module} in layer {layer}", layer, module, modules
            )
        target = VectorTarget(
            layer,
            module,
            is_target and config.uses_dora,
            has_bias,
            is_target and config.lora_bias,
            is_target and f"{key}.{OUTPUT_SCALE}" in file.tensors,
            _scales_next(file, keys, targets, layer, modules.projections.scales(module)),
        )
        if any(target[2:]):
            if is_of_mixture:
                raise AdapterFormatError(
                    f"{file.path}: DoRA, a bias or a scale is on {module} of layer {layer}, a part of a mixture of "
                    "experts, where plain LoRA alone is served; train with use_dora=False, lora_bias=False and "
                    "bias='none'"
                )
            _check(file, vector_names(target, keys, modules.projections), target, modules.projections[module])
            found.append(target)
    return tuple(found)


def _check_bias(what: str, layer: int, module: str, modules: ModulePaths) -> None:
    if not modules.has_bias(layer, module):
        raise AdapterFormatError(
            f"{what}, which the base model has not; serve it with the base model that it was trained on"
        )
    if modules.is_shared(layer, module):
        raise AdapterFormatError(
            f"{what}, whose block other layers share: training it changed theirs, too, which is not supported; train "
            "with bias='none'"
        )


def _scales_next(
    file: TensorFile, keys: Mapping[tuple[int, str], str], targets: Targets, layer: int, reader: str | None
) -> bool:
    """True if there are scales of the inputs of a module's reader."""
    if reader is None or (layer, reader) not in targets:
        return False
    return f"{keys[layer, reader]}.{INPUT_SCALE}" in file.tensors


def vector_names(target: VectorTarget, keys: Mapping[tuple[int, str], str], projections: Projections) -> Iterator[str]:
    """Names of a module's vectors. keys: beginnings of the names of modules' tensors."""
    key = keys[target.layer, target.module]
    ends = (
        (MAGNITUDE, target.has_magnitude),
        (BIAS, target.has_bias),
        (LORA_BIAS, target.has_lora_bias),
        (OUTPUT_SCALE, target.has_scale),
    )
    yield from (f"{key}.{end}" for end, is_there in ends if is_there)
    reader = projections.scales(target.module)
    if target.has_scale_of_next and reader is not None:
        yield f"{keys[target.layer, reader]}.{INPUT_SCALE}"


def _check(file: TensorFile, names: Iterator[str], target: VectorTarget, projection: Projection) -> None:
    for name in names:
        info = file.tensors.get(name)
        if info is None:
            field = "lora_bias" if name.endswith(LORA_BIAS) else "use_dora"
            raise AdapterFormatError(
                f"{file.path}: tensor {name} is missing, but {CONFIG_FILE} has {field} and targets {target.module} of "
                f"layer {target.layer}; save the adapter again"
            )
        if info.shape != (projection.outputs,):
            raise AdapterFormatError(
                f"{file.path}: tensor {file.given_name(name)} has shape {shown(list(info.shape))}, "
                f"{[projection.outputs]} is needed; {mend_of(info.shape)}"
            )


def why_no_vector(name: str, config: AdapterConfig, modules: Collection[str]) -> str | None:
    """Return why a tensor named like a vector is not one of the adapter's; None for other names.

    modules: beginnings of the names of the base model's modules.
    """
    if name.endswith((f".{OUTPUT_SCALE}", f".{INPUT_SCALE}")):
        return _why_no_scale(name, modules)
    ends = {MAGNITUDE: ("use_dora", False), LORA_BIAS: ("lora_bias", False), BIAS: ("bias", "none")}
    end = next((end for end in (MAGNITUDE, LORA_BIAS, BIAS) if name.endswith(f".{end}")), None)
    if end is None:
        return _why_no_other_bias(name)
    field, without = ends[end]
    value = {"use_dora": config.uses_dora, "lora_bias": config.lora_bias, "bias": config.bias}[field]
    if value == without:
        return f"is unexpected: {CONFIG_FILE} has {field} {shown(without)}, so PEFT would not apply it; mend either"
    if name.removesuffix(f".{end}") in modules:
        return f"is not targeted by {CONFIG_FILE} (target_modules, exclude_modules, layers_to_transform); mend either"
    return _OTHER_BIAS if end == BIAS else None


def _why_no_scale(name: str, modules: Collection[str]) -> str:
    """The same of a scale."""
    if name.endswith(f".{OUTPUT_SCALE}"):
        is_there = name.removesuffix(f".{OUTPUT_SCALE}") in modules
        return "is not targeted by adapter_config.json; mend either" if is_there else _OTHER_SCALE
    return NO_INPUT_SCALE


def _why_no_other_bias(name: str) -> str | None:
    """The same of a parameter or buffer whose own name ends so."""
    if name.endswith("_correction_bias"):
        return (
            "is a router's correction, which older versions of PEFT save with bias='all', though it is not trained; "
            "load and save the adapter with a current PEFT, which leaves it out"
        )
    return _OTHER_BIAS if name.endswith(f"_{BIAS}") else None
