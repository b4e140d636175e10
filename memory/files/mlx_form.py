"""Adapters of MLX: `adapter_config.json` and `adapters.safetensors`, as `mlx_lm.lora` writes them.

A and B are transposed, A `[in, rank]` and B `[rank, out]`, and the scale is a field of its own: MLX adds
`scale · (x A) B`. The last `num_layers` layers have adapters; names of modules are in the tensors' names only. A module
with DoRA also has magnitudes `m`, which mean what PEFT's do.

Tests: tests/memory/files/test_adapter_forms.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from .arrangement import Arrangement
from .config import CONFIG_FILE, AdapterConfig, read_fields
from .directory import AdapterDirectory
from .error import AdapterFormatError, shown
from .module_paths import ModulePaths
from .tensor_file import TensorFile
from .tensor_info import TensorInfo
from .vectors import MAGNITUDE

MLX_FILE = "adapters.safetensors"

_SIDE = re.compile(r"\.lora_([ab])$")
_MAGNITUDE = re.compile(r"\.m$")
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]{1,6})\.")
_ELSE = "or fuse it into its base with mlx_lm.fuse and serve the result"


class MlxForm:
    """See the module."""

    weights_file = MLX_FILE
    kind = "a safetensors file"
    title = "MLX"
    is_plain = False

    def peft_name(self, name: str) -> str:
        return _MAGNITUDE.sub(f".{MAGNITUDE}", _SIDE.sub(lambda found: f".lora_{found[1].upper()}.weight", name))

    def entries(self, file: TensorFile) -> dict[str, TensorInfo]:
        return file.entries()

    def listed(self, file: TensorFile, modules: ModulePaths) -> dict[str, TensorInfo]:
        return {name: _transposed(info) for name, info in file.listed().items()}

    def config(self, directory: AdapterDirectory, given: Collection[str], base: ModulePaths) -> AdapterConfig:
        file, raw = directory.path / CONFIG_FILE, read_fields(directory)

        def refuse(field: str, value: Any, why: str) -> AdapterFormatError:
            return AdapterFormatError(f"{file}: {field} is {shown(value)}: of an adapter of MLX ({MLX_FILE}) {why}")

        kind, parameters = raw.get("fine_tune_type", "lora"), raw.get("lora_parameters")
        if kind not in ("lora", "dora"):
            raise refuse("fine_tune_type", kind, f"only lora and dora are read; train with either, {_ELSE}")
        if not isinstance(parameters, dict):
            raise refuse("lora_parameters", parameters, f"an object with rank and scale is needed; {_ELSE}")
        rank, scale = parameters.get("rank"), parameters.get("scale")
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise refuse("lora_parameters.rank", rank, f"a rank from 1 is needed; {_ELSE}")
        if not isinstance(scale, (int, float)) or isinstance(scale, bool):
            raise refuse("lora_parameters.scale", scale, f"a number is needed: the factor of A·B; {_ELSE}")
        if "alpha" in parameters:
            raise refuse(
                "lora_parameters.alpha",
                parameters["alpha"],
                "only scale is read, by which later versions of mlx_lm multiply; remove alpha, and set scale to "
                f"scale · alpha / rank if it was trained with a version that used it, {_ELSE}",
            )
        _check_layers(refuse, raw, given, base.projections.num_layers)
        peft = {"r": rank, "lora_alpha": rank * scale, "target_modules": sorted(given), "use_dora": kind == "dora"}
        return AdapterConfig.of(file, {**peft, "base_model_name_or_path": raw.get("model")})


def _check_layers(refuse: Any, raw: dict[str, Any], given: Collection[str], num_layers: int) -> None:
    """MLX leaves out the tensors of layers before the last `num_layers`."""
    field = "num_layers" if "num_layers" in raw else "lora_layers"
    count = raw.get(field, -1)
    if type(count) is not int:
        raise refuse(field, count, "a number of layers is needed; -1 and 0 are all")
    first = num_layers - count if 0 < count <= num_layers else 0
    found = (int(match[1]) for name in given if (match := _LAYER.search(name)))
    if early := [layer for layer in found if layer < first]:
        raise refuse(
            field,
            count,
            f"only the last {count} of the base model's {num_layers} layers have adapters, but it has "
            f"tensors of layer {min(early)}; set it to the number that it was trained with, or serve the adapter "
            "with its own base",
        )


def _transposed(info: TensorInfo) -> TensorInfo:
    if len(info.shape) != 2:
        return info
    rows, columns = info.shape
    return replace(info, shape=(columns, rows), arrangement=Arrangement((rows, columns), is_transposed=True))
