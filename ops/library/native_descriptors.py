"""The native library's structures, as `ops/native/*.h` define them.

`layout` gives the position of each field; `native_library` compares it with the layout that a library reports
(`native/layout.h`).

Tests: tests/ops/library/test_native_layout.py
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, c_float, c_int32, c_int64, c_void_p, sizeof
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch

from ..lora.sgmv import MAX_MODULES


class Element(IntEnum):
    """Number of an element type in the library, by its name in safetensors files."""

    F32 = 0
    F16 = 1
    BF16 = 2


ELEMENT_OF = {torch.float32: Element.F32, torch.float16: Element.F16, torch.bfloat16: Element.BF16}


class AdapterDescriptor(Structure):
    """One part of an adapter: its pages, and the offsets of each module's A and B in a rank-row."""

    _fields_ = [
        ("pages", c_void_p),
        ("first_elem", c_void_p),
        ("rank", c_int32),
        ("scale", c_float),
        ("slab_elems", c_int64),
        ("a_offset", c_int32 * MAX_MODULES),
        ("b_offset", c_int32 * MAX_MODULES),
        ("vectors", c_void_p),
        ("tokens", c_void_p),
    ]


MAX_TARGETS = 6
"""Most projections of a product: kMaxTargets in descriptors.h."""

#: A product of layers: its group in a layer, inputs, and (module id, first column, width) of its projections.
ProductShape = tuple[int, int, Sequence[tuple[int, int, int]]]


class ProductDescriptor(Structure):
    """A product of layers."""

    _fields_ = [
        *((name, c_int32) for name in ("inputs", "count", "row_parallel")),
        ("targets", c_int32 * (3 * MAX_TARGETS)),
    ]


_ROW_PARALLEL = (1, 3, 20)
"""Groups of layers whose inputs TP ranks share, as `memory.pages.projections` numbers them."""


def described_products(products: Sequence[ProductShape]) -> Array[ProductDescriptor]:
    """Products in the library's form."""
    found = (ProductDescriptor * len(products))()
    for descriptor, (group, inputs, modules) in zip(found, products, strict=True):
        if len(modules) > MAX_TARGETS or any(module >= MAX_MODULES for module, _, _ in modules):
            raise ValueError(
                f"a product has the modules {[module for module, _, _ in modules]}; the native library has room for "
                f"{MAX_TARGETS} of a product, with ids below {MAX_MODULES}"
            )
        descriptor.row_parallel = group in _ROW_PARALLEL
        descriptor.inputs, descriptor.count = inputs, len(modules)
        descriptor.targets[: 3 * len(modules)] = [value for module in modules for value in module]
    return found


class NativeActivation(IntEnum):
    """An activation's number in the library."""

    SILU = 0
    GELU = 1
    """By tanh, as torch's `gelu(approximate="tanh")`."""
    CLAMPED_SWIGLU = 2
    """Of experts only: it has parameters."""
    GELU_ALONE = 3
    """As GELU, without a gate; so are all below."""
    GELU_BY_ERF = 4
    RELU_SQUARED = 5
    XIELU = 6


class NativeHeadNorm(IntEnum):
    """A norm of queries and keys: a number in the library."""

    EACH = 0
    """Of each head, with weights `[head_dim]`."""
    ALL = 1
    """Of all heads at once, with weights `[heads · head_dim]`."""
    OWN = 2
    """LayerNorm of each head, with as many weights."""


class NativeOutputGate(IntEnum):
    """Where the gates of attention's output are: a number in the library."""

    NONE = 0
    BESIDE_QUERIES = 1
    """Behind each head's query."""
    OF_HEADS = 2
    """Behind queries, keys and values, one of each head."""
    APART = 3
    """There, of each element."""


class NativeScoring(IntEnum):
    """How a router's logits become scores: a number in the library."""

    SOFTMAX = 0
    SOFTMAX_OF_CHOSEN = 1
    SIGMOID = 2
    SIGMOID_OF_CHOSEN = 3
    SPARSE_MIXER = 4


