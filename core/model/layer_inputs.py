"""Further inputs of layers: vectors of a token, made of a table's row and of the model's embedding (Gemma 4 and 3n).

Tests: tests/core/test_attention_shapes.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import embedding

from ...ops.elementwise.elementwise import rms_norm
from .batch import BY_LIBRARY, GemmBackends
from .lora.step_lora import StepLora
from .program.torch_ops import backend_for, multiply
from .specs.layers import LayerInputSpec


@dataclass(slots=True)
class LayerInputs:
    """Makes the inputs of all layers at once: `(norm(project(embedding) · hidden^-0.5) + row · size^0.5) · 2^-0.5`."""

    spec: LayerInputSpec
    table: torch.Tensor
    """`[vocab, layers · size]`."""
    project: Any
    """`[layers · size, hidden]`: a projection as `multiply` takes it."""
    norm: torch.Tensor
    """`[size]`."""
    eps: float

    def of(
        self,
        token_ids: torch.Tensor,
        embedded: torch.Tensor,
        lora: StepLora | None = None,
        backends: GemmBackends = BY_LIBRARY,
    ) -> torch.Tensor:
        """`[tokens, layers · size]`. embedded: `[tokens, hidden]`, the model's embeddings with their factor. lora,
        backends: the step's.
        """
        size = self.spec.size
        if self.spec.first_for_others:
            token_ids = token_ids.where(token_ids < self.spec.vocab, 0)
        rows = embedding(token_ids, self.table)
        rows = rows * float(torch.tensor(size**0.5, dtype=rows.dtype))
        found = multiply(backend_for(backends, self.project), embedded, self.project)
        if lora is not None:
            lora.add_inputs(found, embedded)
        found = found * embedded.shape[1] ** -0.5
        found = rms_norm(found.reshape(-1, size), self.norm, self.eps).view(found.shape)
        return (found + rows.to(found.dtype)) * 2**-0.5
