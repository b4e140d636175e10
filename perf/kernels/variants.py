"""Every variant of the Triton kernels compiled for GPUs that need not be there: what it takes, and what is too much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing import get_context
from typing import Any

from ...ops import elementwise_schedule
from ...ops.sgmv import AdapterRows, Segments
from ...ops.sgmv_schedule import Schedule, decode, expand_constants, prefill, shrink_constants
from ...ops.sgmv_tables import NUM_MODULES
from .cost import Cost, expand_cost, norm_cost, rotary_cost, shrink_cost, silu_cost

#: Llama-3.1-8B: inputs, and (module id, first column, width) of projections that share them.
GROUPS: Mapping[str, tuple[int, Sequence[tuple[int, int, int]]]] = {
    "qkv": (4096, ((0, 0, 4096), (1, 4096, 1024), (2, 5120, 1024))),
    "o": (4096, ((3, 0, 4096),)),
    "gate_up": (4096, ((4, 0, 14336), (5, 14336, 14336))),
    "down": (14336, ((6, 0, 4096),)),
}
PAGE_ELEMS = 1 << 20

#: Most shared memory of a program: two fit beside each other even on sm_80, which has 164 KiB.
SHARED_LIMIT = 80 * 1024

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}

_KERNELS = {"norm": "rms_norm_rows", "add": "rms_norm_rows", "silu": "silu_and_mul_rows"}

#: Llama-3.1-8B: hidden and ffn. (query heads, KV heads, head size, norms) of Llama-3.1-8B and of Qwen3-8B.
HIDDEN, FFN = 4096, 14336
ROTARY = {"rotary": (32, 8, 128, False), "normed": (32, 8, 128, True)}

_TABLES = {"tiles": "*i32", "meta": "*i32", "first_elem": "*i64", "pages": "*i32"}
_COUNTS = {"layer": "i32", "layers": "i32", "max_pages": "i32", "tokens": "i32"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One specialisation of a kernel: that of a group of projections in a bucket, for adapters up to a rank."""

    kernel: str
    group: str
    dtype: str
    tokens: int
    max_rank: int

    @property
    def module(self) -> str:
        return "sgmv_triton"

    @property
    def tensor_cores(self) -> bool:
        return self.kernel.endswith("prefill")

    def options(self) -> dict[str, int | bool]:
        return self.schedule().options()

    def schedule(self) -> Schedule:
        if self.tensor_cores:
            return prefill(self.tokens, self.max_rank, ITEMSIZE[self.dtype])
        return decode(self.tokens, self.max_rank)

    def constants(self) -> dict[str, int]:
        d_in, modules = GROUPS[self.group]
        make = shrink_constants if self.kernel.startswith("shrink") else expand_constants
        return make(self.schedule(), modules, d_in, PAGE_ELEMS, ITEMSIZE[self.dtype], self.max_rank)

    def signature(self) -> dict[str, str]:
        own = f"*{self.dtype}"
        if self.kernel.startswith("shrink"):
            return {"h": "*fp32", "x": own, "arena": own, **_TABLES, **_COUNTS, "x_stride": "i32"}
        return {"y": own, "h": "*fp32", "arena": own, **_TABLES, "scale": "*fp32", **_COUNTS, "y_stride": "i32"}

    def cost(self) -> Cost:
        """Of a full bucket of the largest rank: an adapter per token, or with tensor cores one for all tokens."""
        d_in, modules = GROUPS[self.group]
        offsets = [0] * NUM_MODULES
        segments = Segments()
        step = self.tokens if self.tensor_cores else 1
        for begin in range(0, self.tokens, step):
            segments.add(begin, begin + step, AdapterRows((), self.max_rank, 1.0, 0, offsets, offsets, (0,)))
        splits, itemsize = self.schedule().splits(d_in), ITEMSIZE[self.dtype]
        if self.kernel.startswith("shrink"):
            return shrink_cost(segments, 0, modules, d_in, splits, itemsize)
        return expand_cost(segments, 0, modules, splits, itemsize)


