"""Shapes and adapter directories for the memory tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chorus.core.model_config import ModelConfig


@pytest.fixture(scope="session")
def llama(subject: Callable[[str], Any]) -> tuple[Any, ModelConfig]:
    """The gqa subject and its model's shapes."""
    return subject("gqa"), ModelConfig.read(subject("gqa").model)
