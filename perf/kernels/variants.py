"""Every variant of the Triton kernels, compiled for GPUs that need not be present: its resources and limits.

Tests: tests/perf/kernels/test_kernels.py
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.requests.draft_length import MOST_DRAFTS
from ...memory.host.child_python import spawn_context
from ...ops.attention.attention_schedule import LEAST_FLOAT8, attention_constants, attention_options, largest_head
from ...ops.attention.latents_schedule import latent_lora_constants, latent_lora_options
from ...ops.dependent_launch import LEAST_MAJOR
from ...ops.elementwise import elementwise_schedule
from ...ops.elementwise.elementwise_schedule import GatedConstants, Gating, HeadNorming
from ...ops.gemm import small_gemm_schedule as small
from ...ops.gemm import swapped_gemm_schedule as swapped
from ...ops.gemm.float8_rows_schedule import RoundConstants
from ...ops.gemm.narrow_weights import FLOAT4_GROUP
from ...ops.gemm.narrow_weights_schedule import WIDEN_WARPS, WidenConstants
from ...ops.gemm.split_gemm_schedule import SplitConstants, split_options
from ...ops.lora.sgmv_schedule import (
    ExpandShape,
    Schedule,
    SgmvShape,
    decode,
    expand_constants,
    prefill,
    shrink_constants,
)
from ...ops.lora.sgmv_tables import place_blocks, place_pages, place_window
from ...ops.lora.sgmv_tiles import MERGED_TERMS
from ...ops.lora.vectors_schedule import vector_constants, vector_options
from ...ops.mixers import gated_delta_schedule
from ...ops.moe import expert_tiles_schedule, routing_schedule
from ...ops.moe.mixture_tables import TileWriter
from ...ops.moe.routing import Routing, Scoring
from ...ops.moe.routing_schedule import SortConstants, SumConstants, choice_constants, sort_block
from ...ops.sampling import sampling_schedule
from ..bench.models.sizes import SIZES

if TYPE_CHECKING:
    from .compiled_triton import Job

#: Llama-3.1-8B: inputs, and (module id, first column, width) of projections that share them.
GROUPS = SIZES["llama-3.1-8b"].geometry.groups
PAGE_ELEMS = 1 << 20
_MODULES = 16
"""Of the tables of a model."""

SLAB_ELEMS = sum(d_in + width for d_in, modules in GROUPS.values() for _, _, width in modules)

#: Launches of groups with this prefix are those of steps with merged weights: a tile has several records.
_MERGED = "merged."

#: Most shared memory of a program: GPUs of compute capability 8.6, 8.9 and 12.0 have 99 KiB for one, the fewest.
SHARED_LIMIT = 99 * 1024

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}

#: Pointers to memory that exists before a step's first launch.
_READY = {"arena", "data", "scales", "zeros", "bias", "norm", "indptr", "last_page_len", "indices"}
_READY |= {"tiles", "offsets", "places", "first_elem", "pages", "weight"}


def _types(text: str) -> dict[str, str]:
    """Types by name from `a b: TYPE, c: TYPE`."""
    parts = (each.rpartition(": ") for each in text.split(", "))
    return {name: kind for names, _, kind in parts for name in names.split()}


Fields = tuple[tuple[str, str], ...]
"""Pointers that are one argument: the names of its fields, with their types."""

_FILE = tomllib.loads(Path(__file__).with_name("signatures.toml").read_text("utf-8"))
_GROUPS: dict[str, Fields] = {name: tuple(_types(text).items()) for name, text in _FILE["groups"].items()}
_ADAPTERS = _GROUPS["adapters"]

#: Kernel → its module of `ops`, and its arguments with their types.
_SIGNATURES: dict[str, tuple[str, dict[str, str | Fields]]] = {
    kernel: (module, {name: _GROUPS.get(kind, kind) for name, kind in _types(text).items()})
    for module, kernels in _FILE["kernels"].items()
    for kernel, text in kernels.items()
}


def _weight_fields(form: small.WeightForm) -> Fields:
    if form is small.FULL:
        return _GROUPS["weight"]
    numbers = "*fp32" if not form.float4 else "*u8"
    return ("data", "*i32" if form.unit == 32 else "*u8"), ("scales", numbers), ("zeros", numbers)


_COUNTS = {"layer": "i32", "layers": "i32", "max_pages": "i32", "tokens": "i32"}


class Elementwise(NamedTuple):
    """A launch that reads no adapter."""

    kernel: str
    constants: dict[str, Any]
    options: dict[str, int | bool]
    arguments: dict[str, str | Fields]
    """With their types; `*own`: a pointer to the variant's dtype."""
    pointer: str = ""
    """The argument for weights, or keys, which are multiplied on tensor cores."""
    has_rows: bool = True
    """False: a program reads and writes some numbers of tables, no rows of them."""

    @property
    def module(self) -> str:
        """Module of `ops`."""
        return _SIGNATURES[self.kernel][0]

    @property
    def has_dtypes(self) -> bool:
        return "*own" in self.arguments.values()


