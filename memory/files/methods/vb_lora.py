"""VB-LoRA (arXiv 2405.15179, section 3): A and B are made of mixtures of vectors, from a bank that all modules share.

For each run of values the file has a logit of each vector. The softmax of the k largest makes the weights:

    A[r, (i, ·)] = Σ weight[r, i, v] · bank[v]        B[(o, ·), r] = Σ weight[o, r, v] · bank[v]

Tests: tests/memory/files/methods/test_methods.py, tests/core/adapters/test_adapter_methods.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..formulas import Mixture
from ..tensor_info import Computed, TensorInfo
from .method import CONVERT, Method, Pair, WrongParts, bias_of, computed_matrix, matrix_of

_SIDES = ("vblora_logits_A", "vblora_logits_B")


class VbLora(Method):
    """See the module."""

    title = "VB-LoRA"
    peft_type = "VBLORA"
    parts = frozenset(_SIDES)
    shared = frozenset(["vblora_vector_bank"])
    own_fields = frozenset([
        "num_vectors", "vector_length", "topk", "save_only_topk_weights", "vblora_dropout", "init_vector_bank_bound",
        "init_logits_std",
    ])  # fmt: skip

    def rank_and_alpha(self) -> dict[str, Any]:
        rank = self.fields.get("r", 4)
        return {"r": rank, "lora_alpha": rank, "bias": bias_of(self.fields)}

    def why_not(self) -> str | None:
        topk = self.fields.get("topk", 2)
        if not isinstance(topk, int) or isinstance(topk, bool) or topk < 1:
            return f"topk is {topk!r}, a number from 1 is needed: as many vectors as PEFT mixes"
        if not self.fields.get("save_only_topk_weights", False):
            return None
        return f"save_only_topk_weights is true, so the file has numbers of vectors in place of logits; {CONVERT}"

    def pair(self, module: str, parts: Mapping[str, TensorInfo], widest: int) -> Pair:
        bank = matrix_of(parts, "vblora_vector_bank")
        (rank, in_tiles, count), (out_tiles, b_rank, b_count) = (_logits(parts, name) for name in _SIDES)
        vectors, length = bank.shape
        topk = self.fields.get("topk", 2)
        if rank != b_rank or not count == b_count == vectors or topk > vectors:
            found = " and ".join(f"{name} {list(parts[name].shape)}" for name in (*_SIDES, "vblora_vector_bank"))
            raise WrongParts(f"the shapes of {found} do not fit each other and topk, {topk}")
        sides = []
        for name, (rows, columns), is_b in zip(
            _SIDES, ((rank, in_tiles * length), (out_tiles * length, rank)), (False, True), strict=True
        ):
            # logits take as much as A and B where there are as many vectors as a vector has values
            formula = Mixture(topk, is_b)
            computed = Computed(self.title, formula, (bank, parts[name]), rank, is_larger=length > vectors)
            sides.append(computed_matrix((rows, columns), computed))
        return Pair(*sides)


def _logits(parts: Mapping[str, TensorInfo], name: str) -> tuple[int, int, int]:
    """The shape of logits."""
    info = parts.get(name)
    if info is None:
        raise WrongParts(f"{name} is missing")
    if len(info.shape) != 3:
        raise WrongParts(f"{name} has shape {list(info.shape)}, three dimensions are needed")
    return info.shape
