"""Which experts of a mixture a token goes to, and their weights: what the router's kernels compute.

Pure data. Tests: tests/core/model/moe/test_experts.py, tests/ops/moe/test_native_mixture.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Scoring(StrEnum):
    """How a router's logits become the scores of experts, float32."""

    SOFTMAX = "softmax"
    """Over all experts: Mixtral, Qwen3."""

    SOFTMAX_OF_CHOSEN = "softmax of the chosen"
    """Experts are chosen by their logits, and the softmax is over the chosen ones alone: Granite."""

    SIGMOID = "sigmoid"
    """Of each by itself: GLM-4."""

    SIGMOID_OF_CHOSEN = "sigmoid of the chosen"
    """Experts are chosen by their logits, and the sigmoid is of the chosen ones alone: Llama 4."""

    SPARSE_MIXER = "sparse mixer"
    """A chosen expert's softmax is over the experts that were not chosen before it and whose logits are near its own:
    see `Routing.jitter` (Phi-3.5-MoE, arXiv 2409.12136).
    """


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts a token goes to, and their weights in the sum."""

    per_token: int
    """Experts of a token: those of the highest scores."""

    scoring: Scoring = Scoring.SOFTMAX

    renormalised: bool = False
    """The chosen experts' weights are divided by their sum."""

    epsilon: float = 0.0
    """Added to that sum."""

    factor: float = 1.0
    """Of the weights."""

    corrected: bool = False
    """A learned bias is added to the scores that choose, not to the weights."""

    groups: int = 1
    """Equal groups of neighbouring experts."""

    kept_groups: int = 1
    """Groups that a token may choose from: those with the highest sums of their best scores."""

    group_best: int = 2
    """How many best scores of a group are added up: two (DeepSeek-V3), or one (DeepSeek-V2)."""

    masked_score: float = -math.inf
    """Of experts whose group a token may not choose from; 0: they are chosen before those of kept groups whose score is
    below 0 (A.X K2)."""

    logits_factor: float = 1.0
    """Of the router's logits (Muse Spark)."""

    bias: bool = False
    """The router's logits have a bias."""

    jitter: float = 0.0
    """Of `SPARSE_MIXER`: a logit l is near the best one b unless `(b - l) / max(|l|, b) > 2 · jitter`."""

    scaled: bool = False
    """The weights are multiplied by a learned factor of each expert, after all else (Gemma 4)."""

    of_inputs: bool = False
    """The weights are of experts' inputs, not of their outputs, which are added up as they are (Llama 4). Experts have
    no biases then, so the weights are multiplied with the products of gate and up.
    """
