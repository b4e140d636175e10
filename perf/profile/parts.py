"""Parts of a step's budget: which part a kernel belongs to, and the least time that each part may take.

Tests: tests/perf/profile/test_parts.py
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum

from ..bench.context import Context
from .trace import Kernel, Step


class Part(StrEnum):
    """A part of a step's budget."""

    PRODUCTS = "base products"
    LOGITS = "logits"
    LORA = "LoRA"
    ATTENTION = "attention"
    ELEMENTWISE = "norms, rotary, activation"
    ROUTING = "routing to experts"
    RECURRENT = "recurrent states"
    SAMPLING = "sampling"
    COLLECTIVES = "collectives"
    COPIES = "copies"
    OTHER = "other"


#: Names of kernels by part; the first that matches counts. Ours are listed whole, also those of recorded traces, and
#: those of libraries by a common word.
#: A product that also multiplies with B (`small_gemm=fused`) counts as a base product.
_NAMES = [
    (Part.LORA, r"^(shrink|expand)_(decode|prefill)|^(scale_rows|write_tiles|add_to_heads)"),
    (Part.PRODUCTS, r"^(multiply_(rows|parts|swapped|tiles)|widen_(float4_)?rows|round_float8_rows)"),
    (Part.ATTENTION, r"^attend_rows"),
    (Part.ELEMENTWISE, r"^(rms_norm_rows|rotate_and_write_(heads|latents)|(gate|silu)_and_mul_rows)"),
    (Part.ROUTING, r"^(multiply_router|choose_experts|sort_pairs|add_experts)"),
    (Part.RECURRENT, r"^(step_heads|scan_heads)"),
    (Part.SAMPLING, r"^(ban_tokens|find_peaks|weigh_blocks|pick_tokens)"),
    (Part.COPIES, r"^[Mm]em(cpy|set)|\[CUDA mem"),
    (Part.COLLECTIVES, r"nccl|all_?reduce|all_?gather"),
    (Part.ATTENTION, r"(Prefill|Decode)WithPagedKVCache|PrefillWithKVCache|MergeStates|flash_(fwd|attn)|fmha"),
    (Part.ATTENTION, r"scaled_dot_product|softmax"),
    (Part.SAMPLING, r"argmax|ArgMax|topk|TopK|sort"),
    (
        Part.PRODUCTS,
        r"gemm|gemv|cutlass|nvjet|cublas|splitK|wgmma|^aten::(linear|mm|addmm|matmul|bmm)|^mkldnn::_linear",
    ),
    (Part.COPIES, r"^aten::(copy_|_to_copy|to|contiguous)$"),
]
_PATTERNS = [(part, re.compile(pattern)) for part, pattern in _NAMES]


def part_of(kernel: Kernel) -> Part:
    """The part of a kernel by its name alone; the product with the head counts as one of the base products."""
    return next((part for part, pattern in _PATTERNS if pattern.search(kernel.name)), Part.OTHER)


def assign(step: Step) -> list[tuple[Kernel, Part]]:
    """Every kernel of a step with its part. The last product is that of the head: the logits'."""
    parts = [part_of(kernel) for kernel in step.kernels]
    products = [index for index, part in enumerate(parts) if part is Part.PRODUCTS]
    if products:
        parts[products[-1]] = Part.LOGITS
    return list(zip(step.kernels, parts, strict=True))


def floors(context: Context, rows: int, count: int, before: int, ranks: Iterable[int] = ()) -> dict[Part, float]:
    """Microseconds that each part takes at the least, by the rates of this run, for `rows` sequences of `count` tokens.

    before: tokens whose KV they read. ranks: of the sequences' adapters. Bytes count once: weights, adapters and KV as
    they are read; of the elementwise kernels, what they read and write. Products and attention of prompts count their
    operations where these take longer. Parts that are not here have no floor.
    """
    geometry, itemsize, tokens = context.size.geometry, context.dtype.itemsize, rows * count
    bandwidth, flops = context.bandwidth(), context.limits()["matmul"]["flops_per_s"]
    keys = rows * sum(range(before + 1, before + count + 1))
    of_ranks: Sequence[int] = tuple(ranks)[:rows]
    heads = (geometry.heads + 2 * geometry.kv_heads) * geometry.head_dim
    normed = 2 * 4 * geometry.hidden  # two norms read and write the residual, too
    read_and_written = tokens * geometry.layers * (normed + 2 * heads + 3 * geometry.ffn)
    counted = {
        Part.PRODUCTS: (geometry.layer_params, 2 * tokens * geometry.layer_params),
        Part.LOGITS: (geometry.head_params, 2 * rows * geometry.head_params),
        Part.LORA: (sum(of_ranks) * geometry.rank_params, 2 * count * sum(of_ranks) * geometry.rank_params),
        Part.ATTENTION: (
            rows * (before + count) * geometry.kv_elems_per_token * context.kv_itemsize // itemsize,
            4 * geometry.layers * geometry.hidden * keys,
        ),
        Part.ELEMENTWISE: (read_and_written, 0),
    }
    return {
        part: max(elems * itemsize / bandwidth, operations / flops) * 1e6
        for part, (elems, operations) in counted.items()
        if elems
    }