def _launch(
    kernel: str,
    constants: Any,
    options: dict[str, int | bool],
    pointer: str = "",
    *,
    changed: Mapping[str, str | Fields] = MappingProxyType({}),
    has_rows: bool = True,
) -> Elementwise:
    """changed: types of arguments that are others than those of `signatures.toml`."""
    return Elementwise(kernel, {"C": constants}, options, {**_SIGNATURES[kernel][1], **changed}, pointer, has_rows)


def _strides(*names: str) -> dict[str, str]:
    return {f"{name}_stride": "i32" for name in names}


def _norm(hidden: int, add: bool, *, centered: bool = False, wide: bool = False) -> Elementwise:
    its = elementwise_schedule
    constants = its.norm_constants(hidden, add, centered=centered, wide=wide)
    return _launch("rms_norm_rows", constants, its.norm_options(hidden), changed={"norm": "*fp32"} if wide else {})


def _gated(ffn: int, gating: Gating, alpha: float = 0.0, limit: float = 0.0) -> Elementwise:
    constants = GatedConstants(ffn, gating, alpha, limit)
    return _launch("gate_and_mul_rows", constants, elementwise_schedule.gated_options())


def _rotary(
    heads: int, kv_heads: int, head_dim: int, dim: int | None = None, *, float8: bool = False, **more: Any
) -> Elementwise:
    """dim: elements of a head that are rotated, by default all. more: of `RotaryConstants`."""
    dim = head_dim if dim is None else dim
    constants = elementwise_schedule.RotaryConstants(heads, kv_heads, head_dim, dim, float8=float8, **more)
    options = elementwise_schedule.rotary_options(interleaved=constants.interleaved)
    changed: dict[str, Any] = {"q_norm": "*fp32", "k_norm": "*fp32"} if constants.wide else {}
    if float8:
        changed["slots"] = tuple((name, "*u8" if name.endswith("cache") else kind) for name, kind in _GROUPS["slots"])
    return _launch("rotate_and_write_heads", constants, options, changed=changed)


def _latents(heads: int, key_dim: int, rotated: int, kv_rank: int, **more: Any) -> Elementwise:
    """more: of `LatentConstants`."""
    constants = elementwise_schedule.LatentConstants(
        heads, 1, rotated, rotated, key_dim=key_dim, kv_rank=kv_rank, has_norm=True, **more
    )
    changed = {"norm": "*fp32"} if constants.wide else {}
    return _launch("rotate_and_write_latents", constants, elementwise_schedule.rotary_options(), changed=changed)


_EACH, _WHOLE = HeadNorming.EACH, HeadNorming.WHOLE

#: Elementwise launches of Llama-3.1-8B, the norms of Gemma 3 and Cohere, and the rotary embeddings of Qwen3-8B, Gemma 3
#: 4B, OLMo 2 7B, GLM-4 9B, Phi-4-mini, Qwen3.5-9B and SmolLM3; the latents of DeepSeek-V2-Lite and GLM-4.7-Flash.
ELEMENTWISE = {
    "norm": _norm(4096, add=False),
    "add": _norm(4096, add=True),
    "wide": _norm(2560, add=True, wide=True),
    "centered": _norm(8192, add=True, centered=True),
    "silu": _gated(14336, Gating.SILU),
    "gelu": _gated(14336, Gating.GELU),
    "swiglu": _gated(2880, Gating.CLAMPED_SWIGLU, 1.702, 7.0),
    "rotary": _rotary(32, 8, 128),
    "rotary.normed": _rotary(32, 8, 128, norm=_EACH),
    "rotary.wide": _rotary(8, 4, 256, norm=_EACH, wide=True),
    "rotary.whole": _rotary(32, 32, 128, norm=_WHOLE, wide=True),
    "rotary.interleaved": _rotary(32, 2, 128, 64, interleaved=True),
    "rotary.partial": _rotary(24, 8, 128, 96),
    "rotary.partial wide": _rotary(16, 4, 256, 64, norm=_EACH, wide=True),
    "rotary.none": _rotary(16, 4, 128, 0),
    "rotary.float8": _rotary(32, 8, 128, float8=True),
    "rotary.normed float8": _rotary(32, 8, 128, norm=_EACH, float8=True),
    "rotary.wide float8": _rotary(8, 4, 256, norm=_EACH, wide=True, float8=True),
    "latents": _latents(16, 128, 64, 512, interleaved=True),
    "latents.wide": _latents(20, 192, 64, 512, wide=True),
}


def _sgmv_shape(
    schedule: Schedule, modules: Sequence[tuple[int, int, int]], d_in: int, *, itemsize: int, max_rank: int
) -> SgmvShape:
    return SgmvShape(
        schedule=schedule,
        modules=tuple(modules),
        d_in=d_in,
        page_elems=PAGE_ELEMS,
        itemsize=itemsize,
        max_rank=max_rank,
        pages=place_pages(PAGE_ELEMS, SLAB_ELEMS),
        table=_MODULES,
    )


