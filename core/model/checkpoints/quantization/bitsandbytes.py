"""Checkpoints of bitsandbytes: `nf4` and `fp4` with a scale per block of a flattened weight, or int8 per channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...config_json import ConfigJson
from .bnb_4bit import Bnb4Bit
from .bnb_int8 import BnbInt8
from .format import Narrow, UniformFormat
from .read_fields import check_known, read_modules

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

_FIELDS = {"quant_method", "load_in_4bit", "load_in_8bit", "llm_int8_has_fp16_weight", "llm_int8_skip_modules"}

#: Fields that tensors repeat, and fields about how products are computed.
_NO_EFFECT = {
    "_load_in_4bit",
    "_load_in_8bit",
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_threshold",
}

_EXPERTS = ".experts."  # in the names of their weights


class BitsAndBytes(UniformFormat):
    """`quant_method: bitsandbytes`. Activations are not quantised, whatever `llm_int8_threshold` says.

    Experts are quantised where they are stored so: transformers has them as modules in older versions, and in newer
    ones as one parameter, which the library leaves as it is. The configuration does not tell.
    """

    def __init__(self, fields: ConfigJson) -> None:
        check_known(fields, _FIELDS, _NO_EFFECT)
        small, large = fields.boolean("load_in_4bit"), fields.boolean("load_in_8bit")
        if small == large:
            raise fields.refuse("load_in_4bit", f"load_in_8bit is {large}; exactly one of the two must be true")
        if fields.boolean("llm_int8_has_fp16_weight"):
            raise fields.refuse("llm_int8_has_fp16_weight", "not supported; supported: false")
        super().__init__(Bnb4Bit() if small else BnbInt8(), read_modules(fields, "llm_int8_skip_modules"))

    def covers(self, checkpoint: Checkpoint, name: str) -> bool:
        return self.stores(checkpoint, name) if _EXPERTS in name else super().covers(checkpoint, name)

    def narrow(self, name: str) -> Narrow | None:
        return None if _EXPERTS in name else super().narrow(name)
