"""AdaLoRA (arXiv 2303.10512, equation 3): ΔW = s · P Λ Q, with B = P and A = Λ Q.

PEFT's factor is alpha / (r + 1e-5) with the rank before training, in every module, whatever rank is left there.

Tests: tests/memory/files/methods/test_methods.py, tests/core/adapters/test_adapter_methods.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..formulas import ScaledRows
from ..tensor_info import Computed, TensorInfo
from .method import Method, Pair, WrongParts, computed_matrix, matrix_of, vector_of

_PREFIX = "base_model.model."
_SMALL = 1e-5


class AdaLora(Method):
    """See the module."""

    title = "AdaLoRA"
    peft_type = "ADALORA"
    parts = frozenset(["lora_A", "lora_B", "lora_E"])
    own_fields = frozenset([
        "r", "lora_alpha", "init_r", "target_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight",
        "total_step", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights",
    ])  # fmt: skip

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._rank = fields.get("init_r", 12)
        pattern = fields.get("rank_pattern")
        self._kept = {
            name.rpartition(".lora_E")[0]: sum(map(bool, kept))
            for name, kept in (pattern.items() if isinstance(pattern, dict) else ())
            if isinstance(kept, list)
        }

    def rank_and_alpha(self) -> dict[str, Any]:
        rank, alpha = self._rank, self.fields.get("lora_alpha", 8)
        if isinstance(rank, int) and isinstance(alpha, int | float):
            alpha = (alpha if alpha > 0 else rank) * rank / (rank + _SMALL)
        return {"r": rank, "lora_alpha": alpha}

    def pair(self, module: str, parts: Mapping[str, TensorInfo], widest: int) -> Pair:
        a, b, kept = matrix_of(parts, "lora_A"), matrix_of(parts, "lora_B"), vector_of(parts, "lora_E")
        rank, inputs = a.shape
        want = self._kept.get(module.removeprefix(_PREFIX), self._rank)
        if (b.shape[1], kept.shape[0]) != (rank, rank) or rank != want:
            raise WrongParts(
                f"the ranks of lora_A, lora_B and lora_E are {rank}, {b.shape[1]} and {kept.shape[0]}, "
                f"by rank_pattern and init_r {want!r} is needed"
            )
        computed = Computed(self.title, ScaledRows(), (a, kept), is_larger=False)
        return Pair(computed_matrix((rank, inputs), computed), b)