def _product(
    d_in: int,
    d_out: int,
    rows: int,
    *,
    silu: bool,
    group: str = "",
    max_rank: int = 0,
    form: small.WeightForm = small.FULL,
) -> Elementwise:
    """rows: of the tile. group, max_rank: of adapters that are expanded in the launch."""
    schedule, shape = small.gemm_schedule(d_out * (2 if silu else 1), rows, form, expanded=bool(group)), None
    if group:
        shape = ExpandShape.build(
            _sgmv_shape(decode(rows, max_rank), GROUPS[group][1], d_in, itemsize=2, max_rank=max_rank)
        )

    constants = small.gemm_constants(schedule, d_in, d_out, form, silu=silu, shape=shape)
    options = small.gemm_options(schedule)
    return _launch("multiply_rows", constants, options, "data", changed={"weight": _weight_fields(form)})


def _products(base: str, lora: str, rows: int) -> Iterator[tuple[str, Elementwise]]:
    """GEMMs alone, and with adapters up to a rank expanded in the launch, by prefixes of their names."""
    for name, (d_in, d_out, group) in _PRODUCTS.items():
        yield f"{base}.{name}", _product(d_in, d_out, rows, silu=name == "mlp")
        for rank in (16, 256) if name in ("qkv", "mlp") else (256,) if group else ():
            launch = _product(d_in, d_out, rows, silu=name == "mlp", group=group, max_rank=rank)
            yield f"{lora}{rank}.{name}", launch


#: Inputs, columns and group of GEMMs with Llama-3.1-8B's weights. `mlp`: followed by the activation.
_PRODUCTS = {
    "qkv": (4096, 6144, "qkv"),
    "o": (4096, 4096, "o"),
    "gu": (4096, 28672, ""),
    "mlp": (4096, 14336, "gate_up"),
    "down": (14336, 4096, "down"),
    "head": (4096, 128256, ""),
}

#: Forms of narrow weights: of 8 bits with a scale per row, of 4 with zero points, and FP8 in blocks.
FORMS = {
    "int8": small.WeightForm(8, 1 << 20),
    "int4": small.WeightForm(4, 128, zeros=True),
    "fp8": small.WeightForm(8, 128, float8=True),
}


def _kept(base: str, lora: str, rows: int) -> Iterator[tuple[str, Elementwise]]:
    """GEMMs with narrow weights, alone and with adapters of any rank."""
    for (form, its), (name, (d_in, d_out, group)) in product(FORMS.items(), _PRODUCTS.items()):
        its = its if its.group < d_in else its._replace(group=0)
        yield f"{base}-{form}.{name}", _product(d_in, d_out, rows, silu=name == "mlp", form=its)
        if group:
            launch = _product(d_in, d_out, rows, silu=name == "mlp", group=group, max_rank=256, form=its)
            yield f"{lora}256-{form}.{name}", launch


#: GEMMs of few rows, with either tile.
PRODUCTS = dict(
    [
        *(each for of in (_products, _kept) for each in of("base", "lora", small.TILE_ROWS[0])),
        *(each for of in (_products, _kept) for each in of("many", "multi", small.TILE_ROWS[-1])),
    ]
)


def _split(d_in: int, d_out: int) -> Elementwise:
    constants = SplitConstants(d_in, d_out, bias=False)
    return _launch("multiply_parts", constants, split_options(constants), "data")


#: GEMMs whose inputs several programs share.
SPLIT = {"split.o": _split(4096, 4096), "split.down": _split(14336, 4096)}

#: Narrow weights widened for a GEMM of many rows.
WIDENED = {
    f"widen-{name}": _launch(
        "widen_rows",
        WidenConstants(14336, form.bits, min(form.group, 14336), form.zeros, form.float8),
        {"num_warps": WIDEN_WARPS},
        changed=dict(_weight_fields(form)),
    )
    for name, form in FORMS.items()
}
_WIDEN4 = WidenConstants(14336, 4, FLOAT4_GROUP, zeros=False)
WIDENED["widen-mxfp4"] = _launch("widen_float4_rows", _WIDEN4, {"num_warps": WIDEN_WARPS})

#: MXFP4, of which only kernels with operands swapped and those of experts multiply weights.
_MXFP4 = small.WeightForm(4, FLOAT4_GROUP, float4=True)


def _swapped(d_in: int, d_out: int, rows: int, form: small.WeightForm) -> Elementwise:
    """rows: of the step."""
    form = form if form.group < d_in else form._replace(group=0)
    tile = swapped.tile_of(rows, form)
    constants = swapped.swapped_constants(d_in, d_out, tile, form)
    options = swapped.swapped_options(tile, form)
    return _launch("multiply_swapped", constants, options, "data", changed={"weight": _weight_fields(form)})


#: GEMMs of all tiles with narrow weights as the first operand, of 14336 inputs and 4096 columns; of 4 bits without zero
#: points, too, FP8 with a scale per row, and MXFP4.
SWAPPED = {
    f"swapped-{name}.{rows}": _swapped(14336, 4096, rows, form)
    for rows, (name, form) in product(
        swapped.TILE_ROWS,
        {
            **FORMS,
            "int4-middle": small.WeightForm(4, 128),
            "fp8-rows": small.WeightForm(8, float8=True),
            "mxfp4": _MXFP4,
        }.items(),
    )
}

