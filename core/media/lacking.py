"""Which packages images need, and which of them are missing.

Tests: tests/core/media/test_lacking.py
"""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = {"PIL": "pillow", "torchvision": "torchvision", "num2words": "num2words"}
"""Modules, and the packages that have them."""

_INSTALL = "pip install 'chorus-lora[vision]'"


def why_lacking() -> str | None:
    """What is missing for images, and the remedy; None if nothing is. Nothing is imported."""
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if not missing:
        return None
    are = "is" if len(missing) == 1 else "are"
    return f"{' and '.join(missing)} {are} not installed: {_INSTALL}"
