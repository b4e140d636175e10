"""Checkpoints of NVIDIA's ModelOpt: NVFP4 and FP8."""

from __future__ import annotations

from ...config_json import ConfigJson
from .format import UniformFormat, WeightScheme
from .fp4 import Fp4
from .fp8 import Fp8Scheme
from .read_fields import check_known, read_modules
from .rounded_inputs import Float8Inputs

_FIELDS = {"quant_method", "quant_algo", "group_size", "exclude_modules", "ignore", "quantization"}

#: The KV cache is not quantised, and the rest says how the checkpoint was made.
_NO_EFFECT = {"config_groups", "kv_cache_quant_algo", "kv_cache_scheme", "producer", "version"}

_GROUP = 16
_SCHEMES: dict[str, WeightScheme] = {
    "FP8": Fp8Scheme(inputs=Float8Inputs()),
    "NVFP4": Fp4("NVFP4", _GROUP, packed="weight", factor="weight_scale_2"),
}


class ModelOpt(UniformFormat):
    """`quant_method: modelopt`, or `hf_quant_config.json`, whose fields are in an object `quantization`."""

    def __init__(self, fields: ConfigJson) -> None:
        check_known(fields, _FIELDS, _NO_EFFECT)
        inner = fields.object("quantization") or fields
        check_known(inner, _FIELDS, _NO_EFFECT)
        scheme = _SCHEMES.get(inner.text("quant_algo"))
        if scheme is None:
            raise inner.refuse("quant_algo", f"not supported; supported: {', '.join(_SCHEMES)}")
        if isinstance(scheme, Fp4) and inner.integer("group_size", _GROUP) != _GROUP:
            raise inner.refuse("group_size", f"not supported with NVFP4; supported: {_GROUP}")
        super().__init__(scheme, read_modules(inner, "exclude_modules", "ignore"))
        self.title = f"ModelOpt {scheme.title}"
