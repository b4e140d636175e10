"""Reports of a replica to its fronts: what it is, and how it is; and sums of them."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.engine_stats import AccountStats, EngineStats
from ...core.executors.base import ModelInfo
from ...core.model.config import ModelConfig
from ...core.requests.types import StepInfo
from ...graphs.runner import StepMode
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


@dataclass(frozen=True, slots=True)
class Hello:
    """A replica's first words."""

    identity: Identity
    model: ModelInfo
    max_num_seqs: int
    max_adapters: int
    block_tokens: int
    pid: int

    @classmethod
    def of(cls, engine: Engine, pid: int) -> Hello:
        config = engine.config
        most = config.max_adapters_per_step or config.max_num_seqs
        return cls(identity_of(engine), engine.model, config.max_num_seqs, most, engine.block_tokens, pid)

    def to_wire(self) -> dict[str, Any]:
        return {
            "identity": self.identity.to_wire(),
            "model": [self.model.vocab_size, self.model.max_model_len, list(self.model.eos_token_ids)],
            "max_num_seqs": self.max_num_seqs, "max_adapters": self.max_adapters, "block_tokens": self.block_tokens,
            "pid": self.pid,
        }  # fmt: skip

    @classmethod
    def from_wire(cls, data: Any) -> Hello:
        """Malformed for what `to_wire` does not give."""
        try:
            vocab, length, ends = data["model"]
            model = ModelInfo(int(vocab), int(length), tuple(map(int, ends)))
            counts = (int(data[name]) for name in ("max_num_seqs", "max_adapters", "block_tokens", "pid"))
            return cls(Identity.from_wire(data["identity"]), model, *counts)
        except (TypeError, ValueError, KeyError) as error:
            raise Malformed(f"a replica's hello can't be read: {error!r}") from None


@dataclass(frozen=True, slots=True)
class Report:
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

    def to_wire(self) -> dict[str, Any]:
        stats = {name: getattr(self.stats, name) for name in _STATS}
        stats["last_step"] = None if self.stats.last_step is None else list(self.stats.last_step)
        stats["mode"] = self.stats.mode.value
        accounts = [[one.name, one.num_running, one.num_waiting, one.standing] for one in self.accounts]
        plain = {name: getattr(self, name) for name in _PLAIN}
        return {"stats": stats, "accounts": accounts, **plain}

    @classmethod
    def from_wire(cls, data: Any) -> Report:
        """Malformed for what `to_wire` does not give."""
        try:
            stats = {name: data["stats"][name] for name in _STATS}
            stats["last_step"] = None if stats["last_step"] is None else StepInfo(*stats["last_step"])
            stats["mode"] = StepMode(stats["mode"])
            stats["step_sizes"] = tuple(map(int, stats["step_sizes"]))
            accounts = [AccountStats(*one) for one in data["accounts"]]
            return cls(EngineStats(**stats), accounts=accounts, **{name: data[name] for name in _PLAIN})
        except (TypeError, ValueError, KeyError) as error:
            raise Malformed(f"a replica's report can't be read: {error!r}") from None


_STATS = [one.name for one in fields(EngineStats)]
_PLAIN = [one.name for one in fields(Report) if one.name not in ("stats", "accounts")]
