"""The base model's projections as adapters with vectors (DoRA, biases) need them when they are read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from ....memory.files.error import AdapterFormatError
from ...config import EngineConfig
from ..checkpoints.quantization.round_to_nearest import RoundToNearest
from ..specs.config import ModelConfig, UnsupportedModel
from .weight_loader import WeightLoader

T = TypeVar("T")


class CheckpointWeights:
    """Reads projections from the checkpoint again, quantised and dequantised as they are served; see `BaseWeights`.

    Steps keep their weights packed, on a device, or shared among ranks, and may be using them. The checkpoint has the
    same values for all of them.
    """

    def __init__(
        self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, quantiser: RoundToNearest | None
    ) -> None:
        """model: of all ranks together."""
        self._config, self._model, self._dtype, self._quantiser = config, model, dtype, quantiser
        self._lock = threading.Lock()
        self._loader: WeightLoader | None = None

    def weight(self, layer: int, module: str) -> torch.Tensor:
        """See `BaseWeights.weight`. Raises AdapterFormatError if the checkpoint can't be read."""
        return self._read(lambda loader: loader.projection(layer, self._model.projections[module].path))

    def bias(self, layer: int, module: str) -> torch.Tensor | None:
        """See `BaseWeights.bias`."""
        path = self._model.projections[module].path
        if path not in self._model.composed(self._model.layers[layer]).biased:
            return None
        return self._read(lambda loader: loader.bias(layer, path))

    def _read(self, read: Callable[[WeightLoader], T]) -> T:
        if self._config.load_format == "dummy":
            raise AdapterFormatError(
                "load_format is 'dummy': an adapter with DoRA or biases is computed with the base model's weights, "
                "which are random; serve a checkpoint"
            )
        try:
            with self._lock:
                if self._loader is None:
                    self._loader = WeightLoader(self._config.model, self._model, self._dtype)
                    self._loader.quantiser = self._quantiser
                return read(self._loader)
        except (OSError, UnsupportedModel) as error:
            raise AdapterFormatError(
                f"{self._config.model}: the base model's weights can't be read again, which an adapter with DoRA or "
                f"biases needs: {error}; keep the checkpoint where it is"
            ) from error
