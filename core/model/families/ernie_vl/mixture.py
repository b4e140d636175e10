"""A mixture of which positions of images go to experts of their own.

Tests: tests/core/media/test_image_experts.py
"""

from __future__ import annotations

import torch

from ...moe.experts import ExpertWeights, mix_experts
from ...moe.mixture_lora import MixtureLora
from .experts import ErnieVlExperts


def mix_by_modality(
    x: torch.Tensor,
    mixtures: tuple[ExpertWeights, ExpertWeights],
    spec: ErnieVlExperts,
    of_images: torch.Tensor,
    lora: MixtureLora | None = None,
) -> torch.Tensor:
    """The output of a mixture for rows `[rows, hidden]`, of which some go to experts of images. mixtures: of text, and
    of images. of_images: `[rows]` int64, the rows of images, in rising order.
    """
    is_text = torch.ones(len(x), dtype=torch.bool)
    is_text[of_images] = False
    found = torch.empty_like(x)
    for rows, weights, own, has_experts in zip(
        (is_text.nonzero()[:, 0], of_images), mixtures, (spec, spec.of_images), (True, False), strict=True
    ):
        if len(rows):
            added = None if lora is None else lora.of_rows(rows.tolist(), has_experts=has_experts)
            found[rows] = mix_experts(x[rows], weights, own, added)
    return found
