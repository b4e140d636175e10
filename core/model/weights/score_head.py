"""The score head of a checkpoint of a classifier (`…ForSequenceClassification`).

Tests: tests/core/test_pooling.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ....memory.files.score_head import MAX_LABELS, ScoreHead
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.open_checkpoint import open_checkpoint
from ..config_json import UnsupportedModel

WEIGHT, BIAS = "score.weight", "score.bias"


def read_score_head(directory: Path, hidden_size: int) -> ScoreHead:
    """Raises UnsupportedModel unless the checkpoint has a head for states of this size."""
    checkpoint = open_checkpoint(directory, (WEIGHT, BIAS))
    if WEIGHT not in checkpoint:
        raise UnsupportedModel(f"{directory}: tensor {WEIGHT} is missing from its weight files")
    labels = next(iter(checkpoint[WEIGHT].shape), 0)
    if not 0 < labels <= MAX_LABELS:
        raise UnsupportedModel(f"{directory}: {WEIGHT} has {labels} labels; from 1 to {MAX_LABELS} are supported")
    shapes: dict[str, tuple[int, ...]] = {WEIGHT: (labels, hidden_size)}
    if BIAS in checkpoint:
        shapes[BIAS] = (labels,)
    checkpoint.check(shapes)
    return ScoreHead(_read(checkpoint, WEIGHT), _read(checkpoint, BIAS) if BIAS in checkpoint else None)


def _read(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return checkpoint.read(name).to(torch.float32).numpy()
