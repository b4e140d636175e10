"""Prints what the project needs, with the extras that are named, a requirement a line."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())["project"]


def requirements(extra: str) -> Iterator[str]:
    """Yield those of an extra, and of the extras that it names."""
    for each in PROJECT["optional-dependencies"][extra]:
        if own := re.fullmatch(r"chorus-lora\[(.*)\]", each):
            for name in own[1].split(","):
                yield from requirements(name)
        else:
            yield each


print(*PROJECT["dependencies"], *(each for extra in sys.argv[1:] for each in requirements(extra)), sep="\n")
