"""Modules past whose adapters transformers computes: it multiplies by their weight, where PEFT's layer is never called.

Mamba 1 has one, `dt_proj`. Training leaves B of such a module at the zeros that it begins with, and the adapter is
served without it. Other values would change nothing in transformers, and the model once the adapter is merged. Only
quantised Jamba and Falcon-Mamba call PEFT's layer there: adapters trained on them may have other values, and are
refused.

Tests: tests/memory/files/test_bypassed.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..pages.projections import Projections
from .error import AdapterFormatError
from .given_up import check_wanted
from .values import read_values

if TYPE_CHECKING:
    from ..pages.adapter_layout import VectorTarget
    from .tensor_file import TensorFile


def find_bypassed(
    file: TensorFile,
    names: Mapping[tuple[int, str], tuple[str, str]],
    vectors: Sequence[VectorTarget],
    projections: Projections,
) -> tuple[str, ...]:
    """The projections among an adapter's targets that change nothing. names: of A and B, by layer and projection.

    Raises AdapterFormatError for those that would change the model once they are merged.
    """
    if not (bypassed := projections.bypassed):
        return ()
    for each in vectors:
        if each.module in bypassed and any(_lora_parts(each)):
            raise AdapterFormatError(
                f"{file.path}: DoRA, a bias of LoRA or a scale is on {each.module} of layer {each.layer}. "
                f"{_why(each.module)}"
            )
    found = {target: pair for target, pair in names.items() if target[1] in bypassed}
    for (layer, module), (_, b) in found.items():
        check_wanted()
        if read_values(file, file.tensors[b]).any():
            raise AdapterFormatError(
                f"{file.path}: tensor {file.given_name(b)}, of {module} of layer {layer}, is not zero. {_why(module)}"
            )
    return tuple(dict.fromkeys(module for _, module in found))


def refuse_nothing(path: Path, bypassed: Sequence[str], left: Sequence[object]) -> None:
    """Raise AdapterFormatError for an adapter of bypassed modules alone. left: all else that it changes."""
    if not left:
        raise AdapterFormatError(
            f"{path}: the adapter is on {', '.join(bypassed)} alone, and so it is the base model. {_why(bypassed[0])}"
        )


def _lora_parts(vector: VectorTarget) -> tuple[bool, ...]:
    """Those parts of a module's vectors that PEFT's layer around the module would apply; biases it puts inside."""
    return vector.has_magnitude, vector.has_lora_bias, vector.has_scale, vector.has_scale_of_next


def _why(module: str) -> str:
    return (
        f"transformers multiplies by the weight of {module} itself, past PEFT's layer around it, unless Jamba or "
        "Falcon-Mamba are quantised: what an adapter has there changes nothing but merged weights. Train without "
        f"{module} in target_modules"
    )
