"""Reports of a replica to its API servers: its identity, its state, and the costs of its steps."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from ...core.costs.models import CostModel, DiskCost, Kernel, StepCost, TransferCost
from ...core.engine_stats import EngineStats, TenantStats
from ...core.executors.base import EngineLimits, ModelInfo
from ...core.expert_share import share_of_experts
from ...core.merging.learned_prices import LearnedPrices
from ...core.model.checkpoints.quantization.registry import FILES as QUANTIZATION_FILES
from ...core.model.read_config import read_model_config
from ...core.requests.blocks import Blocks
from ...memory.adapters.adapter_costs import AdapterCost
from ..version import VERSION
from .wire import Malformed

if TYPE_CHECKING:
    from ...core.engine import Engine
    from ...core.merging.step_samples import StepSample


WHOLE_BYTES = 64 << 20
"""A file of the model of at most this size is hashed whole; of a larger one, `SAMPLES` pieces."""

SAMPLES = 64
SAMPLE_BYTES = 256 << 10


class Told:
    """A message in which one process describes itself, as plain data for a frame."""

    __slots__ = ()

    def to_wire(self) -> dict[str, Any]:
        return _adapter(type(self)).dump_python(self, mode="json")

    @classmethod
    def from_wire(cls, data: Any) -> Self:
        """Parse the result of `to_wire`. Raises Malformed for anything else."""
        try:
            return _adapter(cls).validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            at = ".".join(map(str, first["loc"]))
            raise Malformed(f"a replica's {cls.__name__.lower()} can't be read: {at}: {first['msg']}") from None


_adapter = cache(TypeAdapter)
_MODEL: TypeAdapter[tuple[int, int, tuple[int, ...], int | None]] = TypeAdapter(
    tuple[int, int, tuple[int, ...], int | None]
)

_Model = Annotated[
    ModelInfo,
    PlainValidator(lambda told: ModelInfo(*_MODEL.validate_python(told))),
    PlainSerializer(lambda model: (model.vocab_size, model.max_model_len, model.eos_token_ids, model.window)),
]
"""Without the model's grammars, which an API server does not need."""


@dataclass(frozen=True, slots=True)
class ModelIdentity(Told):
    """The model, kernels and version that a replica computes with."""

    model: str
    """Hash of the model's files."""
    dtype: str
    level: str
    """Version of the kernels."""
    version: str
    """Version of Chorus."""


def identity_of(engine: Engine) -> ModelIdentity:
    """The identity of an engine that has a model."""
    config = engine.config
    form = f"{config.quantization}{' with lm_head' * config.quantize_lm_head}" if config.quantization else ""
    form += " with FP8 activations" * config.fp8_activations
    kv = "" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    model = model_hash(config.model, dummy=config.load_format == "dummy", form=form, kv=kv)
    dtype = read_model_config(config.model).dtype if config.dtype == "auto" else config.dtype
    return ModelIdentity(model, dtype, _level(config.cpu_kernels, config.device), VERSION)


def _level(cpu_kernels: str, device: str) -> str:
    from ...core.executors.choice import uses_gpu
    from ...ops.library import native_library

    if uses_gpu(device):
        import torch

        return torch.cuda.get_device_name()
    return "torch" if cpu_kernels == "torch" else native_library.level() or "torch"


def model_hash(directory: Path, *, dummy: bool = False, form: str = "", kv: str = "") -> str:
    """Hash of a checkpoint: its configuration with the form of its weights, and their names, sizes and bytes.

    dummy: without weights. form: what weights are quantised to while they are read; empty: nothing. kv: dtype of the KV
    cache, whose rounding changes outputs as the weights' does; empty: the model's.
    """
    digest = hashlib.sha256(b"chorus model 1\n")
    if form:
        digest.update(f"quantised to {form}\n".encode())
    if kv:
        digest.update(f"KV cache in {kv}\n".encode())
    patterns = ("config.json", *QUANTIZATION_FILES) + (() if dummy else ("*.safetensors", "*.gguf"))
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
    """A replica's first frame."""

    identity: ModelIdentity
    model: _Model
    max_num_seqs: int
    max_adapters: int
    block_tokens: int
    pages_per_token: float
    pid: int
    speculates: bool = False
    """See `ModelInfo.speculates`; replicas of earlier versions don't say."""
    limits: EngineLimits | None = None
    """See `ModelInfo.limits`."""
    page_bytes: int = 0
    """Of a page, so that host memory of cached prefixes can be counted in tokens; 0 from earlier versions."""
    kv_folder: str = ""
    """Equal for replicas that find each other's cached prefixes in files; empty without such a folder."""
    why_blind: str | None = "its replicas are of an earlier version"
    """See `ModelInfo`, as of the next four."""
    image_token: int | None = None
    image_marks: tuple[int, ...] = ()
    image_blocks: Blocks | None = None
    most_images: int | None = None

    @property
    def model_info(self) -> ModelInfo:
        """All that it tells of the model."""
        return replace(
            self.model,
            speculates=self.speculates,
            limits=self.limits,
            why_blind=self.why_blind,
            image_token=self.image_token,
            image_marks=tuple(self.image_marks),
            image_blocks=self.image_blocks,
            most_images=self.most_images,
        )

    @classmethod
    def of(cls, engine: Engine, pid: int) -> Hello:
        config = engine.config
        most = config.max_adapters_per_step or config.max_num_seqs
        return cls(
            identity_of(engine),
            model=engine.model,
            max_num_seqs=config.max_num_seqs,
            max_adapters=most,
            block_tokens=engine.block_tokens,
            pages_per_token=engine.pages_per_token,
            pid=pid,
            speculates=engine.model.speculates,
            limits=engine.model.limits,
            page_bytes=engine.executor.layout.page_bytes,
            kv_folder="" if engine.disk is None else engine.disk.shared_name,
            why_blind=engine.model.why_blind,
            image_token=engine.model.image_token,
            image_marks=engine.model.image_marks,
            image_blocks=engine.model.image_blocks,
            most_images=engine.model.most_images,
        )