class IntegersDescriptor(Structure):
    """How a projection's weights are whole numbers: see `native/integers.h`. Without bits, they are not."""

    _fields_ = [
        ("scales", c_void_p),
        ("zeros", c_void_p),
        *((name, c_int32) for name in ("bits", "group", "input_bits", "input_block")),
    ]


class ModelDescriptor(Structure):
    """Shapes and weights of a model."""

    _fields_ = [
        *((name, c_int32) for name in
          ("hidden", "layers", "vocab", "block_tokens", "page_groups", "num_products")),
        ("eps", c_float), ("centered", c_int32), ("biased", c_int32),
        *((name, c_float) for name in ("embedding_multiplier", "logits_scale")),
        ("head_bias", c_void_p), ("embedding_norm", c_int32), ("logits_softcap", c_float),
        ("ops", c_void_p), ("registers", c_void_p), ("num_ops", c_int64), ("num_registers", c_int64),
        ("products", POINTER(ProductDescriptor)),
        *((name, c_void_p) for name in ("embed", "lm_head")),
        ("lm_head_integers", IntegersDescriptor), ("norm", c_void_p), ("arena", c_void_p),
        ("page_elems", c_int64), ("page_bytes", c_int64),
        *((name, c_int32) for name in
          ("float8_kv", "mixer", "k_heads", "v_heads", "k_dim", "v_dim", "conv_size")),
        ("delta_eps", c_float), ("beta", c_float), ("dt_min", c_float),
        *((name, c_int32) for name in ("gates_norm", "group_ranks", "by_channel")),
        *((name, c_int32) for name in ("convs_per_page", "heads_per_page", "conv_pages")),
        *((name, c_int32) for name in ("most_drafts", "drafts_per_page", "draft_page")),
        *((name, c_int32) for name in
          ("embed_module", "head_module", "embed_rows_module", "head_rows_module", "first_token")),
    ]  # fmt: skip


class SegmentsDescriptor(Structure):
    """A step's segments: tokens `begin` … `end`-1 use an adapter."""

    _fields_ = [
        ("count", c_int32),
        *((name, c_void_p) for name in ("begin", "end", "adapters", "level")),
        ("vectors", c_int32),
        ("undoes", c_int32),
    ]


class StepDescriptor(Structure):
    """Everything that one step reads and writes."""

    _fields_ = [
        *((name, c_int32) for name in ("tokens", "rows", "logits_wanted", "states_wanted", "logits_width")),
        *(
            (name, c_void_p)
            for name in ("token_ids", "positions", "offset", "page", "qo_indptr", "kv_lens", "page_table")
        ),
        ("table_stride", c_int64),
        ("page_stride", c_int64),
        ("logit_tokens", c_void_p),
        ("segments", SegmentsDescriptor),
        ("segment_ready", c_void_p),
        ("segment_late", c_void_p),
        ("max_stall_ns", c_int64),
        *((name, c_void_p) for name in ("logits", "logit_rows", "best", "samples", "ops", "offloaded")),
        *((name, c_void_p) for name in ("state_read", "state_written", "state_fresh")),
        *((name, c_void_p) for name in ("state_accepted", "state_drafts")),
        ("state_stride", c_int64),
        ("model_segments", SegmentsDescriptor),
        ("model_ready", c_void_p),
        ("model_late", c_void_p),
        *((name, c_void_p) for name in ("mixture", "mixture_ready", "mixture_late", "media", "media_rows")),
    ]


class OffloadDescriptor(Structure):
    """Segments of a step that offload workers compute: see `native/offload.h`."""

    _fields_ = [
        ("ranks", c_void_p),
        ("count", c_int64),
        *((name, c_void_p) for name in ("segment", "row", "share", "first_elem", "image_ready", "layers", "exchanges")),
    ]


