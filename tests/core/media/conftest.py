"""Engines of tests share what they read of a kept checkpoint to encode images: its image processor and its tower."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from chorus.core.media import serving, tower
from chorus.core.media.serving import CheckpointRows
from chorus.core.model.specs.config import ModelConfig

from ...kept import kept_root


@lru_cache(4)
def _kept(directory: Path, dtype: torch.dtype, _: Any) -> CheckpointRows:
    """Tests that read it are run one after the other, and each engine ends its encoder's thread."""
    from chorus.core.model.read_config import read_model_config

    return CheckpointRows(directory, read_model_config(directory), dtype, torch.device("cpu"))


def _rows(directory: Path, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> CheckpointRows:
    if kept_root() not in directory.parents:
        return CheckpointRows(directory, model, dtype, device)
    return _kept(directory, dtype, tower.Tower)  # which some tests replace


@pytest.fixture(autouse=True)
def _towers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "CheckpointRows", _rows)
