"""Served families by architecture: the registry collects them from the modules of this folder.

A module, or `family.py` in a folder of one family, names its `Family` objects without an underscore. One without an
architecture is part of another.

Tests: tests/core/paths, tests/core/test_families.py, tests/core/model/specs/test_model_config.py
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from ..specs.family import Family


def _named() -> Iterator[Family]:
    for module in iter_modules([str(Path(__file__).parent)]):
        if module.name == Path(__file__).stem:
            continue
        within = import_module(f".{module.name}.family" if module.ispkg else f".{module.name}", __package__)
        for name, each in vars(within).items():
            if isinstance(each, Family) and each.architectures and not name.startswith("_"):
                yield each


ALL = tuple(sorted({id(each): each for each in _named()}.values(), key=lambda each: each.title.casefold()))
"""The families by title."""

FAMILIES = {architecture: family for family in ALL for architecture in family.architectures}
"""A checkpoint's architecture → its family."""

OF_TYPES = {model_type: family for family in ALL for model_type in family.model_types}
"""A checkpoint's `model_type` → its family, where architectures don't tell families apart."""
