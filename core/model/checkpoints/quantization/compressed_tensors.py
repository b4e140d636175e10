"""Checkpoints of the library compressed-tensors, as LLM Compressor writes them: groups of modules, each a scheme."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ...config_json import ConfigJson
from .format import SchemedFormat, WeightScheme
from .fp4 import Fp4
from .fp8 import Fp8Scheme
from .module_list import ModuleList
from .read_fields import check_known, read_modules
from .rounded_inputs import LARGEST, MULTIPLE, Float8Inputs, RoundedInputs
from .scaled_integers import ScaledIntegers

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

#: The class of all projections of the families that are served.
_CLASS = "Linear"

_FIELDS = {
    "quant_method",
    "config_groups",
    "format",
    "ignore",
    "sparsity_config",
    "transform_config",
}

#: The KV cache is quantised by a setting, and the rest tells how the checkpoint was made and may be loaded.
_NO_EFFECT = {
    "dequantize",
    "global_compression_ratio",
    "kv_cache_scheme",
    "moe_sparsity_config",
    "quantization_status",
    "run_compressed",
    "use_optimized_inference",
    "version",
}

_GROUP = {"targets", "weights", "format", "input_activations"}
_GROUP_NO_EFFECT = {"output_activations"}

#: Of weights, and of activations.
_WEIGHTS = {
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "group_size",
    "block_structure",
    "actorder",
    "dynamic",
}
_WEIGHTS_NO_EFFECT = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}

_PACKED_BITS = (2, 4, 8)

#: Tensors of activations and of the KV cache.
_LEFT_OUT = (".input_zero_point", ".output_zero_point", ".input_global_scale", ".k_zero_point", ".v_zero_point")


class _Group(NamedTuple):
    """Modules, and how their weights are stored. scheme: None: they are plain."""

    names: ModuleList
    has_class: bool
    scheme: WeightScheme | None


class CompressedTensors(SchemedFormat):
    """`quant_method: compressed-tensors`."""

    def __init__(self, fields: ConfigJson) -> None:
        check_known(fields, _FIELDS, _NO_EFFECT)
        sparsity = fields.object("sparsity_config")
        if sparsity is not None and sparsity.text("format", "dense") != "dense":
            raise sparsity.refuse("format", "sparse weights are not supported; supported: dense")
        transforms = fields.object("transform_config")
        if transforms is not None and transforms.object("config_groups") is not None:
            raise transforms.refuse("config_groups", "transforms of activations are not supported; supported: none")
        groups = fields.object("config_groups")
        if groups is None:
            raise fields.refuse("config_groups", "an object of groups of modules is needed")
        self.plain = read_modules(fields, "ignore")
        self._groups = [_group(groups, name, fields) for name in groups.raw]
        self.title = "; ".join(dict.fromkeys(each.scheme.title for each in self._groups if each.scheme is not None))

    def left_out(self, checkpoint: Checkpoint, name: str) -> bool:
        if name.endswith(".weight_zero_point"):  # of symmetric weights, as early versions stored them
            return not bool(checkpoint.read(name).float().any())
        return super().left_out(checkpoint, name) or name.endswith(_LEFT_OUT)

    def scheme_of(self, name: str) -> WeightScheme | None:
        """The scheme of the first group that names a module; else of the first that has its class."""
        module = name.removesuffix(".weight")
        by_name = next((each for each in self._groups if each.names.has(module)), None)
        group = by_name or next((each for each in self._groups if each.has_class), None)
        return None if group is None else group.scheme


def _group(groups: ConfigJson, name: str, top: ConfigJson) -> _Group:
    fields = groups.object(name)
    if fields is None:
        raise groups.refuse(name, "an object with targets and weights is needed")
    check_known(fields, _GROUP, _GROUP_NO_EFFECT)
    weights = fields.object("weights")
    scheme = None if weights is None else _scheme(weights, fields if fields.has("format") else top)
    inputs = _rounded_inputs(fields)
    if isinstance(inputs, RoundedInputs) and isinstance(scheme, ScaledIntegers):
        scheme = replace(scheme, inputs=inputs, title=f"{scheme.title}, activations of 8 bits")
    if isinstance(inputs, Float8Inputs) and isinstance(scheme, Fp8Scheme):
        scheme = scheme.with_inputs(inputs)
    return _Group(read_modules(fields, "targets"), _CLASS in fields.texts("targets"), scheme)


def _rounded_inputs(group: ConfigJson) -> RoundedInputs | Float8Inputs | None:
    """How the activations of a group are rounded: if that is to 8 bits, symmetric, with scales that steps compute; or
    to FP8, whose scales steps always compute.

    Others are left as they are, which is more precise.
    """
    inputs = group.object("input_activations")
    if inputs is None:
        return None
    check_known(inputs, _WEIGHTS, _WEIGHTS_NO_EFFECT)
    dynamic, bits, kind = inputs.raw.get("dynamic", False), inputs.integer("num_bits", 8), inputs.text("type", "int")
    if dynamic not in (True, False, "local"):
        raise inputs.refuse("dynamic", "not supported; supported: true, false, local")
    if not inputs.boolean("symmetric", True) or bits != 8:
        return None
    if kind == "float":
        return Float8Inputs()
    if dynamic is not True or kind != "int":
        return None
    size = inputs.raw.get("group_size")
    strategy = inputs.text("strategy", "token" if size is None else "group")
    if strategy not in ("tensor", "token", "group"):
        raise inputs.refuse("strategy", "not supported for activations; supported: token, tensor, group")
    if strategy != "group":
        return RoundedInputs()
    size = inputs.integer("group_size")
    if size % MULTIPLE or size > LARGEST:
        allowed = f"multiples of {MULTIPLE} up to {LARGEST}"
        raise inputs.refuse("group_size", f"not supported for activations; supported: {allowed}")
    return RoundedInputs(size)


def _scheme(weights: ConfigJson, holder: ConfigJson) -> WeightScheme:
    """holder: has the field `format`."""
    check_known(weights, _WEIGHTS, _WEIGHTS_NO_EFFECT)
    if weights.raw.get("dynamic"):
        raise weights.refuse("dynamic", "weights have stored scales; supported: false")
    layout, kind = holder.text("format"), weights.text("type", "int")
    make = _SCHEMES.get((layout, kind))
    if make is None:
        known = ", ".join(sorted({each for each, _ in _SCHEMES}))
        raise holder.refuse("format", f"not supported with weights of type {kind!r}; supported: {known}")
    return make(weights, f"compressed-tensors {layout}")


def _integers(weights: ConfigJson, title: str, *, is_packed: bool) -> WeightScheme:
    bits, strategy, group = weights.integer("num_bits", 8), _strategy(weights), weights.raw.get("group_size")
    if bits not in _PACKED_BITS if is_packed else bits > 8:
        allowed = ", ".join(map(str, _PACKED_BITS)) if is_packed else "up to 8"
        raise weights.refuse("num_bits", f"not supported in this format; supported: {allowed}")
    if strategy not in ("tensor", "channel", "group"):
        raise weights.refuse("strategy", "not supported for integers; supported: tensor, channel, group")
    if strategy != "group" and group not in (None, -1):
        raise weights.refuse("group_size", f"the strategy {strategy} has no groups; set it to null")
    group = weights.integer("group_size") if strategy == "group" else None
    act_order = weights.raw.get("actorder")
    if act_order not in (None, False, "weight", "static", "group", "dynamic"):
        raise weights.refuse("actorder", "not supported; supported: null, weight, static, group")
    ordered = act_order in ("group", "dynamic")
    if ordered and group is None:
        raise weights.refuse("actorder", "it needs the strategy group")
    scales = f"groups of {group}" if group else f"a scale per {strategy}"
    return ScaledIntegers(
        f"{title}, {bits} bits, {scales}{', act order' if ordered else ''}",
        bits,
        strategy,
        group,
        is_packed=is_packed,
        has_zeros=not weights.boolean("symmetric", True),
        has_act_order=ordered,
    )


def _strategy(weights: ConfigJson) -> Any:
    """`strategy`, or its default."""
    if weights.has("strategy"):
        return weights.text("strategy")
    group = weights.raw.get("group_size")
    return "tensor" if group is None else "channel" if group == -1 else "group"


def _float8(weights: ConfigJson, _: str) -> WeightScheme:
    if weights.integer("num_bits", 8) != 8:
        raise weights.refuse("num_bits", "not supported in this format; supported: 8")
    _check_symmetric(weights)
    strategy = _strategy(weights)
    if strategy not in ("tensor", "channel", "block"):
        raise weights.refuse("strategy", "not supported for FP8; supported: tensor, channel, block")
    if strategy != "block":
        return Fp8Scheme()
    block = weights.numbers("block_structure")
    if len(block) != 2 or any(size < 1 or size != int(size) for size in block):
        raise weights.refuse("block_structure", "two whole numbers of at least 1 are needed, such as [128, 128]")
    return Fp8Scheme([int(size) for size in block])


def _nvfp4(weights: ConfigJson, title: str) -> WeightScheme:
    return _fp4(weights, Fp4(title, 16, divisor="weight_global_scale"))


def _mxfp4(weights: ConfigJson, title: str) -> WeightScheme:
    return _fp4(weights, Fp4(title, 32, is_exponent=True))


def _fp4(weights: ConfigJson, scheme: Fp4) -> WeightScheme:
    if weights.integer("num_bits", 4) != 4:
        raise weights.refuse("num_bits", "not supported in this format; supported: 4")
    _check_symmetric(weights)
    if weights.integer("group_size", scheme.group) != scheme.group:
        raise weights.refuse("group_size", f"not supported in this format; supported: {scheme.group}")
    return scheme


def _check_symmetric(weights: ConfigJson) -> None:
    if not weights.boolean("symmetric", True):
        raise weights.refuse("symmetric", "zero points of floating-point weights are not supported; supported: true")


def _packed(weights: ConfigJson, title: str) -> WeightScheme:
    return _integers(weights, title, is_packed=True)


def _plain(weights: ConfigJson, title: str) -> WeightScheme:
    return _integers(weights, title, is_packed=False)


#: `format` and the type of the weights → the function that makes their scheme.
_SCHEMES: dict[tuple[str, str], Callable[[ConfigJson, str], WeightScheme]] = {
    ("pack-quantized", "int"): _packed,
    ("int-quantized", "int"): _plain,
    ("naive-quantized", "int"): _plain,
    ("float-quantized", "float"): _float8,
    ("naive-quantized", "float"): _float8,
    ("nvfp4-pack-quantized", "float"): _nvfp4,
    ("mxfp4-pack-quantized", "float"): _mxfp4,
}
