"""Identity of a replica: replicas of equal identity draw the same tokens from the same record."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.model.config import ModelConfig
from ..version import VERSION
from .wire import Malformed

if TYPE_CHECKING:
    from ...core.engine import Engine

WHOLE_BYTES = 64 << 20
"""A file of the model of at most this size is hashed whole; of a larger one `SAMPLES` pieces."""

SAMPLES = 64
SAMPLE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Identity:
    """What a replica computes with. model: hash of its files. level: of the kernels. version: Chorus's."""

    model: str
    dtype: str
    level: str
    version: str = VERSION

    def to_wire(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_wire(cls, data: Any) -> Identity:
        """Malformed for what `to_wire` does not give."""
        try:
            return cls(*(str(data[name]) for name in ("model", "dtype", "level", "version")))
        except (TypeError, KeyError, IndexError) as error:
            raise Malformed(f"a replica's identity can't be read: {error!r}") from None


def identity_of(engine: Engine) -> Identity:
    """The identity of an engine that has a model."""
    config = engine.config
    model = model_hash(config.model, dummy=config.load_format == "dummy")
    dtype = ModelConfig.read(config.model).dtype if config.dtype == "auto" else config.dtype
    return Identity(model, dtype, _level(config.cpu_kernels, config.device))


def _level(cpu_kernels: str, device: str) -> str:
    from ...core.executors.choice import uses_gpu
    from ...ops import native_library

    if uses_gpu(device):
        import torch

        return torch.cuda.get_device_name()
    return "torch" if cpu_kernels == "torch" else native_library.level() or "torch"


def model_hash(directory: Path, *, dummy: bool = False) -> str:
    """Hash of a checkpoint: its configuration, and names, sizes and bytes of its weights. dummy: without weights."""
    digest = hashlib.sha256(b"chorus model 1\n")
    patterns = ("config.json",) if dummy else ("config.json", "*.safetensors")
    for path in sorted(path for pattern in patterns for path in directory.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                digest.update(file.read())
                continue
            for index in range(SAMPLES):
                file.seek(index * (size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
