"""The interface of a method: its tensors in PEFT's file, LoRA's fields for its configuration, and A and B of a module.

Tests: tests/memory/files/methods/test_methods.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from ..tensor_info import Computed, TensorInfo

CONVERT = (
    "convert it with PEFT: peft.save_as_lora(DIR, model, rank=R), where model is peft.PeftModel.from_pretrained(base, "
    "ADAPTER)"
)


class Pair(NamedTuple):
    """A `[rank, in]` and B `[out, rank]` of a module."""

    a: TensorInfo
    b: TensorInfo


class WrongParts(ValueError):
    """A module's tensors that do not make A and B. fix: what to do about it."""

    def __init__(self, why: str, fix: str = "save it again with PEFT's save_pretrained") -> None:
        super().__init__(f"{why}; {fix}")


class Method(ABC):
    """A method of PEFT. fields: of its configuration, which are not checked yet."""

    title: ClassVar[str]
    """Its name in texts."""
    peft_type: ClassVar[str]
    """Its name in configurations."""
    parts: ClassVar[frozenset[str]]
    """Ends of the names of a module's tensors."""
    shared: ClassVar[frozenset[str]] = frozenset()
    """The same of tensors that all modules share."""
    own_fields: ClassVar[frozenset[str]]
    """Fields of its configuration that LoRA's does not have, or that mean something else there."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def as_lora(self) -> dict[str, Any]:
        """LoRA's fields for the configuration."""
        found = {name: value for name, value in self.fields.items() if name not in self.own_fields}
        return {**found, "peft_type": "LORA", **self.rank_and_alpha()}

    @abstractmethod
    def rank_and_alpha(self) -> dict[str, Any]:
        """LoRA's `r` and `lora_alpha`, whose quotient is the factor of B·A, and `bias` if the method has one."""

    def why_not(self) -> str | None:
        """Why an adapter with this configuration can't be served, and what to do about it; None if it can."""
        return None

    @abstractmethod
    def pair(self, module: str, parts: Mapping[str, TensorInfo], widest: int) -> Pair:
        """A and B of a module from its tensors and the shared ones. widest: the most inputs of a module of the base
        model. Raises WrongParts; `matrix_of` does for a missing one.
        """

    def vectors(self, parts: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Vectors of a module, by the ends that `memory.files.vectors` has for them."""
        return {}


def bias_of(fields: Mapping[str, Any]) -> Any:
    """LoRA's value of `bias`, where a method names biases of its own modules by its own name."""
    bias = fields.get("bias", "none")
    return "lora_only" if isinstance(bias, str) and bias.endswith("_only") else bias


def matrix_of(parts: Mapping[str, TensorInfo], name: str) -> TensorInfo:
    """A part that is a matrix. Raises WrongParts for any other."""
    info = parts.get(name)
    if info is None:
        raise WrongParts(f"{name} is missing")
    if len(info.shape) != 2:
        raise WrongParts(f"{name} has shape {list(info.shape)}, a matrix is needed")
    return info


def vector_of(parts: Mapping[str, TensorInfo], name: str) -> TensorInfo:
    """A part that is a vector, maybe of one column. Raises WrongParts for any other."""
    info = parts.get(name)
    if info is None:
        raise WrongParts(f"{name} is missing")
    if len(info.shape) != 1 and info.shape[1:] != (1,):
        raise WrongParts(f"{name} has shape {list(info.shape)}, a vector is needed")
    return info


def computed_matrix(shape: tuple[int, int], computed: Computed) -> TensorInfo:
    """A matrix that is computed when it is read."""
    return TensorInfo("F32", shape, 0, 0, computed=computed)