class OffloadWorkerDescriptor(Structure):
    """A step's segments, for an offload worker that computes a share of them."""

    _fields_ = [
        *((name, c_int32) for name in ("num_products", "first", "last")),
        ("count", c_int64),
        ("page_elems", c_int64),
        ("products", POINTER(ProductDescriptor)),
        *((name, c_void_p) for name in ("row", "adapters", "images", "exchanges")),
    ]


class MergeDescriptor(Structure):
    """A product of a layer, and the adapter parts to add."""

    _fields_ = [
        ("origin", c_void_p),
        ("integers", IntegersDescriptor),
        ("to", c_void_p),
        ("product", c_int32),
        ("layer", c_int32),
        ("parts", c_void_p),
        ("count", c_int64),
    ]


class DeltaDescriptor(Structure):
    """A step of one layer of Gated DeltaNet: see `native/gated_delta.h`."""

    _fields_ = [
        *((name, c_int32) for name in ("mixer", "k_heads", "v_heads", "k_dim", "v_dim", "conv_size")),
        *((name, c_float) for name in ("eps", "beta", "dt_min")),
        *((name, c_int32) for name in ("gates_norm", "group_ranks", "by_channel")),
        *((name, c_void_p) for name in ("taps", "dt_bias", "a_log", "norm", "conv_bias", "d")),
        ("rows", c_int32),
        *((name, c_void_p) for name in ("qo_indptr", "begins", "accepted", "drafts")),
        ("most_drafts", c_int32),
        *((name, c_void_p) for name in ("conv_in", "recurrent_in", "drafts_in", "conv_out", "recurrent_out")),
        *((name, c_void_p) for name in ("drafts_out", "mixed", "out")),
    ]


class ExpertMatricesDescriptor(Structure):
    """Experts' matrices of one shape: see `native/mixture.h`, as of the structures below."""

    _fields_ = [(name, c_void_p) for name in ("w", "integers", "bias")]


class RoutingDescriptor(Structure):
    """Which experts a row goes to, and their weights: see `native/router.h`."""

    _fields_ = [
        *((name, c_void_p) for name in ("correction", "factors")),
        *((name, c_int32) for name in ("per_token", "scoring", "renormalised", "groups", "kept_groups", "group_best")),
        *((name, c_float) for name in ("epsilon", "factor", "jitter")),
    ]


class MixtureDescriptor(Structure):
    """A layer's mixture of experts."""

    _fields_ = [
        *((name, c_int32) for name in ("hidden", "experts", "size", "shared_size")),
        *((name, c_void_p) for name in ("router", "router_bias")),
        ("routing", RoutingDescriptor),
        ("activation", c_int32),
        *((name, c_float) for name in ("alpha", "limit")),
        *((name, ExpertMatricesDescriptor) for name in ("gate_up", "down", "shared_gate_up", "shared_down")),
        ("shared_gate", c_void_p),
        ("of_inputs", c_int32),
    ]


class MixtureStepDescriptor(Structure):
    """The rows of one step in a mixture of experts."""

    _fields_ = [
        ("rows", c_int32),
        *((name, c_void_p) for name in ("x", "y", "chosen", "weights", "lora")),
        ("lora_element", c_int32),
    ]


class MixtureTargetsDescriptor(Structure):
    """Projections of a product of a mixture: see `native/mixture_lora.h`, as of the structure below."""

    _fields_ = [("count", c_int32), ("targets", c_int32 * 6)]


class MixtureLoraDescriptor(Structure):
    """A step's adapters of mixtures of experts."""

    _fields_ = [
        ("arena", c_void_p),
        ("page_elems", c_int64),
        ("segments", SegmentsDescriptor),
        *((name, c_void_p) for name in ("experts", "num_experts")),
        ("layer", c_int32),
        ("targets", c_void_p),
    ]


class ReadFaultDescriptor(Structure):
    """Why rows of a file were not laid out."""

    _fields_ = [(name, c_int64) for name in ("fault", "job", "side", "error")]