#: Rows of activations rounded to FP8: of the widest norm and of the widest activation.
ROUNDED = {
    f"round-{name}.{width}": _launch(
        "round_float8_rows",
        constants := RoundConstants(width, name == "dense"),
        {"num_warps": constants.warps},
        changed={} if constants.dense else {"out": "*u8", "scales": "*fp32"},
    )
    for name, width in product(("dense", "float8"), (4096, 14336))
}

#: Heads, KV heads and elements of a head: of Llama-3.1-8B, of GPT-2's size, of half of that, of Phi-3-mini and of the
#: widest heads; of Gemma 2's layers with a window and a soft cap. `float8`: with a KV cache in FP8.
ATTENTION = {
    "heads.128": (32, 8, 128),
    "heads.64": (8, 8, 64),
    "heads.32": (8, 8, 32),
    "heads.96": (32, 8, 96),
    "heads.256": (16, 4, 256),
    "heads.256 window": (8, 4, 256),
    "heads-wide.512": (32, 4, 512),
    "float8.64": (8, 8, 64),
    "float8.96": (32, 8, 96),
    "float8.256 window": (8, 4, 256),
    "float8.256": (16, 4, 256),
    "float8-wide.512": (32, 4, 512),
    "float8-llama.128": (32, 8, 128),
    "sinks.64": (64, 8, 64),
    "latents.576": (16, 1, 576),
    "latents-many.576": (128, 1, 576),
}

#: Elements of values where they are the first ones of keys, by group.
LATENTS = {"latents.576": 512, "latents-many.576": 512}

_BLOCK_TOKENS = 16  # of a page


#: Of a group with a window: what its kernel has besides.
WINDOWED = {"window": 4096, "caps": True}

#: Pointer to a KV cache in FP8: of uint8 where Triton can't read E4M3.
_FLOAT8 = "*float8"


def _attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    more: Mapping[str, Any] = MappingProxyType({}),
    value_dim: int | None = None,
) -> Elementwise:
    shape, cache = (heads, kv_heads, head_dim, _BLOCK_TOKENS), _FLOAT8 if more.get("float8") else "*own"
    constants = replace(attention_constants(*shape, itemsize, value_dim), **more)
    options = attention_options(value_dim or head_dim, itemsize)
    return _launch("attend_rows", constants, options, "k_cache", changed={"k_cache": cache, "v_cache": cache})


def _experts(
    d_in: int,
    d_out: int,
    rows: int,
    *,
    per_row: int,
    bias: bool = False,
    form: small.WeightForm = small.FULL,
    gate: expert_tiles_schedule.Gate | None = None,
    of_pairs: bool = False,
    swaps: bool = False,
    is_wide: bool = False,
) -> Elementwise:
    """Products of a layer with 128 experts. rows: tokens of a step; each goes to 8 experts. gate: of the activation.
    swaps: weights are the first operand. is_wide: tiles have the most columns.
    """
    its = expert_tiles_schedule
    numbers = {"per_row": per_row, "experts": 128, "bias": bias, "form": form, "gate": gate, "of_pairs": of_pairs}
    block_t = its.tile_rows(rows, rows * 8, 128, its.most_rows(form))
    constants = its.tile_constants(d_in, d_out, block_t, 2, **numbers, is_wide=is_wide)
    constants = its.swapped(constants, form, is_wide=is_wide) if swaps else constants
    kernel = "multiply_swapped_tiles" if swaps else "multiply_tiles"
    changed = dict.fromkeys(("pairs", "expert_of", "first_of", "end_of"), "*i64") if of_pairs else {}
    return _launch(
        kernel, constants, its.tile_options(constants), "data", changed={"weight": _weight_fields(form), **changed}
    )


_QWEN, _OSS = {"per_row": 8}, {"per_row": 4, "bias": True}
_QWEN_GATED = {**_QWEN, "gate": expert_tiles_schedule.Gate()}
_OSS_GATED = {**_OSS, "gate": expert_tiles_schedule.Gate(Gating.CLAMPED_SWIGLU, 1.702, 7.0)}
_EXPERT_FORMS = FORMS | {"int8": small.WeightForm(8)}


def _each(name: str, d_in: int, d_out: int, rows: Iterable[int], **more: Any) -> dict[str, Elementwise]:
    return {f"{name}.{each}": _experts(d_in, d_out, each, **more) for each in rows}


def _narrow(name: str, rows: Iterable[int], d_out: int, of_oss: Iterable[int], gated: bool, **more: Any) -> Any:
    """Of Qwen3-30B-A3B in each form, and of gpt-oss in MXFP4."""
    qwen, oss = (_QWEN_GATED, _OSS_GATED) if gated else (_QWEN, _OSS)
    found = {}
    for form, its in _EXPERT_FORMS.items():
        found |= _each(f"{name}-{form}", 2048, d_out, rows, form=its, **qwen, **more)
    return found | _each(f"{name}-mxfp4", 2880, 2880 if gated else 5760, of_oss, form=_MXFP4, **oss, **more)


_ALL, _SOME = (64, 512, 2048), (64, 2048)