@dataclass(frozen=True, slots=True)
class Report(Told):
    """A replica at one moment."""

    stats: EngineStats
    num_yours: int = 0
    """Requests of the API server that receives the report."""
    draining: bool = False
    tiers: dict[str, str] = field(default_factory=dict)
    """Tiers of adapters that are not only on disk, by content hash."""
    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    """Names of adapters."""
    tenants: list[TenantStats] = field(default_factory=list)
    overflowing: list[str] = field(default_factory=list)
    """Content hashes of adapters to quarantine."""
    costs: dict[str, float] = field(default_factory=dict)
    """Learned costs of its steps and transfers, see `LearnedCosts`; empty before the first step."""
    spent: list[AdapterCost] | None = None
    """What adapters have cost so far, by content hash; only in one of several reports."""


_DECODE_TERMS = ("base", "per_row", "per_kv_token", "lora", "per_rank", "per_adapter_rank", "experts")
"""Terms of `StepCost`, in the order of `LearnedPrices.terms`."""

_WEIGHT = 0.2
"""Weight of a prefill step in the learned price of a prompt token, the same as for the engine's other estimates."""


class LearnedCosts:
    """Prices of an engine's steps, learned from one step per report: more would slow down all of them."""

    def __init__(self, expert_share: float = 0.0) -> None:
        """expert_share: of the model, see `StepCost`."""
        self._prices, self._expert_share = LearnedPrices(expert_share), expert_share
        self._has_learned = False
        self._per_token: float | None = None  # per prompt token

    def observe(self, engine: Engine) -> dict[str, float]:
        """Learn from a decode step and a prefill step, on the engine's thread, and return the current values.

        These are terms of `StepCost`, and seconds per byte for reading an adapter (disk) and copying it from the host
        (link).
        """
        if (step := engine.samples.take_decode()) is not None:
            self._prices.observe(step.batch, step.merged, step.context, step.seconds)
            self._has_learned = True
        if not self._has_learned:
            return {}
        if (step := engine.samples.take_prefill()) is not None:
            self._observe_prefill(step)
        terms = dict(zip(_DECODE_TERMS, self._prices.terms, strict=True))
        per_token = engine.costs.prefix_page * engine.pages_per_token if self._per_token is None else self._per_token
        page = engine.executor.layout.page_bytes
        return {
            **terms,
            "per_token": per_token,
            "per_row": max(0.0, terms["per_row"] - per_token),  # each decoding sequence has one token
            "expert_share": self._expert_share,
            "disk": engine.costs.disk_adapter_page / page,
            "link": engine.costs.host_adapter_page / page,
        }

    def _observe_prefill(self, step: StepSample) -> None:
        """Learn what a prompt token adds to a decode step of the same size, whose own price is known."""
        more = step.num_tokens - step.num_sequences
        if not more:  # prompts of one token, in blocks of one
            return
        seconds = step.seconds - self._prices.step_seconds(step.batch, step.merged, step.context)
        decoded, all_tokens = (
            share_of_experts(self._expert_share, count) for count in (step.num_sequences, step.num_tokens)
        )
        seconds -= self._prices.terms[-1] * (all_tokens - decoded)
        found = max(0.0, seconds) / more
        self._per_token = found if self._per_token is None else self._per_token + _WEIGHT * (found - self._per_token)


def mean_costs(told: Sequence[Mapping[str, float]]) -> CostModel:
    """Return the mean of the costs that replicas have reported, at least one: replicas are assumed to be alike."""

    def mean(name: str) -> float:
        return sum(one.get(name, 0.0) for one in told) / len(told)

    step = StepCost(**{name: mean(name) for name in (*_DECODE_TERMS, "expert_share", "per_token")})
    return CostModel(Kernel.SGMV, step, DiskCost(per_byte=mean("disk")), TransferCost(per_byte=mean("link")))
