"""Names of a base model, by which an adapter that was trained on another one is found out."""

from __future__ import annotations

import json
from pathlib import Path


def short_name(name: str) -> str:
    """The last part of a model's path or of its name on a hub, in small letters; of a hub's cache the model's name."""
    parts = [part for part in name.casefold().split("/") if part]
    cached = next((part for part in parts if part.startswith("models--")), None)
    return cached.rpartition("--")[2] if cached is not None else parts[-1] if parts else ""


def names_of(model: Path, served: str | None) -> frozenset[str]:
    """Short names of a checkpoint: of its directory, of what it was saved from, and the one that it is served under."""
    try:
        saved_from = json.loads((model / "config.json").read_bytes()).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        saved_from = None
    names = (str(model), str(model.resolve()), served, saved_from)
    return frozenset(short_name(name) for name in names if name and isinstance(name, str))
