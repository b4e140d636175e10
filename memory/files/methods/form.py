"""Adapters of PEFT's other methods: the files that LoRA has, with other tensors, of which A and B are computed.

Tests: tests/memory/files/methods/test_methods.py, tests/core/adapters/test_adapter_methods.py
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection

from ..config import CONFIG_FILE, AdapterConfig
from ..directory import AdapterDirectory
from ..error import AdapterFormatError, shown
from ..module_paths import ModulePaths
from ..peft_form import WEIGHTS_FILE
from ..tensor_file import TensorFile
from ..tensor_info import TensorInfo
from .method import Method, WrongParts

_LORA = re.compile(r"\.lora_[AB]\.")


class MethodForm:
    """See the module."""

    weights_file = WEIGHTS_FILE
    kind = "a safetensors file"
    is_plain = False

    def __init__(self, method: Method) -> None:
        self._method = method
        ends = "|".join(sorted(method.parts | method.shared))
        self._name = re.compile(rf"(.+)\.({ends})((?:\.[^.]+)?)")

    @property
    def title(self) -> str:
        return f"PEFT's {self._method.title}"

    def peft_name(self, name: str) -> str:
        return name

    def entries(self, file: TensorFile) -> dict[str, TensorInfo]:
        return file.entries()

    def listed(self, file: TensorFile, modules: ModulePaths) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        by_module: dict[tuple[str, str], dict[str, TensorInfo]] = defaultdict(dict)
        shared: dict[str, TensorInfo] = {}
        for name, info in file.entries().items():
            match = self._name.fullmatch(name)
            if match is None:
                file.add(tensors, name, info)
            elif match[2] in self._method.shared:
                shared[match[2]] = info
            else:
                by_module[match[1], match[3]][match[2]] = (
                    info  # the last is the adapter's name, which some trainers keep
                )
        for name in tensors:
            self._refuse_further(file, name)
        widest = max((each.inputs for each in modules.projections), default=0)
        for (module, adapter), parts in by_module.items():
            self._add(file, tensors, (module, adapter), parts | shared, widest)
        return tensors

    def _refuse_further(self, file: TensorFile, name: str) -> None:
        """Refuse a tensor of LoRA, and one that only looks like one of the method's."""
        if _LORA.search(name) is not None and not any(part.startswith("lora_") for part in self._method.parts):
            raise AdapterFormatError(
                f"{file.path}: tensor {shown(file.given_name(name))} is LoRA's, but peft_type in {CONFIG_FILE} is "
                f"{shown(self._method.peft_type)}: mend peft_type, or save the adapter again"
            )
        end = name.rpartition(".")[2]
        if end.partition("_")[0] in {part.partition("_")[0] for part in self._method.parts}:
            parts, given = ", ".join(sorted(self._method.parts)), shown(file.given_name(name))
            raise AdapterFormatError(
                f"{file.path}: tensor {given} is none of {parts}, which {self._method.title} has of a linear module; "
                "train without it"
            )

    def _add(
        self,
        file: TensorFile,
        tensors: dict[str, TensorInfo],
        named: tuple[str, str],
        parts: dict[str, TensorInfo],
        widest: int,
    ) -> None:
        """Add A and B of a module. named: it, and the adapter's name where the file has that."""
        module, adapter = named
        try:
            pair = self._method.pair(module, parts, widest)
        except WrongParts as error:
            raise AdapterFormatError(f"{file.path}: {self._method.title} of module {shown(module)}: {error}") from None
        given = f"{module}.{' and '.join(sorted(self._method.parts.intersection(parts)))}"
        for end, info in self._method.vectors(parts).items():  # first, as A and B of a scale fit what may have one
            file.add(tensors, f"{module}.{end}", info, given)
        for side, info in zip("AB", pair, strict=True):
            file.add(tensors, f"{module}.lora_{side}{adapter}.weight", info, given)

    def config(self, directory: AdapterDirectory, given: Collection[str], base: ModulePaths) -> AdapterConfig:
        return AdapterConfig.of(directory.path / CONFIG_FILE, self._method.as_lora(), base.usual_names, base.model_type)
