"""LoRA as PEFT saves it: `adapter_config.json` and `adapter_model.safetensors`.

Tests: tests/memory/files/test_adapter_format.py
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .config import CONFIG_FILE, AdapterConfig
from .directory import AdapterDirectory
from .module_paths import ModulePaths
from .tensor_file import TensorFile
from .tensor_info import TensorInfo

WEIGHTS_FILE = "adapter_model.safetensors"


class PeftForm:
    """See the module. fields: of the configuration."""

    weights_file = WEIGHTS_FILE
    kind = "a safetensors file"
    title = "PEFT's LoRA"
    is_plain = True

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def peft_name(self, name: str) -> str:
        return name

    def entries(self, file: TensorFile) -> dict[str, TensorInfo]:
        return file.entries()

    def listed(self, file: TensorFile, modules: ModulePaths) -> dict[str, TensorInfo]:
        return file.listed()

    def config(self, directory: AdapterDirectory, given: Collection[str], base: ModulePaths) -> AdapterConfig:
        return AdapterConfig.of(directory.path / CONFIG_FILE, self._fields, base.usual_names, base.model_type)
