"""Opens a model's weights: from a checkpoint, or random ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..checkpoints.load_progress import progress
from ..checkpoints.quantization.round_to_nearest import RoundToNearest
from ..specs.config import ModelConfig
from .dummy_weights import DummyWeights
from .shard import WHOLE, Shard
from .weight_loader import WeightLoader
from .weights import Weights


@contextmanager
def open_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    load_format: str = "auto",
    device: torch.device | str = "cpu",
    shard: Shard = WHOLE,
    quantiser: RoundToNearest | None = None,
) -> Iterator[Weights]:
    """Yield a loader of a rank's share. While the context lasts it shows progress, if standard error is a terminal.

    quantiser: quantises the projections while they are read.
    load_format: `auto` reads the checkpoint on the host; `dummy` needs none and makes random weights on `device`.
    device: where steps use the weights, and where they are quantised.
    """
    if load_format == "dummy":
        dummy = DummyWeights(config, dtype, device, shard=shard)
        dummy.quantiser, dummy.quantises_on = quantiser, device
        yield dummy
        return
    loader = WeightLoader(directory, config, dtype, shard=shard)
    loader.quantiser, loader.quantises_on = quantiser, device
    if shard.rank:
        yield loader  # the first rank shows the progress
        return
    with progress(f"loading {directory.resolve().name}", loader.num_bytes, in_bytes=True) as loader.advance:
        yield loader
