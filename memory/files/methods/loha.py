"""LoHa (FedPara, arXiv 2108.06098, section 2): ΔW = s · (W1a W1b) ∘ (W2a W2b), of rank r² at most.

    B[o, (i, j)] = W1a[o, i] · W2a[o, j]        A[(i, j), n] = W1b[i, n] · W2b[j, n]

Tests: tests/memory/files/methods/test_methods.py, tests/core/adapters/test_adapter_methods.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..formulas import RowProducts
from ..tensor_info import Computed, TensorInfo
from .method import Method, Pair, WrongParts, computed_matrix, matrix_of


class LoHa(Method):
    """See the module."""

    title = "LoHa"
    peft_type = "LOHA"
    parts = frozenset(["hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"])
    own_fields = frozenset(["alpha", "rank_dropout", "module_dropout", "init_weights", "use_effective_conv2d"])

    def rank_and_alpha(self) -> dict[str, Any]:
        return {"lora_alpha": self.fields.get("alpha", 8)}

    def pair(self, module: str, parts: Mapping[str, TensorInfo], widest: int) -> Pair:
        a1, b1, a2, b2 = (matrix_of(parts, name) for name in sorted(self.parts))
        (outputs, rank), inputs = a1.shape, b1.shape[1]
        if (b1.shape, a2.shape, b2.shape) != ((rank, inputs), (outputs, rank), (rank, inputs)):
            found = ", ".join(f"{name} {list(parts[name].shape)}" for name in sorted(self.parts))
            raise WrongParts(f"the shapes of {found} do not fit each other")
        return Pair(
            computed_matrix((rank * rank, inputs), Computed(self.title, RowProducts(), (b1, b2), rank)),
            computed_matrix((outputs, rank * rank), Computed(self.title, RowProducts(by_columns=True), (a1, a2), rank)),
        )
