"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4,
          "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}  # fmt: skip
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([kmgt]?i?)b?", re.IGNORECASE)


def read_size(text: str) -> int:
    """Bytes: `2147483648`, `512MB` (of 1000), `2GiB` (of 1024). Raises ValueError."""
    found = _SIZE.fullmatch(text.strip().replace("_", ""))
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError("a size is a number of bytes, or one with a unit, such as 512MB or 2GiB")
    number, unit = found[1], _UNITS[found[2].lower()]
    return int(float(number) * unit) if "." in number else int(number) * unit
