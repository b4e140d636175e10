"""IA³ (arXiv 2205.05638, section 3.3): a factor of each output of a module, or of each of its inputs.

Its A and B are zero. Inputs of down_proj in a gated part are products that have up_proj's outputs as factors, so their
scales are scales of these; other inputs are refused when the vectors are checked.

Tests: tests/memory/files/methods/test_methods.py, tests/core/adapters/test_adapter_methods.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..formulas import Zeros
from ..tensor_info import Computed, TensorInfo
from ..vectors import INPUT_SCALE, OUTPUT_SCALE
from .method import Method, Pair, WrongParts, computed_matrix, matrix_of


class Ia3(Method):
    """See the module."""

    title = "IA³"
    peft_type = "IA3"
    parts = frozenset(["ia3_l"])
    own_fields = frozenset(
        ["feedforward_modules", "init_ia3_weights", "r", "lora_alpha", "rank_pattern", "alpha_pattern"]
    )

    def rank_and_alpha(self) -> dict[str, Any]:
        return {"r": 1, "lora_alpha": 1}

    def pair(self, module: str, parts: Mapping[str, TensorInfo], widest: int) -> Pair:
        scale = matrix_of(parts, "ia3_l")
        if 1 not in scale.shape:
            raise WrongParts(
                f"ia3_l has shape {list(scale.shape)}, one row of inputs or one column of outputs is needed"
            )
        rows = scale.shape[0] if scale.shape[1] == 1 else widest
        a, b = (
            Computed(self.title, Zeros(*shape), (), is_larger=False, is_wide=True) for shape in ((1, widest), (rows, 1))
        )
        return Pair(computed_matrix((1, widest), a), computed_matrix((rows, 1), b))

    def vectors(self, parts: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        scale = parts["ia3_l"]
        rows, columns = scale.shape
        return {OUTPUT_SCALE if columns == 1 else INPUT_SCALE: replace(scale, shape=(rows * columns,))}
