"""The formats of quantised weights by `quantization_config.quant_method`."""

from __future__ import annotations

from collections.abc import Callable

from ..config_json import ConfigJson
from .awq import Awq
from .bitsandbytes import BitsAndBytes
from .compressed_tensors import CompressedTensors
from .format import WeightFormat
from .fp8 import Fp8
from .gptq import Gptq

FORMATS: dict[str, Callable[[ConfigJson], WeightFormat]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fp8": Fp8,
    "gptq": Gptq,
}


def read_format(config: ConfigJson) -> WeightFormat | None:
    """Return the format that `quantization_config`, or the older `compression_config`, describes; None where there is
    none.
    """
    fields = config.object("quantization_config") or config.object("compression_config")
    if fields is None:
        return None
    older = "bitsandbytes" if fields.raw.get("load_in_4bit") or fields.raw.get("load_in_8bit") else ""
    make = FORMATS.get(fields.text("quant_method", older))
    if make is None:
        why = f"not supported; supported: {', '.join(FORMATS)}; or use the original checkpoint"
        raise fields.refuse("quant_method", why)
    return make(fields)
