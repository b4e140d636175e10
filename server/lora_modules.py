"""Adapters that are named on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from .adapter_requests import AdapterName

_NAME: TypeAdapter[str] = TypeAdapter(AdapterName)


class LoraModule(NamedTuple):
    """An adapter's name and its directory."""

    name: str
    path: Path


def read_lora_module(given: Any) -> LoraModule:
    """An adapter given as `NAME=DIR`, or as vLLM's JSON object with `name` and `path`. Raises ValueError."""
    if isinstance(given, str) and given.lstrip().startswith("{"):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is no JSON object: {error}") from None
    if isinstance(given, dict):
        name, path = given.get("name"), given.get("path")
    elif isinstance(given, str):
        name, _, path = given.partition("=")
    else:
        name, path = given
    if not name or not path:
        raise ValueError("an adapter is given as NAME=DIR")
    return LoraModule(_NAME.validate_python(name), Path(path))
