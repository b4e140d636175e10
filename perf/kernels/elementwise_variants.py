"""The fused elementwise kernels as serving launches them, for the offline compile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...ops import elementwise_cost as cost
from ...ops import elementwise_schedule as schedule
from ...ops.sgmv_cost import Cost
from .variants import ITEMSIZE

_KERNELS = {"norm": "rms_norm_rows", "add": "rms_norm_rows", "silu": "silu_and_mul_rows"}

#: Llama-3.1-8B: hidden and ffn. (query heads, KV heads, head size, norms) of Llama-3.1-8B and of Qwen3-8B.
HIDDEN, FFN = 4096, 14336
ROTARY = {"rotary": (32, 8, 128, False), "normed": (32, 8, 128, True)}


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
            return schedule.silu_constants(FFN)
        if self.group in ROTARY:
            return schedule.rotary_constants(*ROTARY[self.group])
        return schedule.norm_constants(HIDDEN, self.group == "add")

    def options(self) -> dict[str, int | bool]:
        if self.group == "silu":
            return schedule.silu_options()
        return schedule.rotary_options() if self.group in ROTARY else schedule.norm_options(HIDDEN)

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
            return cost.silu_cost(self.tokens, FFN, itemsize)
        if self.group in ROTARY:
            heads, kv_heads, head_dim, norm = ROTARY[self.group]
            return cost.rotary_cost(self.tokens, heads, kv_heads, head_dim, itemsize, norm)
        return cost.norm_cost(self.tokens, HIDDEN, itemsize, self.group == "add")


def elementwise_variants() -> Iterator[ElementwiseVariant]:
    """Every launch in every dtype; a kernel is the same for any number of tokens."""
    for group in ("norm", "add", "silu", *ROTARY):
        for dtype in ITEMSIZE:
            yield ElementwiseVariant(group, dtype, 64)
