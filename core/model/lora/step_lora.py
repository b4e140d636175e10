"""What adapters add in a forward pass, as the layers and the output projection ask for it.

Tests: tests/core/model/lora/test_lora_state_cuda.py, tests/core/test_parity.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from ....ops.attention.latents import AbsorbedLora
from ....ops.lora.sgmv import Segments, sgmv
from ....ops.lora.trained_rows import TrainedRows
from ..moe.mixture_launches import MixtureLaunches
from ..moe.mixture_lora import MixtureLora

if TYPE_CHECKING:
    from ....ops.lora.sgmv_triton import Shrunk

#: The number of the model's GEMM that makes per-layer embeddings; see `StepLora.add`.
PER_LAYER_GEMM = -1

#: The products that offload workers compute a part of on a GPU.
OFFLOADED = frozenset({"qkv", "o", "gate_up", "down"})


class StepLora(Protocol):
    """Adds LoRA products of x `[tokens, in]` to packed outputs y `[tokens, out]` in a forward pass."""

    def wait(self, layer: int, /) -> None:
        """Wait for `layer` of adapters that are still being loaded; called before the layer is computed."""

    def offload(self, gemm: int, x: torch.Tensor, layer: int, /) -> None:
        """Send offload workers their part of a GEMM; called before the base product. gemm: see `add`."""

    def add(self, gemm: int, y: torch.Tensor, x: torch.Tensor, layer: int, /) -> None:
        """Add the adapters' products of projections with a common input. gemm: an index in `Projections.gemm_shapes`,
        or PER_LAYER_GEMM, where `layer` does not count.
        """

    def shrink(self, gemm: int, x: torch.Tensor, layer: int, /) -> Shrunk | None:
        """Multiply x with the adapters' A, as the first half of `add`, where a product can take the other half in its
        launch; None where `add` must do both.
        """

    def absorbed(self, layer: int, /) -> AbsorbedLora | None:
        """What adapters change of a layer's kv_b_proj, which has latent attention; None if they change nothing."""

    def mixture(self, layer: int, /) -> MixtureLora | MixtureLaunches | None:
        """What adapters add in a layer's mixture of experts; None if they add nothing."""

    def embed(self, rows: torch.Tensor, token_ids: torch.Tensor, /) -> None:
        """Add the adapters' terms to embeddings `[tokens, hidden]`; waits for the adapters' first layer."""

    def known(self, token_ids: torch.Tensor, /) -> torch.Tensor:
        """The tokens, with any of the model's in place of those that an adapter adds: `embed` writes their rows."""
        ...

    def use_logits(self, sampled: Sequence[int], scored: Sequence[int], /) -> None:
        """Tell which of the step's tokens, in rising order, have logits, and prompt-logprob logits. Without this call,
        every token has logits.
        """

    def logits(self, /) -> HeadLora | None:
        """What adapters add to the step's logits; None if they add nothing."""

    def prompt_logits(self, /) -> HeadLora | None:
        """What adapters add to the logits of the step's prompt-logprob tokens."""


class HeadLora:
    """Adds LoRA products to logits, and replaces those of tokens with rows of their own. segments: of the rows that
    have logits.
    """

    def __init__(
        self, arena: torch.Tensor, segments: Segments, layer: int, module: int, trained: TrainedRows | None
    ) -> None:
        """trained: None if no segment has rows of its own."""
        self._arena, self._segments, self._layer, self._module = arena, segments, layer, module
        self._trained = trained

    def add(self, logits: torch.Tensor, x: torch.Tensor, first: int, begin: int = 0) -> None:
        """Add the terms of x `[rows, hidden]` to logits `[rows, columns]` float32, before they are scaled or capped; a
        rank has columns of its own. first: the token of the first column. begin: the first of these rows.
        """
        segments = self._segments
        if begin or len(logits) < max(segments.end, default=0):
            segments = segments.within(begin, begin + len(logits))
        if self._trained is not None:
            self._trained.replace_logits(logits, x, self._arena, segments, self._layer, first=first)
        modules = ((self._module, 0, logits.shape[1]),)
        sgmv(logits, x.float(), self._arena, segments, self._layer, modules=modules)
