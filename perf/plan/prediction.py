"""Profiles predicted from a model's config.json and a GPU's published figures, at efficiencies measured on an H100.

The efficiencies are those of the run perf/results/h100-2026-11-22-e391802 (Llama-3.1-8B's shapes, bf16); a test
recomputes them from its file. One device can't tell whether its steps exceed their floor by a share, or by launches
that take equally long on any GPU. A prediction uses whichever of the two is longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...core.config import EngineConfig
from ...core.costs.profile import Geometry, Number, Profile, Terms, Whole
from ...core.model.checkpoints.quantization.round_to_nearest import Name, quantiser_of
from ...core.model.read_config import read_model_config
from ...core.model.specs.config import ModelConfig
from ...core.model.weights.narrow_bytes import weight_bytes
from ...memory.pages.states import FLOAT_BYTES
from .requests import PlanError

_PCIE_5, _PCIE_4 = 64e9, 32e9  # 16 lanes, one way


@dataclass(frozen=True, slots=True)
class Gpu:
    """Published figures: bytes of memory, its bytes per second, dense bf16 FLOP/s, bytes per second from the host."""

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float
    source: str
    note: str = ""
    """A note that a reader of the prediction needs."""


GPUS = {
    "h100": Gpu("NVIDIA H100 SXM 80 GB", 80e9, 3.35e12, 989.4e12, _PCIE_5, source="NVIDIA H100 datasheet"),
    "h200": Gpu("NVIDIA H200 SXM 141 GB", 141e9, 4.8e12, 989.4e12, _PCIE_5, source="NVIDIA H200 datasheet"),
    "a100": Gpu("NVIDIA A100 SXM 80 GB", 80e9, 2.039e12, 312e12, _PCIE_4, source="NVIDIA A100 datasheet"),
    "l40s": Gpu("NVIDIA L40S 48 GB", 48e9, 864e9, 362e12, _PCIE_4, source="NVIDIA L40S datasheet"),
    "l4": Gpu(
        "NVIDIA L4 24 GB", 24e9, 300e9, 121e12, _PCIE_4, source="NVIDIA L4 datasheet, half of its rate with sparsity"
    ),
    "b200": Gpu(
        "NVIDIA B200 180 GB", 180e9, 8e12, 2250e12, _PCIE_5, source="NVIDIA DGX B200 datasheet, an eighth of it"
    ),
    "mi300x": Gpu(
        "AMD MI300X 192 GB",
        192e9,
        5.3e12,
        1307.4e12,
        _PCIE_5,
        source="AMD MI300X datasheet",
        note="Chorus has no kernels for AMD GPUs: this is what they would take at the efficiency measured on an H100",
    ),
}


def gpu_named(name: str) -> Gpu:
    """Look up a GPU. Raises PlanError with the known names."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        known = ", ".join(GPUS)
        raise PlanError(
            f"--gpu is {name!r}; use one of {known}, or profile:FILE with a profile that `chorus profile` measured"
        ) from None


READ, MULTIPLY, COPY = 0.929, 0.791, 0.795
"""Shares of the published memory bandwidth, bf16 rate and link that plain reads, GEMMs and copies reached."""

STEP_SHARE, STEP_PER_LAYER = 0.273, 41.1e-6
"""Factor by which a decode step is longer than reading the weights: the line through steps of 1 to 64 sequences,
at 0.
"""

ROW_PER_LAYER, KV_READ = 0.356e-6, 0.82
"""Time of each sequence in addition to its KV, and the share of `READ` at which attention reads the KV (64 sequences of
1,024 tokens).
"""

RAGGED_PER_LAYER = 111e-6
"""Factor by which a step with a short prompt, which is not captured, is longer than a decode step of one sequence."""

PREFILL_MULTIPLY, PREFILL_ATTEND = 0.803, 0.515
"""Shares of `MULTIPLY` in prefill, from prompts of 512, 2,048 and 8,192 tokens."""

LORA_PER_LAYER, ADAPTER_READ, LORA_MULTIPLY = 17.0e-6, 0.839, 0.0465
"""LoRA: seconds per step; the share of `READ` at which slabs are read; of `MULTIPLY` for prompts (rank 16)."""

RESERVED_BYTES = 2 << 30
"""Reserved for activations and captured graphs: an assumption."""

DISK_BYTES_PER_SECOND, DISK_LATENCY, LINK_LATENCY = 3e9, 1e-4, 1e-5
"""Rates of an NVMe drive and of a copy: assumptions."""

_BYTES = {"bfloat16": 2, "float16": 2}
_GIB = 1 << 30