#: Of Qwen3-30B-A3B's shapes, and of gpt-oss', with few rows and with many.
EXPERTS = {
    **_each("experts.gu", 2048, 1536, _ALL, **_QWEN),
    **_each("experts.down", 768, 2048, _ALL, per_row=1),
    **_each("experts.biased", 2880, 5760, _ALL, **_OSS),
}

#: The same with narrow weights; of gpt-oss in MXFP4. Sums of blocks are scaled in tiles of 64 rows at most.
NARROW_EXPERTS = _narrow("experts", _SOME, 1536, _ALL, gated=False)

#: Gate and up of the same models with their activations in the launch.
GATED_EXPERTS = {
    **_each("gated", 2048, 768, _ALL, **_QWEN_GATED),
    **_each("gated", 2048, 768, (4,), of_pairs=True, **_QWEN_GATED),
    **_each("gated-down", 768, 2048, (4,), per_row=1, of_pairs=True),
    **_each("gated-biased", 2880, 2880, _SOME, **_OSS_GATED),
    **_narrow("gated", _SOME, 768, _SOME, gated=True),
}

#: The same with narrow weights as the first operand, and down of a few rows, unsorted.
SWAPPED_EXPERTS = {
    **_narrow("swapped-experts", _SOME, 768, _ALL, gated=True, swaps=True),
    **_each("swapped-down-int4", 768, 2048, (4,), per_row=1, form=FORMS["int4"], of_pairs=True, swaps=True),
    **_each("swapped-down-int4", 768, 2048, (2048,), per_row=1, form=FORMS["int4"], swaps=True),
}

#: The same products in tiles of 64 rows and 256 columns.
WIDE_EXPERTS = {
    "wide.gated": _experts(2048, 768, 512, **_QWEN_GATED, is_wide=True),
    "wide.down": _experts(768, 2048, 512, per_row=1, is_wide=True),
    "wide.biased": _experts(2880, 2880, 512, **_OSS_GATED, is_wide=True),
    **_narrow("wide", (512,), 768, (512,), gated=True, swaps=True, is_wide=True),
}


def _mixture_tiles(*, per_token: int, experts: int, adapters: int = 0) -> Elementwise:
    """Tiles of adapters on experts of Qwen3-30B-A3B, with ranks up to 64. adapters: that runs are numbered with."""
    page, rank, slab = PAGE_ELEMS // 4, 64, 3 * (2048 + 768)
    constants = TileWriter(
        first=0,
        places=3 * 128 + 1,
        experts=experts,
        per_token=per_token,
        adapters=adapters,
        page=page,
        window=place_window(page, rank * slab),
        blocks=place_blocks(rank),
        record=place_pages(page, slab),
        modules=5,
    )
    return _launch("write_tiles", constants, {"num_warps": 1}, has_rows=False)


#: The tiles of a product of experts, of prompts and of decoding sequences, and of a router.
MIXTURE_TILES = {
    "tiles.runs": _mixture_tiles(per_token=8, experts=128, adapters=65),
    "tiles.pairs": _mixture_tiles(per_token=8, experts=128),
    "tiles.tokens": _mixture_tiles(per_token=1, experts=0),
}


def _router(experts: int, hidden: int, rows: int, *, bias: bool = False, wide: bool = False) -> Elementwise:
    """rows: of a step. wide: the router is float32 and the rows are not."""
    constants = routing_schedule.router_constants(hidden, experts, rows, bias=bias, wide=wide)
    options = routing_schedule.router_options(constants)
    return _launch(
        "multiply_router", constants, options, "" if wide else "weight", changed={"weight": "*fp32"} if wide else {}
    )


def _choice(
    experts: int, per_token: int, scoring: Scoring, *, groups: int = 1, kept_groups: int = 1, jitter: float = 0.0
) -> Elementwise:
    routing = Routing(
        per_token,
        scoring,
        renormalised=True,
        corrected=scoring is Scoring.SIGMOID,
        groups=groups,
        kept_groups=kept_groups,
        jitter=jitter,
    )
    options = routing_schedule.choice_options()  # of a few hundred bytes of logits
    return _launch("choose_experts", choice_constants(routing, experts), options, has_rows=False)


def _sort(block_t: int, pairs: int, *, few: bool = False) -> Elementwise:
    constants = SortConstants(128, block_t, few, sort_block(pairs))
    return _launch("sort_pairs", constants, routing_schedule.sort_options(constants), has_rows=False)


def _sum(width: int, per_token: int, *, shared: bool = False) -> Elementwise:
    return _launch("add_experts", SumConstants(width, per_token, shared, shared), routing_schedule.sum_options())