@dataclass(frozen=True, slots=True)
class ElementwiseVariant:
    """One specialisation; group says of which launch. max_rank is 0: no adapter is read."""

    group: str
    dtype: str
    tokens: int
    max_rank: int = 0

    @property
    def kernel(self) -> str:
        return _KERNELS.get(self.group, "rotate_and_write_heads")

    @property
    def module(self) -> str:
        """The module of `ops` that the kernel is in."""
        return "elementwise_triton"

    @property
    def tensor_cores(self) -> bool:
        return False

    def constants(self) -> dict[str, int]:
        if self.group == "silu":
            return elementwise_schedule.silu_constants(FFN)
        if self.group in ROTARY:
            return elementwise_schedule.rotary_constants(*ROTARY[self.group])
        return elementwise_schedule.norm_constants(HIDDEN, self.group == "add")

    def options(self) -> dict[str, int | bool]:
        if self.group == "silu":
            return elementwise_schedule.silu_options()
        if self.group in ROTARY:
            return elementwise_schedule.rotary_options()
        return elementwise_schedule.norm_options(HIDDEN)

    def signature(self) -> dict[str, str]:
        own = f"*{self.dtype}"
        if self.group == "silu":
            return {"y": own, "gate_up": own, "gate_up_stride": "i32", "y_stride": "i32"}
        if self.group in ROTARY:
            pointers = ("q", "k_cache", "v_cache", "qkv", "cos", "sin", "q_norm", "k_norm")
            strides = ("qkv", "table", "page", "token", "head")
            return {
                **dict.fromkeys(pointers, own), **dict.fromkeys(("rows", "page", "offset"), "*i64"), "eps": "fp32",
                **{f"{name}_stride": "i32" for name in strides},
            }  # fmt: skip
        strides = {f"{name}_stride": "i32" for name in ("x", "y", "residual")}
        return {"y": own, "x": own, "residual": own, "weight": own, "eps": "fp32", **strides}

    def cost(self) -> Cost:
        itemsize = ITEMSIZE[self.dtype]
        if self.group == "silu":
            return silu_cost(self.tokens, FFN, itemsize)
        if self.group in ROTARY:
            heads, kv_heads, head_dim, norm = ROTARY[self.group]
            return rotary_cost(self.tokens, heads, kv_heads, head_dim, itemsize, norm)
        return norm_cost(self.tokens, HIDDEN, itemsize, self.group == "add")


KernelVariant = Variant | ElementwiseVariant


@dataclass(frozen=True, slots=True)
class Line:
    """Resources that a variant takes on a GPU."""

    variant: KernelVariant
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    matrix: str
    wide_loads: int
    cost: Cost

    def problems(self) -> Iterator[str]:
        if self.spill_bytes:
            yield f"spills {self.spill_bytes} bytes of registers"
        if self.shared_bytes > SHARED_LIMIT:
            yield f"takes {self.shared_bytes} bytes of shared memory, more than {SHARED_LIMIT}"
        if not self.wide_loads:
            yield "never loads 16 bytes at once"
        if self.variant.tensor_cores and self.variant.dtype != "fp32" and not self.matrix:
            yield "has no matrix instruction"

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return {
            **values.pop("variant"),
            "kernel": self.variant.kernel,
            **{f"cost_{key}": value for key, value in values.pop("cost").items()},
            **values,
        }


def variants() -> Iterator[Variant]:
    """All that serving launches: bf16 in full, f16 and f32 once per kernel and group."""
    for group in GROUPS:
        for side in ("shrink", "expand"):
            for kernel, buckets in ((f"{side}_decode", (8, 64, 256)), (f"{side}_prefill", (256, 8192))):
                for max_rank in (16, 64, 256):
                    for tokens in buckets:
                        if tokens > 8 or max_rank > 64:  # below, the smallest bucket's launch is that of 64 tokens
                            yield Variant(kernel, group, "bf16", tokens, max_rank)
                yield Variant(kernel, group, "fp16", 64, 64)
                if group == "qkv":
                    yield Variant(kernel, group, "fp32", 64, 64)


def elementwise_variants() -> Iterator[ElementwiseVariant]:
    """Every launch in every dtype; a kernel is the same for any number of tokens."""
    for group in ("norm", "add", "silu", *ROTARY):
        for dtype in ITEMSIZE:
            yield ElementwiseVariant(group, dtype, 64)


def compile_variant(job: tuple[KernelVariant, str]) -> Line:
    from .compiled_triton import compile_kernel

    variant, arch = job
    compiled = compile_kernel(
        getattr(import_module(f"...ops.{variant.module}", __package__), variant.kernel),
        variant.signature(),
        variant.constants(),
        int(arch.removeprefix("sm_")),
        variant.options(),
    )
    return Line(variant, arch, **asdict(compiled), cost=variant.cost())


def compile_all(archs: Sequence[str], workers: int, chosen: Sequence[KernelVariant]) -> list[Line]:
    jobs = [(variant, arch) for arch in archs for variant in chosen]
    if workers == 1:
        return [compile_variant(job) for job in jobs]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_variant, jobs, chunksize=4))
