"""MiSS (arXiv 2409.15371, section 3): every run of r inputs has the same r columns of ΔW, those of a block `[r, out]`.

    B = blockᵀ        A[j, n] = 1 where n mod r = j

The last run may be cut. "bat" multiplies by the base model's weights, and "mini" leaves the number of outputs to the
model: neither is computed here.

Tests: tests/memory/files/methods/test_methods.py, tests/core/adapters/test_adapter_methods.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..arrangement import Arrangement
from ..formulas import Identities
from ..tensor_info import Computed, TensorInfo
from .method import CONVERT, Method, Pair, bias_of, computed_matrix, matrix_of


class Miss(Method):
    """See the module."""

    title = "MiSS"
    peft_type = "MISS"
    parts = frozenset(["miss_block"])
    own_fields = frozenset(["mini_r", "miss_dropout", "init_weights"])

    def rank_and_alpha(self) -> dict[str, Any]:
        rank = self.fields.get("r", 64)
        return {"r": rank, "lora_alpha": rank, "bias": bias_of(self.fields)}

    def why_not(self) -> str | None:
        init = self.fields.get("init_weights", True)
        if init not in ("bat", "mini"):
            return None
        return f"init_weights is {init!r}, whose A and B are not in the file; {CONVERT}"

    def pair(self, module: str, parts: Mapping[str, TensorInfo], widest: int) -> Pair:
        block = matrix_of(parts, "miss_block")
        rank, outputs = block.shape
        # PEFT's conversion has the same rank, and A takes no more than a few times what the file has as B
        a = Computed(self.title, Identities(rank, widest), (), rank, is_larger=False, is_wide=True)
        turned = Arrangement((rank, outputs), is_transposed=True)
        return Pair(computed_matrix((rank, widest), a), replace(block, shape=(outputs, rank), arrangement=turned))