def predicted_profile(
    directory: Path, gpu: Gpu, *, quantization: Name | None = None, float8_kv: bool = False
) -> Profile:
    """Predict a profile. quantization, float8_kv: as the engine's settings. Narrow weights and a KV cache in FP8 are
    taken to be read at the same shares of the memory's bandwidth; steps with prompts widen the weights.
    Raises PlanError for a model that can't be predicted or does not fit; UnsupportedModel for one that can't be served.
    """
    model = read_model_config(directory)
    if model.dtype not in _BYTES:
        raise PlanError(
            f"--model {directory}: dtype is {model.dtype}, which a GPU's published bf16 rate does not cover; give a "
            "checkpoint in bfloat16, or measure one with `chorus profile` and give --gpu profile:FILE"
        )
    if not model.attention_layers:
        raise PlanError(
            f"--model {directory}: no layer has attention, so that a request's memory is its states, which plans do "
            "not count"
        )
    size, layers = _BYTES[model.dtype], model.num_layers
    whole = sum(it.num_parts for it in model.layers) / 2  # of those that were measured, each has two
    every = [each for layer in model.projections.layers for each in layer]
    in_experts = sum(each.num_weights for each in every if each.experts)
    in_layers = sum(each.num_weights for each in every) - in_experts
    share = model.experts.share_per_token if model.experts else 0.0
    used = in_layers + share * in_experts  # of one token
    in_head = model.vocab_size * model.hidden_size
    kept = weight_bytes(model, size, quantiser_of(quantization, False, model.weight_format))
    read, multiply = gpu.bandwidth * READ, gpu.flops * MULTIPLY
    per_rank = model.projections.rank_elems()
    kept_parts = 1 if model.latent else 2
    kv_bytes = kept_parts * sum(mixer.kv_shape.elems for mixer in model.attention_layers) * (1 if float8_kv else size)
    # of a score, and of what is attended
    pair_elems = sum(mixer.num_heads * (mixer.head_dim + mixer.attended_dim) for mixer in model.attention_layers)
    floor = (kept.projections + share * kept.experts + kept.head) / read
    step = {
        "base": max(STEP_SHARE * floor, STEP_PER_LAYER * whole),
        "ragged": RAGGED_PER_LAYER * whole + 2 * kept.dense / read,  # widened weights are written, then read
        "weights": kept.projections / read,
        "per_token": 2 * used / (multiply * PREFILL_MULTIPLY),
        "head": kept.head / read,
        "per_logits": 2 * in_head / multiply,
        "per_row": ROW_PER_LAYER * whole + 2 * _state_bytes(model) / read,
        "per_kv_token": kv_bytes / (read * KV_READ),
        "per_pair": 2 * pair_elems / (multiply * PREFILL_ATTEND),
        "lora": LORA_PER_LAYER * whole,
        "per_token_rank": 2 * per_rank / (multiply * LORA_MULTIPLY),
        "per_adapter_rank": size * per_rank / (read * ADAPTER_READ),
    }
    if share:
        step |= {"experts": kept.experts / read, "expert_share": share}
    return Profile(
        name=f"{directory.resolve().name}-{gpu.name}",
        device=gpu.name,
        model=f"{model.architecture}, {layers} layers, hidden size {model.hidden_size}",
        source=f"predicted from config.json and {gpu.source}, at efficiencies measured on an H100",
        kernel="sgmv",
        geometry=Geometry.of(model, model.max_context, size, float8_kv=float8_kv, value_dim=model.cached_value_dim),
        memory_bytes=Whole(
            value=_arena(directory, gpu, kept.total, model.dtype), source="memory that the weights leave"
        ),
        step=_terms(step, "predicted"),
        disk=_terms({"latency": DISK_LATENCY, "per_byte": 1 / DISK_BYTES_PER_SECOND}, "assumed"),
        link=_terms({"latency": LINK_LATENCY, "per_byte": 1 / (gpu.link * COPY)}, "predicted"),
    )


def _state_bytes(model: ModelConfig) -> int:
    """Bytes of a sequence's recurrent states, which a step reads and writes."""
    if model.recurrent is None:
        return 0
    further = 0 if model.lookup is None else model.lookup.state_elems * model.num_lookups
    return FLOAT_BYTES * (model.recurrent.state_elems * model.num_recurrent_layers + further)


def _arena(directory: Path, gpu: Gpu, weights: int, dtype: str) -> int:
    """Bytes that the weights leave of the memory that the engine uses by default."""
    share = EngineConfig.model_fields["gpu_memory_utilization"].default
    left = int(gpu.memory * share) - weights - RESERVED_BYTES
    if left > 0:
        return left
    fit = [name for name, one in GPUS.items() if one.memory * share > weights + RESERVED_BYTES]
    fix = f"take one of {', '.join(fit)}" if fit else "no single GPU of the list has room: plan with a smaller model"
    raise PlanError(
        f"--model {directory}: its weights take {weights / _GIB:.1f} GiB in {dtype}, and {gpu.name} has room for "
        f"{max(0.0, gpu.memory * share - RESERVED_BYTES) / _GIB:.1f} GiB of them; {fix}"
    )


def _terms(values: dict[str, float], source: str) -> Terms:
    return Terms(terms={name: Number(value=value, source=source) for name, value in values.items()})
