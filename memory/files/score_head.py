"""The head of a classifier: a linear layer from a hidden state to a score for each label.

It is small, so it stays in host memory with the manifest of its adapter's version, and leaves with it.

Tests: tests/memory/files/test_score_head.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .error import AdapterFormatError, shown
from .tensor_file import TensorFile
from .tensor_info import TensorInfo
from .unserved import mend_of

if TYPE_CHECKING:
    import numpy as np

MAX_LABELS = 1024

MODULES = frozenset(("score", "classifier"))
"""The modules that PEFT names in `modules_to_save` for task_type SEQ_CLS; decoders have `score` alone."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoreHead:
    """scores = weight · x + bias, in float32."""

    weight: np.ndarray
    """`[labels, hidden]` float32."""
    bias: np.ndarray | None = None
    """`[labels]` float32."""

    @property
    def num_labels(self) -> int:
        return len(self.weight)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def scores(self, vector: np.ndarray) -> np.ndarray:
        """Scores `[labels]` float32 of a hidden state `[hidden]`."""
        found = self.weight @ vector.astype("float32")
        return found if self.bias is None else found + self.bias


TENSORS = WEIGHT, BIAS = "base_model.model.score.weight", "base_model.model.score.bias"
"""Names of the head in an adapter's file, as PEFT saves it."""


def read_score_head(file: TensorFile, hidden_size: int | None, config: str) -> ScoreHead:
    """The head in an adapter's file, for states of the base model's size; None: not known.

    config: name of the file that says that there is one. Raises AdapterFormatError.
    """
    weight = file.tensors.get(WEIGHT)
    if weight is None:
        raise AdapterFormatError(
            f"{file.path}: tensor {WEIGHT} is missing, but {config} has score in modules_to_save; save it again"
        )
    labels = weight.shape[0] if len(weight.shape) == 2 else 0
    if not 0 < labels <= MAX_LABELS or hidden_size not in (None, weight.shape[1]):
        is_fault_of_head = 0 not in weight.shape and (not labels or labels > MAX_LABELS)
        mend = "train a head of fewer labels" if is_fault_of_head else mend_of(weight.shape)
        raise AdapterFormatError(
            f"{file.path}: tensor {WEIGHT} has shape {shown(list(weight.shape))}, [labels, {hidden_size}] with at most "
            f"{MAX_LABELS} labels is needed; {mend}"
        )
    bias = file.tensors.get(BIAS)
    if bias is not None and bias.shape != (labels,):
        raise AdapterFormatError(
            f"{file.path}: tensor {BIAS} has shape {shown(list(bias.shape))}, {[labels]} is needed; save it again"
        )
    import numpy as np  # a command that starts no engine needs none

    head = ScoreHead(_values(file, weight), None if bias is None else _values(file, bias))
    for name, values in ((WEIGHT, head.weight), (BIAS, head.bias)):
        if values is not None and not np.isfinite(values).all():
            raise AdapterFormatError(f"{file.path}: tensor {name} has a value that is not finite; train it again")
    return head


def _values(file: TensorFile, info: TensorInfo) -> np.ndarray:
    """A tensor's values in float32."""
    import numpy as np

    data = bytearray(info.num_bytes)
    file.read_into(memoryview(data), info.offset)
    if info.dtype == "BF16":
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, "<f4" if info.dtype == "F32" else "<f2").astype(np.float32)
    return values.reshape(info.shape)
