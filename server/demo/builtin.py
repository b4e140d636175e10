"""Paths of the built-in model."""

from pathlib import Path

BUILTIN_NAME = "chorus-builtin"
BUILTIN_MODEL = Path(__file__).parent / "model" / "base"
BUILTIN_ADAPTERS = Path(__file__).parent / "model" / "adapters"
