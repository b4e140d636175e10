"""What adapters have of tokens behind the vocabulary, whose rows the base model's embeddings and head have, and which
no prompt and no answer has: those by which a vocabulary was padded, or that stand for images.

Tests: tests/core/adapters/test_padded_vocabularies.py
"""

from __future__ import annotations

from ..pages.projections import Role
from .module_paths import ModulePaths
from .peft_names import tensor_names
from .tensor_info import TensorInfo


def cut_further(tensors: dict[str, TensorInfo], modules: ModulePaths) -> bool:
    """Cut these tokens' columns of A of the embeddings, and their rows of B of the head; True if columns were cut."""
    a = _tensor(tensors, modules, Role.EMBEDDING, "embed_tokens", axis=1)
    if a is not None:
        tensors[a] = tensors[a].first_columns(tensors[a].shape[1] - modules.further_embeddings)
    b = _tensor(tensors, modules, Role.HEAD, "lm_head", axis=0)
    if b is not None:
        tensors[b] = tensors[b].rows(0, tensors[b].shape[0] - modules.further_logits)
    return a is not None


def _tensor(tensors: dict[str, TensorInfo], modules: ModulePaths, role: Role, module: str, *, axis: int) -> str | None:
    """The name of A or B of a module, where it has further tokens along an axis; else None."""
    further = modules.further_rows(module)
    index = modules.projections.of_role(role) if further else None
    if index is None:
        return None
    projection = modules.projections[modules.projections.name_of(index)]
    name = tensor_names(-1, projection)[0 if axis else 1]
    wanted = (projection.inputs if axis else projection.outputs) + further
    shape = tensors[name].shape if name in tensors else ()
    return name if len(shape) == 2 and shape[axis] == wanted else None
