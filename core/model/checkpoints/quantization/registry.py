"""The formats of quantised weights by `quantization_config.quant_method`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...config_json import ConfigJson
from .awq import Awq
from .bitsandbytes import BitsAndBytes
from .compressed_tensors import CompressedTensors
from .fbgemm_fp8 import FbgemmFp8
from .format import WeightFormat
from .fp8 import Fp8
from .gptq import Gptq
from .modelopt import ModelOpt
from .mxfp4 import Mxfp4

FORMATS: dict[str, Callable[[ConfigJson], WeightFormat]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": FbgemmFp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "modelopt": ModelOpt,
    "modelopt_fp4": ModelOpt,
    "mxfp4": Mxfp4,
}

#: Formats that are refused, each with the reason that the error names.
UNSERVED = {
    "bitnet": "it rounds what goes into products to 8 bits, and weights to -1, 0 and 1",
}

#: Files that describe the weights where config.json does not, as older tools and ModelOpt write them.
FILES = ("hf_quant_config.json", "quant_config.json", "quantize_config.json")


def read_format(config: ConfigJson) -> WeightFormat | None:
    """Return the format that `quantization_config`, the older `compression_config`, or a file next to config.json
    describes; None where there is none.
    """
    fields = config.object("quantization_config") or config.object("compression_config")
    fields = fields or _read_beside(config.path.parent)
    if fields is None:
        return None
    make = FORMATS.get(method := fields.text("quant_method", _older_method(fields)))
    if make is None:
        why = UNSERVED.get(method, "not supported")
        why = f"{why}; supported: {', '.join(FORMATS)}; or use the original checkpoint"
        raise fields.refuse("quant_method", why)
    return make(fields)


def _read_beside(directory: Path) -> ConfigJson | None:
    return next((ConfigJson.read(directory / name) for name in FILES if (directory / name).is_file()), None)


def _older_method(fields: ConfigJson) -> str:
    """The method of a description that does not name it."""
    if fields.boolean("load_in_4bit") or fields.boolean("load_in_8bit"):
        return "bitsandbytes"
    if fields.path.name not in FILES:
        return ""
    if "quantization" in fields.raw:
        return "modelopt"
    return "awq" if "zero_point" in fields.raw else "gptq"