#: Routing in Qwen3-30B-A3B, with few rows and with many; the router and the choice of gpt-oss; experts in groups, as
#: DeepSeek has them, as Llama 4 Maverick's, and as Phi-3.5-MoE's; and the sum of Qwen3.5's experts and its shared one.
ROUTING = {
    "routing.logits.64": _router(128, 2048, 64),
    "routing.logits.2048": _router(128, 2048, 2048),
    "routing.wide.64": _router(32, 2880, 64, bias=True, wide=True),
    "routing.wide.2048": _router(32, 2880, 2048, bias=True, wide=True),
    "routing.choice": _choice(128, 8, Scoring.SOFTMAX),
    "routing.choice of chosen": _choice(32, 4, Scoring.SOFTMAX_OF_CHOSEN),
    "routing.choice in groups": _choice(256, 8, Scoring.SIGMOID, groups=8, kept_groups=4),
    "routing.choice of inputs": _choice(128, 1, Scoring.SIGMOID_OF_CHOSEN),
    "routing.choice one by one": _choice(16, 2, Scoring.SPARSE_MIXER, jitter=0.01),
    "routing.sort few": _sort(16, 64, few=True),
    "routing.sort": _sort(64, 4096),
    "routing.sum": _sum(2048, 8),
    "routing.sum shared": _sum(2048, 8, shared=True),
}


def _draws(vocab: int) -> dict[str, Elementwise]:
    its, constants = sampling_schedule, sampling_schedule.sampling_constants(vocab)
    return {
        "peaks": _launch("find_peaks", constants, its.peak_options()),
        "weights": _launch("weigh_blocks", constants, its.weigh_options()),
        "tokens": _launch("pick_tokens", constants, its.pick_options()),
    }


#: Launches that sample tokens from logits of Llama-3.1-8B's vocabulary.
DRAWS = _draws(128256)


#: Places of the states of Qwen3.5-9B in pages of 512 KiB: see `gated_delta_schedule.StepConstants`.
_PLACES = {"convs_per_page": 5, "heads_per_page": 8, "conv_pages": 5}


def _deltas(k_heads: int, v_heads: int, k_dim: int, v_dim: int) -> dict[str, Elementwise]:
    its = gated_delta_schedule
    shape = {"k_heads": k_heads, "v_heads": v_heads, "k_dim": k_dim, "v_dim": v_dim, "conv": 4}
    options = its.step_options()
    plain = its.StepConstants(**shape, **_PLACES, num_pages=101)
    drafts = {"drafts_per_page": 15, "draft_page": 101, "most_drafts": MOST_DRAFTS}
    drafted = its.StepConstants(**shape, **_PLACES, **drafts, num_pages=114)
    scanned = its.scan_constants(v_heads, k_dim, v_dim)
    return {
        "delta.step": _launch("step_heads", plain, options),
        "delta.drafted": _launch("step_heads", drafted, options),
        "delta.scan": _launch("scan_heads", scanned, its.scan_options()),
    }


#: Launches of Gated DeltaNet in Qwen3.5-9B.
DELTAS = _deltas(16, 32, 128, 128)


def _vectors(group: str, *, undo: bool = False) -> Elementwise:
    """For bf16 pages; the kernel is the same for others but for the values of a page."""
    _, modules = GROUPS[group]
    constants = vector_constants(modules, PAGE_ELEMS * ITEMSIZE["bf16"], _MODULES, undo=undo)
    return _launch("scale_rows", constants, vector_options())


#: Launches of adapters' vectors in Llama-3.1-8B.
VECTORS = {
    "vectors.qkv": _vectors("qkv"),
    "vectors.down": _vectors("down"),
    "vectors.undone": _vectors("qkv", undo=True),
}


def _latent_lora(*, absorbs: bool, terms: int = 1) -> Elementwise:
    """For 16 bits."""
    shape = 7, 128, 128, 512, PAGE_ELEMS, ITEMSIZE["bf16"], 64, place_pages(PAGE_ELEMS, SLAB_ELEMS), _MODULES
    constants = latent_lora_constants(*shape, absorbs=absorbs, terms=terms)
    return _launch("add_to_heads", constants, latent_lora_options(absorbs=absorbs, terms=terms))


#: Launches of adapters on kv_b_proj of DeepSeek-V3.
LATENT_LORA = {
    "latents.absorb": _latent_lora(absorbs=True),
    "latents.expand": _latent_lora(absorbs=False),
    "latents.absorb merged": _latent_lora(absorbs=True, terms=MERGED_TERMS),
    "latents.expand merged": _latent_lora(absorbs=False, terms=MERGED_TERMS),
}

