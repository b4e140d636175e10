"""VeRA (arXiv 2310.11454, equation 2): ΔW = Λb B Λd A, with A and B of all modules in common.

Both have the size of the largest module; a module has the first columns of A and the first rows of B.

Tests: tests/memory/files/methods/test_methods.py, tests/core/adapters/test_adapter_methods.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..formulas import ScaledRows
from ..tensor_info import Computed, TensorInfo
from .method import Method, Pair, WrongParts, bias_of, computed_matrix, matrix_of, vector_of


class Vera(Method):
    """See the module."""

    title = "VeRA"
    peft_type = "VERA"
    parts = frozenset(["vera_lambda_b", "vera_lambda_d"])
    shared = frozenset(["vera_A", "vera_B"])
    own_fields = frozenset(["projection_prng_key", "save_projection", "vera_dropout", "d_initial", "init_weights"])

    def rank_and_alpha(self) -> dict[str, Any]:
        rank = self.fields.get("r", 256)
        return {"r": rank, "lora_alpha": rank, "bias": bias_of(self.fields)}

    def pair(self, module: str, parts: Mapping[str, TensorInfo], widest: int) -> Pair:
        if not self.shared.issubset(parts):
            raise WrongParts(
                "vera_A and vera_B are not in the file, as save_projection=False leaves them out",
                "convert it with PEFT, which draws them again: peft.save_as_lora(DIR, model, rank=r)",
            )
        a, b = matrix_of(parts, "vera_A"), matrix_of(parts, "vera_B")
        by_output, by_rank = vector_of(parts, "vera_lambda_b"), vector_of(parts, "vera_lambda_d")
        rank, outputs = by_rank.shape[0], by_output.shape[0]
        if a.shape[0] != rank or b.shape[1] != rank or b.shape[0] < outputs:
            raise WrongParts(
                f"vera_A has shape {list(a.shape)} and vera_B {list(b.shape)}; with {rank} values of vera_lambda_d and "
                f"{outputs} of vera_lambda_b, [{rank}, inputs] and at least [{outputs}, {rank}] are needed"
            )
        b = b.rows(0, outputs)
        return Pair(
            computed_matrix((rank, a.shape[1]), Computed(self.title, ScaledRows(), (a, by_rank), rank, is_wide=True)),
            computed_matrix((outputs, rank), Computed(self.title, ScaledRows(), (b, by_output), rank)),
        )
