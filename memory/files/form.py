"""The forms in which adapters lie on disk: the files of each, and how they give PEFT's fields and tensors.

A form names the file with the weights, and reads them under PEFT's names and as PEFT's matrices. All checks, hashes and
reads are then the same for every form.

Tests: tests/memory/files/test_adapter_forms.py.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from .config import CONFIG_FILE, AdapterConfig, read_fields
from .directory import AdapterDirectory
from .error import AdapterFormatError
from .gguf_form import GGUF_SUFFIX, GgufForm
from .lycoris_form import SUFFIX, LycorisForm, has_lycoris_names
from .methods.form import MethodForm
from .methods.registry import method_of
from .mlx_form import MLX_FILE, MlxForm
from .module_paths import ModulePaths
from .peft_form import WEIGHTS_FILE, PeftForm
from .tensor_file import TensorFile
from .tensor_info import TensorInfo
from .unserved import missing_config, refuse_other_weights


class AdapterForm(Protocol):
    """One form of an adapter's files, in one directory."""

    @property
    def weights_file(self) -> str:
        """Name of the file with the weights."""
        ...

    @property
    def kind(self) -> str:
        """The kind of that file, for messages."""
        ...

    @property
    def title(self) -> str:
        """Its name in texts."""
        ...

    @property
    def is_plain(self) -> bool:
        """True for a safetensors file that has every matrix as PEFT does."""
        ...

    def peft_name(self, name: str) -> str:
        """PEFT's name of a tensor."""
        ...

    def entries(self, file: TensorFile) -> dict[str, TensorInfo]:
        """The file's tensors by its own names, as they lie in it."""
        ...

    def listed(self, file: TensorFile, modules: ModulePaths) -> dict[str, TensorInfo]:
        """The file's tensors by PEFT's names, with PEFT's shapes. modules: of the base model."""
        ...

    def config(self, directory: AdapterDirectory, given: Collection[str], base: ModulePaths) -> AdapterConfig:
        """The fields of a PEFT configuration. given: names of the modules in the base model that have tensors."""
        ...


def form_of(directory: AdapterDirectory) -> AdapterForm:
    """The form of a directory's adapter. Raises AdapterFormatError if it has none that is read."""
    if directory.has(WEIGHTS_FILE) and directory.has(CONFIG_FILE):
        return _form_of_peft(directory)
    if directory.has(MLX_FILE) and directory.has(CONFIG_FILE):
        return MlxForm()
    if not directory.has(CONFIG_FILE):
        if (form := _form_of_one_file(directory)) is not None:
            return form
        raise missing_config(directory, CONFIG_FILE)
    refuse_other_weights(directory, WEIGHTS_FILE)
    return _form_of_peft(directory)


def _form_of_one_file(directory: AdapterDirectory) -> AdapterForm | None:
    """The form of a directory with one file that is a whole adapter; None for another directory."""
    if directory.has("config.json"):
        return None
    ggufs, others = ([name for name in directory.names() if name.endswith(end)] for end in (GGUF_SUFFIX, SUFFIX))
    if len(ggufs) == 1 and not directory.has(WEIGHTS_FILE):
        return GgufForm(ggufs[0])
    return LycorisForm(others[0]) if len(others) == 1 and not ggufs and _is_of_lycoris(directory, others[0]) else None


def _is_of_lycoris(directory: AdapterDirectory, name: str) -> bool:
    """True for a file of LyCORIS; False for any other, and for one that can't be read."""
    try:
        with TensorFile(directory.path / name, directory.open(name, LycorisForm.kind)) as file:
            return has_lycoris_names(file.entries())
    except AdapterFormatError:
        return False


def _form_of_peft(directory: AdapterDirectory) -> AdapterForm:
    """The form of a directory with PEFT's `adapter_config.json`."""
    fields = read_fields(directory)
    method = method_of(directory.path / CONFIG_FILE, fields)
    return PeftForm(fields) if method is None else MethodForm(method)
