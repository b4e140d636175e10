"""Identity of a server's KV: two servers with equal identities compute the same bytes for the same tokens.

Tests: tests/core/test_kv_identity.py
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from ..ops.library.native_library import level
from .model.read_config import read_model_config
from .model.specs.config import UnsupportedModel

if TYPE_CHECKING:
    from ..memory.disk.remembered import RememberedHashes
    from ..memory.pages.layout import PageLayout
    from .config import EngineConfig

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
_WEIGHTS = ("*.safetensors", "*.gguf", "*.bin", "config.json", "generation_config.json", "quantize_config.json")
_SETTINGS = (
    "dtype",
    "load_format",
    "quantization",
    "quantize_lm_head",
    "fp8_activations",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "max_model_len",
    "cpu_kernels",
    "share_prefix_cache",
    "state_checkpoint_tokens",
    "speculation",
)
"""Settings that change KV, its layout, or who may share it."""


def identity_of(config: EngineConfig, layout: PageLayout, device: str, remembered: RememberedHashes) -> dict[str, str]:
    """Return all that KV depends on besides adapters and tokens, by name.

    device: the kind of executor. remembered: has the hash of the checkpoint's files, which is used again while no file
    has changed.
    """
    settings = {name: str(getattr(config, name)) for name in _SETTINGS}
    return {
        **settings,
        "pages": repr({each.name: getattr(layout, each.name) for each in fields(layout) if each.init}),
        "device": device,
        "kernels": str(level()),
        "attention": config.attention if device != "CpuExecutor" else "",
        "weights": _weights_hash(config.model, remembered),
        "read as": _as_read(config),
    }


def _as_read(config: EngineConfig) -> str:
    """A hash of what the model's configuration is read as: a later version may read the same files otherwise, so that
    ropes, windows or scales differ. Empty for files that no real executor takes.
    """
    try:
        model = read_model_config(config.model, config.tokenizer)
    except UnsupportedModel:
        return ""
    return hashlib.sha256(repr(model).encode()).hexdigest()


def _weights_hash(model: Path, remembered: RememberedHashes) -> str:
    """The hash of a checkpoint's files, which is remembered while they are unchanged."""
    if model.is_file():
        files = [model]
    else:
        files = sorted({path for pattern in _WEIGHTS for path in model.glob(pattern) if path.is_file()})
    marks = json.dumps([_mark(path) for path in files])
    found = remembered.recall(marks)
    if found is None:
        began = time.monotonic()
        digest = hashlib.sha256()
        for path in files:
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
        found = digest.hexdigest()
        logger.info("hashed the checkpoint in %.1f s, for kv_cache_dir", time.monotonic() - began)
        remembered.remember(marks, found)
    return found


def _mark(path: Path) -> list[str | int]:
    """What changes when a file does."""
    status = path.stat()
    name = str(path.resolve())
    return [name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]
