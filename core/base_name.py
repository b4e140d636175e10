"""Names of a base model, by which an adapter that was trained on another one is found out."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ..memory.files.config import CONFIG_FILE
from ..memory.files.error import AdapterFormatError, shown
from ..memory.files.manifest import AdapterManifest

_FORMAT = re.compile(
    r"[-_.](?:unsloth|bnb|nf4|(?:nv|mx)fp4(?:a16|_moe)?|fp[48](?:[-_.](?:block|static))?(?:[-_.]kv)?|float8|fp16|bf16|f16|f32|fp32"
    r"|[2-8]-?bit|int[2348]|w[0-9]+a[0-9]+|g[0-9]+|[0-9]+g|awq|gptq|gptqmodel|gguf"
    r"|asym|ud|tq[12]_0|exl2|hqq|aqlm|marlin|autoround|torchao|mlx|dwq|hf|dynamic|quantized(?:[-_.]w[0-9]+a[0-9]+)?|i?q[2-8](?:_[a-z0-9]+)*)$"
)
"""Ends of names that tell of a model's format: quantized or converted, it is the same model."""


def short_name(name: str) -> str:
    """The last part of a model's path or of its name on a hub, in small letters and without the part that names its
    format; of a hub's cache the model's name.
    """
    parts = [part for part in name.casefold().split("/") if part]
    cached = next((part for part in parts if part.startswith("models--")), None)
    short = cached.rpartition("--")[2] if cached is not None else parts[-1] if parts else ""
    while (found := _FORMAT.search(short)) is not None and found.start():
        short = short[: found.start()]
    return short


def names_of(model: Path, served: str | None) -> frozenset[str]:
    """Short names of a checkpoint: of its directory, of its origin, and the one that it is served under."""
    try:
        saved_from = json.loads((model / "config.json").read_bytes()).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        saved_from = None
    names = (str(model), str(model.resolve()), served, saved_from)
    return frozenset(short_name(name) for name in names if name and isinstance(name, str))


def named_base(adapter: Path) -> str | None:
    """The base model that an adapter's directory names, whether the adapter can be served or not. None if its
    configuration can't be read, names no model, or has unprintable characters in the name.
    """
    try:
        base = json.loads((adapter / CONFIG_FILE).read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return base if isinstance(base, str) and base.isprintable() and base else None


def with_base(manifest: AdapterManifest, names: Collection[str], *, strict: bool) -> AdapterManifest:
    """The manifest with whether the adapter says that it was trained on another model than the one of these names.

    strict: raise AdapterFormatError for such an adapter.
    """
    if manifest.base_model is None or short_name(manifest.base_model) in names:
        return manifest
    if strict:
        base = shown(manifest.base_model)
        raise AdapterFormatError(
            f"{manifest.path}: was trained on {base}, which is not the model that is served; serve that one, "
            "give its name in served_model_name if it is, or leave strict_base out"
        )
    return replace(manifest, names_other_base=True)
