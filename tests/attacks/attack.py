"""A request meant to break the server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Attack:
    """A request meant to break the server."""

    name: str
    path: str
    body: bytes


def attack(name: str, path: str, /, **body: Any) -> Attack:
    return Attack(name, path, json.dumps(body, separators=(",", ":")).encode())