#: Launches that read no rank-rows, or those of one projection alone.
PLAIN = ELEMENTWISE | WIDENED | ROUNDED | PRODUCTS | SWAPPED | DRAWS | DELTAS | VECTORS | EXPERTS | NARROW_EXPERTS
PLAIN |= SPLIT | GATED_EXPERTS | SWAPPED_EXPERTS | WIDE_EXPERTS | ROUTING | MIXTURE_TILES | LATENT_LORA


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialisation of a kernel: for a group of projections, a bucket of tokens and adapters up to `max_rank`, or
    for a launch that reads no adapter, with `max_rank` 0.
    """

    kernel: str
    group: str
    dtype: str
    tokens: int
    max_rank: int = 0

    @property
    def launch(self) -> Elementwise | None:
        """The launch, if it reads no adapter."""
        if self.group in ATTENTION:
            more: dict[str, Any] = dict(WINDOWED) if self.group.endswith("window") else {}
            more |= {kind: True for kind in ("float8", "sinks") if self.group.startswith(kind)}
            return _attention(*ATTENTION[self.group], ITEMSIZE[self.dtype], more, LATENTS.get(self.group))
        return PLAIN.get(self.group)

    @property
    def module(self) -> str:
        """The module of `ops` that the kernel is in."""
        return self.launch.module if self.launch else "lora.sgmv_triton"

    @property
    def pointer(self) -> str:
        """The argument through which weights, or keys, are read; none if a launch reads no more than its rows."""
        return self.launch.pointer if self.launch else "arena"

    @property
    def projections(self) -> tuple[int, tuple[tuple[int, int, int], ...]]:
        """Inputs of a launch that reads adapters, and its projections; see `sgmv_triton.Sgmv`."""
        return GROUPS[self.group.removeprefix(_MERGED)]

    @property
    def tensor_cores(self) -> bool:
        return bool(self.launch.pointer) if self.launch else self.kernel.endswith("prefill")

    def options(self) -> dict[str, int | bool]:
        if (launch := self.launch) is not None:
            return launch.options
        return self.schedule().options(self.kernel.startswith("expand"))

    def schedule(self) -> Schedule:
        if self.tensor_cores:
            return prefill(self.tokens, self.max_rank, ITEMSIZE[self.dtype])
        return decode(self.tokens, self.max_rank)

    def constants(self) -> dict[str, Any]:
        if (launch := self.launch) is not None:
            return launch.constants
        d_in, modules = self.projections
        make = shrink_constants if self.kernel.startswith("shrink") else expand_constants
        itemsize, terms = ITEMSIZE[self.dtype], MERGED_TERMS if self.group.startswith(_MERGED) else 1
        shape = _sgmv_shape(self.schedule(), modules, d_in, itemsize=itemsize, max_rank=self.max_rank)
        return {"C": make(shape, terms)}

    def signature(self) -> dict[str, str | Fields]:
        own = f"*{self.dtype}"
        if (launch := self.launch) is not None:
            found = launch.arguments
        else:
            rows = "x" if self.kernel.startswith("shrink") else "y"
            found = {rows: own, "adapters": _ADAPTERS, **_COUNTS, **_strides(rows)}
        return {name: _owned(kind, own) for name, kind in found.items()}

    @property
    def num_weights(self) -> int:
        """Elements of the weights that are read, or of adapters for each rank; 0 without any."""
        if (launch := self.launch) is not None:
            if self.group not in PRODUCTS:
                return 0
            its: small.GemmConstants = launch.constants["C"]
            return its.d_in * its.d_out * (1 + its.silu)
        d_in, modules = self.projections
        return len(modules) * d_in if self.kernel.startswith("shrink") else sum(width for _, _, width in modules)

    @property
    def launched(self) -> tuple[object, ...]:
        """The inputs of the compilation; the same for variants that are one launch."""
        items = (self.constants().items(), self.options().items(), self.signature().items())
        return self.kernel, *(tuple(sorted(each)) for each in items)


def _owned(kind: str | Fields, own: str) -> str | Fields:
    """The type, with pointers to the variant's dtype."""
    if isinstance(kind, str):
        return own if kind == "*own" else kind
    return tuple((name, own if of_field == "*own" else of_field) for name, of_field in kind)


@dataclass(frozen=True, slots=True)
class Line:
    """The resources of a variant on a GPU."""

    variant: Variant
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    matrix: str
    wide_loads: int
    loads_before: int
    barriers: int
    bytes_in_flight: int
    is_early: bool

    def problems(self) -> Iterator[str]:
        if self.spill_bytes:
            yield f"spills {self.spill_bytes} bytes of registers"
        if self.shared_bytes > SHARED_LIMIT:
            yield f"takes {self.shared_bytes} bytes of shared memory, more than {SHARED_LIMIT}"
        if self.is_early:
            yield "reads or writes what the launch before it may still write"
        if not self.wide_loads and (self.variant.launch is None or self.variant.launch.has_rows):
            yield "never loads 16 bytes at once"
        # a tile that goes on with others reads their records once it has its own
        most = 3 if self.variant.kernel == "expand_decode" and self.variant.group.startswith(_MERGED) else 2
        if self.loads_before > most and not self.variant.kernel.endswith("prefill"):
            yield f"waits for {self.loads_before} loads one after the other before it loads weights"
        if self.variant.tensor_cores and self.variant.dtype != "fp32" and not self.matrix:
            yield "has no matrix instruction"

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return values.pop("variant") | values


def variants() -> Iterator[Variant]:
    """All variants that serving launches: bf16 in full, f16 and f32 once per kernel."""
    for group in GROUPS:
        for side in ("shrink", "expand"):
            for kernel, buckets in ((f"{side}_decode", (8, 64, 256)), (f"{side}_prefill", (256, 8192))):
                for prefix, max_rank in product(("", _MERGED), (16, 64, 256)):
                    for tokens in buckets:
                        if tokens > 8 or max_rank > 64:  # below, the smallest bucket's launch is that of 64 tokens
                            yield Variant(kernel, prefix + group, "bf16", tokens, max_rank)
                if group == "qkv":
                    for prefix, dtype in product(("", _MERGED), ("fp16", "fp32")):
                        yield Variant(kernel, prefix + group, dtype, 64, 64)


