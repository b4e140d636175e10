"""A decoder layer in a step: its four products, each by the backend that the step chose for it, with LoRA's added."""

from __future__ import annotations

import torch

from ...ops.elementwise import add_rms_norm, rms_norm, silu_and_mul
from ...ops.products import linear
from ...ops.ranks import Ranks
from .batch import Way, Ways
from .lora_state import ATTN_O, DOWN, GATE_UP, QKV, StepLora
from .nvtx_spans import span
from .weights import LayerWeights


class Residual:
    """The residual stream. rows: `[tokens, hidden]`. added: `[tokens, hidden]`, which the next norm adds to them."""

    __slots__ = ("added", "eps", "rows")

    def __init__(self, rows: torch.Tensor, eps: float, added: torch.Tensor | None = None) -> None:
        self.rows, self.eps, self.added = rows, eps, added

    def __getitem__(self, tokens: torch.Tensor) -> Residual:
        """Of some tokens, a copy."""
        return Residual(self.rows[tokens], self.eps, None if self.added is None else self.added[tokens])

    def normed(self, norm: torch.Tensor) -> torch.Tensor:
        """RMSNorm of the rows, to which `added` is added in place."""
        added, self.added = self.added, None
        return rms_norm(self.rows, norm, self.eps) if added is None else add_rms_norm(added, self.rows, norm, self.eps)

    def normed_product(
        self, norm: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gate: bool, keep: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """`normed`, where it is to be kept, and its product, gated or not, by one launch of ours."""
        from ...ops import small_gemm_triton  # needs triton

        added, self.added = self.added, None
        x, before = (self.rows, None) if added is None else (added, self.rows)
        kept, self.rows, y = small_gemm_triton.add_norm_multiply(
            x, before, norm, self.eps, weight, bias, silu=gate, keep=keep
        )
        return kept, y


class Layer:
    """A layer's products in one step.

        x += o(attention(qkv(x)))
        x += down(gate_up(x))

    qkv and gate_up take the residual stream and begin with its norm; o and down give what is to be added to it.
    """

    __slots__ = ("_index", "_lora", "_ranks", "_ways", "_weights")

    def __init__(
        self, weights: LayerWeights, index: int, ways: Ways, lora: StepLora | None = None, ranks: Ranks | None = None
    ) -> None:
        """lora: None when no row uses an adapter. ranks: have shares of o's and down's inputs each."""
        self._weights, self._index, self._ways, self._lora, self._ranks = weights, index, ways, lora, ranks

    def qkv(self, x: Residual) -> torch.Tensor:
        """`[tokens, q + 2·kv]`."""
        weights = self._weights
        with span("attn.qkv"):
            normed, y = self._normed_product(QKV, x, weights.input_norm, weights.qkv, weights.qkv_bias)
        if self._lora is not None and normed is not None:
            with span("lora.qkv"):
                self._lora.add(QKV, y, normed, self._index)
        return y

    def o(self, attended: torch.Tensor) -> torch.Tensor:
        """attended: `[tokens, q]`."""
        with span("attn.o"):
            y = multiply(self._ways[ATTN_O], attended, self._weights.o, self._weights.o_bias)
        if self._lora is not None:
            with span("lora.o"):
                self._lora.add(ATTN_O, y, attended, self._index)
        return y if self._ranks is None else self._ranks.add_up(y)

    def gate_up(self, x: Residual) -> torch.Tensor:
        """`silu(gate) · up`: `[tokens, ffn]`; in the product's launch where no LoRA product comes between."""
        weights = self._weights
        normed, y = self._normed_product(
            GATE_UP, x, weights.post_attention_norm, weights.gate_up, weights.gate_up_bias, gate=self._lora is None
        )
        if self._lora is None or normed is None:
            return y
        with span("lora.gate_up"):
            self._lora.add(GATE_UP, y, normed, self._index)
        return silu_and_mul(y)

    def down(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: `[tokens, ffn]`."""
        y = multiply(self._ways[DOWN], hidden, self._weights.down, self._weights.down_bias)
        if self._lora is not None:
            with span("lora.down"):
                self._lora.add(DOWN, y, hidden, self._index)
        return y if self._ranks is None else self._ranks.add_up(y)

    def _normed_product(
        self,
        group: int,
        x: Residual,
        norm: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gate: bool = False,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What LoRA multiplies with, and the product; gated where that is asked for."""
        way = self._ways[group]
        if way is Way.NORMED:
            return x.normed_product(norm, weight, bias, gate=gate, keep=self._lora is not None)
        normed = x.normed(norm)
        return normed, multiply(way, normed, weight, bias, gate=gate)


def multiply(
    way: Way, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gate: bool = False
) -> torch.Tensor:
    """`x @ weightᵀ + bias`. x: `[rows, in]`, weight: `[out, in]`. gate: `silu(gate) · up` of the halves of that, the
    same bits as one after the other of the same way.
    """
    if way is Way.LIBRARY:
        y = linear(x, weight, bias)
        return silu_and_mul(y) if gate else y
    from ...ops import small_gemm_triton  # needs triton

    return small_gemm_triton.multiply(x, weight, bias, silu=gate)
