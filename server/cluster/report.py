"""Reports of a replica to its fronts: what it is, and how it is; and sums of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from ...core.engine_stats import AccountStats, EngineStats
from ...core.executors.base import ModelInfo
from ...core.model.config import ModelConfig
from ..version import VERSION
from .wire import Malformed

if TYPE_CHECKING:
    from ...core.engine import Engine


WHOLE_BYTES = 64 << 20
"""A file of the model of at most this size is hashed whole; of a larger one `SAMPLES` pieces."""

SAMPLES = 64
SAMPLE_BYTES = 256 << 10


class Told:
    """What one process tells another of itself, as plain data for a frame."""

    __slots__ = ()

    def to_wire(self) -> dict[str, Any]:
        return _adapter(type(self)).dump_python(self, mode="json")

    @classmethod
    def from_wire(cls, data: Any) -> Self:
        """Malformed for what `to_wire` does not give."""
        try:
            return _adapter(cls).validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            at = ".".join(map(str, first["loc"]))
            raise Malformed(f"a replica's {cls.__name__.lower()} can't be read: {at}: {first['msg']}") from None


_adapter = cache(TypeAdapter)
_MODEL: TypeAdapter[tuple[int, int, tuple[int, ...]]] = TypeAdapter(tuple[int, int, tuple[int, ...]])

_Model = Annotated[
    ModelInfo,
    PlainValidator(lambda told: ModelInfo(*_MODEL.validate_python(told))),
    PlainSerializer(lambda model: (model.vocab_size, model.max_model_len, model.eos_token_ids)),
]
"""Without the model's grammars, which a front has no use for."""


@dataclass(frozen=True, slots=True)
class Identity(Told):
    """What a replica computes with. model: hash of its files. level: of the kernels. version: Chorus's."""

    model: str
    dtype: str
    level: str
    version: str


def identity_of(engine: Engine) -> Identity:
    """The identity of an engine that has a model."""
    config = engine.config
    model = model_hash(config.model, dummy=config.load_format == "dummy")
    dtype = ModelConfig.read(config.model).dtype if config.dtype == "auto" else config.dtype
    return Identity(model, dtype, _level(config.cpu_kernels, config.device), VERSION)


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


@dataclass(frozen=True, slots=True)
class Hello(Told):
    """A replica's first words."""

    identity: Identity
    model: _Model
    max_num_seqs: int
    max_adapters: int
    block_tokens: int
    pid: int

    @classmethod
    def of(cls, engine: Engine, pid: int) -> Hello:
        config = engine.config
        most = config.max_adapters_per_step or config.max_num_seqs
        return cls(identity_of(engine), engine.model, config.max_num_seqs, most, engine.block_tokens, pid)


@dataclass(frozen=True, slots=True)
class Report(Told):
    """A replica at one moment.

    num_yours: requests of the front that it is sent to. tiers: of adapters that are not only on disk, by content hash.
    running, waiting: names of adapters. overflowing: content hashes of adapters to set aside. costs: of its steps and
    transfers, see `step_costs`; empty before the first step.
    """

    stats: EngineStats
    num_yours: int = 0
    draining: bool = False
    tiers: dict[str, str] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    accounts: list[AccountStats] = field(default_factory=list)
    overflowing: list[str] = field(default_factory=list)
    costs: dict[str, float] = field(default_factory=dict)