class ReadJob(NamedTuple):
    """One module of one layer: A `[rank, d_in]` and B `[d_out, rank]` of the file, to rows of the output.

    a_start, b_start: bytes from the file's beginning; a_element, b_element: values of `Element`. Row i of A is written
    at element `first + i · slab_elems + a_offset`, row i of Bᵀ at `first + i · slab_elems + b_offset`.
    """

    a_start: int
    b_start: int
    a_element: int
    b_element: int
    rank: int
    d_in: int
    d_out: int
    first: int
    slab_elems: int
    a_offset: int
    b_offset: int


#: The most offloaded segments of a step, and the most exchanges: kLent and kHandovers in offload.h.
MAX_OFFLOADED, MAX_EXCHANGES = 1000, 1 << 12


def _numbers(*names: str) -> np.dtype:
    return np.dtype([(name, "i8") for name in names])


SAMPLE_ROW = np.dtype(
    [
        ("inverse_temperature", "f8"),
        ("u", "f8"),
        ("top_p", "f8"),
        ("min_p", "f8"),
        ("top_k", "i8"),
        ("logits", "i8"),
        ("token", "i8"),
    ]
)
LOGPROB_ROW = np.dtype(
    [("logits", "i8"), ("token", "i8"), ("count", "i8"), ("ids", "i8"), ("values", "i8"), ("own", "f8")]
)
EXCHANGE = np.dtype(
    {
        "names": ["layer", "product", "active"],
        "formats": ["i4", "i4", ("u1", MAX_OFFLOADED)],
        "offsets": [0, 4, 8],
        "itemsize": -(-(8 + MAX_OFFLOADED) // 64) * 64,
    }
)
READ_JOB = _numbers(*ReadJob._fields)
READ_GROUP = _numbers("spans_begin", "spans_end", "jobs_begin", "jobs_end")
SPAN = _numbers("start", "end")

#: The library's structures, by their names there.
_STRUCTURES: dict[str, type[Structure] | np.dtype] = {
    "Adapter": AdapterDescriptor,
    "Integers": IntegersDescriptor,
    "ProductDesc": ProductDescriptor,
    "ModelDesc": ModelDescriptor,
    "Segments": SegmentsDescriptor,
    "StepDesc": StepDescriptor,
    "OffloadDesc": OffloadDescriptor,
    "OffloadWorkerDesc": OffloadWorkerDescriptor,
    "MergeDesc": MergeDescriptor,
    "DeltaDesc": DeltaDescriptor,
    "ExpertMatrices": ExpertMatricesDescriptor,
    "RoutingDesc": RoutingDescriptor,
    "MixtureDesc": MixtureDescriptor,
    "MixtureStepDesc": MixtureStepDescriptor,
    "MixtureTargets": MixtureTargetsDescriptor,
    "MixtureLoraDesc": MixtureLoraDescriptor,
    "ReadFault": ReadFaultDescriptor,
    "Exchange": EXCHANGE,
    "SampleRow": SAMPLE_ROW,
    "LogprobRow": LOGPROB_ROW,
    "ReadJob": READ_JOB,
    "ReadGroup": READ_GROUP,
    "Span": SPAN,
}


def layout() -> dict[str, tuple[int, int]]:
    """Position and size of each field in its structure, in bytes, by names like `StepDesc.rows`.

    A whole structure has its own name, and begins at 0.
    """
    places: dict[str, tuple[int, int]] = {}
    for name, structure in _STRUCTURES.items():
        if isinstance(structure, np.dtype):
            places[name] = (0, structure.itemsize)
            for field, (dtype, offset, *_) in (structure.fields or {}).items():
                places[f"{name}.{field}"] = (offset, dtype.itemsize)
        else:
            places[name] = (0, sizeof(structure))
            for field, *_ in structure._fields_:
                place = getattr(structure, field)
                places[f"{name}.{field}"] = (place.offset, place.size)
    return places
