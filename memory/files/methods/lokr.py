"""LoKr (LyCORIS, arXiv 2309.14859, section 3): ΔW = s · W1 ⊗ W2, each a matrix or a product of two.

With Wi = Li Ri the rank is that of W1 times that of W2:

    B = L1 ⊗ L2        A = R1 ⊗ R2

A matrix that is whole is itself times an identity on its longer side.

Tests: tests/memory/files/methods/test_methods.py, tests/core/adapters/test_adapter_methods.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..formulas import Kronecker
from ..tensor_info import Computed, TensorInfo
from .method import Method, Pair, WrongParts, computed_matrix, matrix_of


class _Factor(NamedTuple):
    """W1 or W2 as a product; None: an identity."""

    left: TensorInfo | None
    right: TensorInfo | None
    shape: tuple[int, int]
    inner: int


class LoKr(Method):
    """See the module."""

    title = "LoKr"
    peft_type = "LOKR"
    parts = frozenset(["lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"])
    own_fields = frozenset([
        "alpha", "rank_dropout", "module_dropout", "rank_dropout_scale", "init_weights", "use_effective_conv2d",
        "decompose_both", "decompose_factor",
    ])  # fmt: skip

    def rank_and_alpha(self) -> dict[str, Any]:
        return {"lora_alpha": self.fields.get("alpha", 8)}

    def pair(self, module: str, parts: Mapping[str, TensorInfo], widest: int) -> Pair:
        one, two = _factor(parts, "lokr_w1"), _factor(parts, "lokr_w2")
        ranks = {each.inner for each in (one, two) if each.left and each.right}
        if len(ranks) > 1:
            raise WrongParts(f"the ranks of lokr_w1_a and lokr_w2_a are {' and '.join(map(str, sorted(ranks)))}")
        rank = min(ranks, default=None)
        inner = one.inner * two.inner

        def computed(first: TensorInfo | None, second: TensorInfo | None) -> Computed:
            formula = Kronecker(0 if first else one.inner, 0 if second else two.inner)
            return Computed(self.title, formula, tuple(each for each in (first, second) if each), rank)

        return Pair(
            computed_matrix((inner, one.shape[1] * two.shape[1]), computed(one.right, two.right)),
            computed_matrix((one.shape[0] * two.shape[0], inner), computed(one.left, two.left)),
        )


def _factor(parts: Mapping[str, TensorInfo], name: str) -> _Factor:
    if name in parts:
        if f"{name}_a" in parts or f"{name}_b" in parts:
            raise WrongParts(f"{name} is there as a matrix and as a product")
        whole = matrix_of(parts, name)
        rows, columns = whole.shape
        left, right = (whole, None) if columns <= rows else (None, whole)
        return _Factor(left, right, (rows, columns), min(rows, columns))
    left, right = matrix_of(parts, f"{name}_a"), matrix_of(parts, f"{name}_b")
    if left.shape[1] != right.shape[0]:
        raise WrongParts(f"{name}_a has {left.shape[1]} columns, and {name}_b {right.shape[0]} rows")
    return _Factor(left, right, (left.shape[0], right.shape[1]), right.shape[0])