def plain_variants() -> Iterator[Variant]:
    """Every launch that reads no adapter; a kernel is the same for any number of tokens. GEMMs have no f32 variant."""
    for group, (_, _, head_dim) in ATTENTION.items():
        for dtype, itemsize in ITEMSIZE.items():
            if LATENTS.get(group, head_dim) <= largest_head(itemsize) and not (
                dtype == "fp32" and group.startswith("float8")
            ):
                yield Variant("attend_rows", group, dtype, 64)
    for group, launch in PLAIN.items():
        if group in PRODUCTS:
            most = small.MAX_EXPANDED_ROWS if launch.constants["C"].parts else small.MAX_ROWS
            tokens = min(launch.constants["C"].block_t, most)
        else:
            tokens = launch.constants["C"].block_t if group in _TILED else 64
        for dtype in _dtypes(group, launch):
            yield Variant(launch.kernel, group, dtype, tokens)


_TILED = SWAPPED | EXPERTS | NARROW_EXPERTS | GATED_EXPERTS | SWAPPED_EXPERTS | WIDE_EXPERTS


def _dtypes(group: str, launch: Elementwise) -> Iterable[str]:
    if group in ELEMENTWISE | WIDENED | ROUNDED | DRAWS | VECTORS or (group in DELTAS and launch.has_dtypes):
        return ITEMSIZE
    return ("bf16", "fp16") if launch.has_dtypes else ("fp32",)


def job_of(variant: Variant, arch: str) -> Job:
    from .compiled_triton import Job

    capability, constants, options = int(arch.removeprefix("sm_")), variant.constants(), variant.options()
    if capability // 10 >= LEAST_MAJOR and (early := _early(variant, constants)) is not None:
        constants, options = early, options | {"launch_pdl": True}
    kernel = getattr(import_module(f"...ops.{variant.module}", __package__), variant.kernel)
    float8 = "*fp8e4nv" if capability >= LEAST_FLOAT8 else "*u8"
    return Job(
        kernel,
        {name: float8 if kind == _FLOAT8 else kind for name, kind in variant.signature().items()},
        constants=constants,
        capability=capability,
        options=options,
        pointer=variant.pointer,
        ready=_READY,
    )


def _early(variant: Variant, constants: dict[str, Any]) -> dict[str, Any] | None:
    """The constants of a launch that begins early, as serving launches it; None if it never does."""
    if not hasattr(constants["C"], "pdl"):
        return None
    return {"C": replace(constants["C"], pdl=True)}


def compile_variant(wanted: tuple[Variant, str]) -> dict[str, Any]:
    """Fields of `Compiled`."""
    return asdict(job_of(*wanted).compile())


def translate_all(archs: Sequence[str], chosen: Sequence[Variant]) -> list[tuple[str, Variant, str]]:
    """Take the widest variants through Triton's front end; return those that it refuses, and why."""
    refused = []
    for arch, variant in product(archs, widest(chosen)):
        try:
            job_of(variant, arch).translate()
        except Exception as error:
            refused.append((arch, variant, str(error)))
    return refused


def compile_all(
    archs: Sequence[str], workers: int, chosen: Sequence[Variant], known: dict[str, dict[str, Any]]
) -> list[Line]:
    """Compile all distinct variants: some variants are the same launch, for other tokens. For the first of `archs` all,
    for others the widest.

    known: variants compiled before, by `Job.key`. They are not compiled again, except one variant of each kernel; at
    the end it holds all variants reported. Raises ValueError if the recompiled variant differs from the known one.
    """
    wanted = [(variant, arch) for arch in archs for variant in (chosen if arch == archs[0] else widest(chosen))]
    jobs = {(arch, variant.launched): (variant, arch) for variant, arch in wanted}
    keys = {each: job_of(*job).key() for each, job in jobs.items()}
    samples = {variant.kernel: (arch, variant.launched) for variant, arch in wanted if arch == archs[0]}.values()
    todo = {keys[each]: job for each, job in jobs.items() if each in samples or keys[each] not in known}
    if workers == 1:
        made = list(map(compile_variant, todo.values()))
    else:
        with ProcessPoolExecutor(workers, mp_context=spawn_context()) as pool:
            made = list(pool.map(compile_variant, todo.values(), chunksize=4))
    for (key, (variant, arch)), fields in zip(todo.items(), made, strict=True):
        if known.setdefault(key, fields) != fields:
            raise ValueError(f"{arch} {variant}: known as {known[key]}, but compiled it is {fields}")
    for key in known.keys() - keys.values():
        del known[key]
    return [Line(variant, arch, **known[keys[arch, variant.launched]]) for variant, arch in wanted]


def widest(chosen: Sequence[Variant]) -> list[Variant]:
    """Among variants that differ only in sizes, the one with the most resources, in bf16 if there is one: of a kernel
    for any projections, of GEMMs with one tile and one rank.
    """
    by_size = sorted(chosen, key=lambda each: (each.dtype == "bf16", each.max_rank, each.tokens, each.num_weights))
    return list(
        {(each.kernel, each.group not in GROUPS and each.group.split(".")[0]): each for each in by_size}.values()
    )
