"""The compiled native library: its functions, and the descriptors that they take.

`ops/native/` is compiled when the package is built and a C++ compiler is there, once for each level of instructions in
`LEVELS`; the best that the processor has is used. `CHORUS_CPU_ISA` names another one, or `none`. Without any,
`available` is False and callers use the torch operators.
"""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_void_p, sizeof
from functools import cache
from pathlib import Path

import numpy as np
import torch

logger = logging.getLogger(__name__)

LEVELS = ("amx", "avx512bf16", "avx512", "avx2", "neon")
"""Levels of instructions that the library is compiled for, the best first."""

ISA = "CHORUS_CPU_ISA"
"""The environment variable that chooses among them."""

MODULES = 7
"""Projections of a layer that adapters may change."""


class AdapterDescriptor(Structure):
    """One part of an adapter: its pages, and where a rank-row has the A and B of each module."""

    _fields_ = [
        ("pages", c_void_p), ("first_elem", c_void_p), ("rank", c_int32), ("scale", c_float),
        ("slab_elems", c_int64),
        ("a_offset", c_int32 * MODULES), ("b_offset", c_int32 * MODULES),
    ]  # fmt: skip


class LayerDescriptor(Structure):
    """A layer's tensors, null where it has none."""

    _fields_ = [
        (name, c_void_p)
        for name in ("input_norm", "post_attention_norm", "qkv", "o", "gate_up", "down",
                     "qkv_bias", "q_norm", "k_norm", "o_bias", "gate_up_bias", "down_bias")
    ]  # fmt: skip


class ModelDescriptor(Structure):
    """Shapes and weights of a model."""

    _fields_ = [
        *((name, c_int32) for name in
          ("hidden", "ffn", "layers", "heads", "kv_heads", "head_dim", "vocab", "block_tokens")),
        ("eps", c_float), ("reserved", c_int32), ("layer", POINTER(LayerDescriptor)),
        *((name, c_void_p) for name in ("embed", "lm_head", "norm", "cos", "sin", "arena")), ("page_elems", c_int64),
    ]  # fmt: skip


class StepDescriptor(Structure):
    """Everything that one step reads and writes."""

    _fields_ = [
        *((name, c_int32) for name in ("tokens", "rows", "segments", "logits_wanted")),
        *((name, c_void_p) for name in
          ("token_ids", "positions", "page", "offset", "qo_indptr", "kv_lens", "page_table")),
        ("table_stride", c_int64),
        *((name, c_void_p) for name in ("logit_tokens", "segment_begin", "segment_end", "segment_adapters", "logits",
           "logit_rows", "segment_ready", "segment_late")),
        ("max_stall_ns", c_int64), ("best", c_void_p), ("scores_wanted", c_int64),
        *((name, c_void_p) for name in ("segment_level", "layer", "draws", "lent")),
    ]  # fmt: skip


class LentDescriptor(Structure):
    """Segments of a step that other processes compute: see `native/lend.h`."""

    _fields_ = [
        ("ranks", c_void_p), ("count", c_int64),
        *((name, c_void_p) for name in ("segment", "row", "share", "first_elem", "image_ready", "layers", "handovers")),
    ]  # fmt: skip


class AssistDescriptor(Structure):
    """A step's segments as a process that computes a share of them knows them."""

    _fields_ = [
        *((name, c_int32) for name in ("hidden", "ffn", "q", "kv", "first", "last")),
        ("count", c_int64), ("page_elems", c_int64),
        *((name, c_void_p) for name in ("row", "adapters", "images", "handovers")),
    ]  # fmt: skip


class MergeDescriptor(Structure):
    """A group of a layer's projections, and what is added to it."""

    _fields_ = [
        ("origin", c_void_p), ("to", c_void_p),
        *((name, c_int32) for name in ("group", "layer", "columns", "inputs")),
        ("parts", c_void_p), ("count", c_int64),
    ]  # fmt: skip


#: Most segments of a step that are handed over, and most hand-overs: kLent and kHandovers in lend.h.
MOST_LENT, MOST_HANDOVERS = 1000, 1 << 12

# They mirror the structures of ops/native/panels.h, sampling.h and lend.h.
DRAW = np.dtype(
    [("inverse_temperature", "f8"), ("u", "f8"), ("top_p", "f8"), ("min_p", "f8"), ("top_k", "i8"), ("logits", "i8"),
     ("token", "i8")]
)  # fmt: skip
HANDOVER = np.dtype({
    "names": ["layer", "group", "active"], "formats": ["i4", "i4", ("u1", MOST_LENT)], "offsets": [0, 4, 8],
    "itemsize": -(-(8 + MOST_LENT) // 64) * 64,
})  # fmt: skip
SCORE = np.dtype([("logits", "i8"), ("token", "i8"), ("count", "i8"), ("ids", "i8"), ("values", "i8"), ("own", "f8")])

#: chorus_descriptors() in library.h.
_DESCRIPTORS = (
    (
        ((sizeof(StepDescriptor) * 1000 + sizeof(ModelDescriptor)) * 1000 + sizeof(LayerDescriptor)) * 1000
        + sizeof(MergeDescriptor)
    )
    * 1000
    + (sizeof(LentDescriptor) + sizeof(AssistDescriptor)) * 10000
    + HANDOVER.itemsize
)

#: Of each function of the library its name, what it returns and what it takes.
_FUNCTIONS = (
    ("descriptors", c_int64),
    ("supported", c_int),
    ("rows_open", c_void_p, c_int, c_void_p, c_void_p, c_int64, c_void_p, c_int64),
    ("rows_next", c_int, c_void_p, c_void_p, c_void_p),
    ("rows_at", c_void_p, c_void_p, c_int64, c_int64),
    ("rows_close", None, c_void_p),
    ("decoder_create", c_void_p, c_int, c_void_p, c_int),
    ("decoder_forward", None, c_void_p, c_void_p),
    ("decoder_score_logits", None, c_void_p, c_int, c_int, c_void_p),
    ("decoder_sample", None, c_void_p, c_void_p, c_int, c_void_p, c_int),
    ("ban", None, c_void_p, c_int64, c_void_p, c_int64, c_int64),
    ("decoder_merge", c_float, c_void_p, c_void_p),
    ("decoder_threads", c_int, c_void_p),
    ("decoder_join", None, c_void_p, c_void_p, c_int),
    ("decoder_destroy", None, c_void_p),
    ("ranks_bytes", c_int64, c_int, c_int64),
    ("ranks_create", c_void_p, c_void_p, c_int, c_int, c_int64, c_double, c_double),
    ("ranks_begin", None, c_void_p, c_int64),
    ("ranks_add_up", c_int, c_void_p, c_void_p, c_int64),
    ("ranks_gather", c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p),
    ("ranks_state", c_int, c_void_p),
    ("ranks_fail", None, c_void_p, c_int64),
    ("ranks_lose", None, c_void_p),
    ("ranks_meet", c_int, c_void_p),
    ("ranks_post", None, c_void_p),
    ("ranks_count", c_int64, c_void_p),
    ("ranks_word", c_void_p, c_void_p, c_int),
    ("ranks_sums", c_int, c_void_p),
    ("ranks_mine", c_void_p, c_void_p),
    ("ranks_part", c_void_p, c_void_p, c_int),
    ("ranks_destroy", None, c_void_p),
    ("assist_input", c_int, c_int),
    ("assist_row", c_int64, c_int, c_int),
    ("assist_create", c_void_p, c_int),
    ("assist_hand_over", None, c_void_p, c_void_p, c_int, c_void_p, c_int64, c_int64),
    ("assist_serve", None, c_void_p, c_void_p, c_void_p),
    ("assist_destroy", None, c_void_p),
    ("read_rate", c_double, c_int, c_void_p, c_int64),
    ("product_rate", c_double, c_int, c_int, c_int64),
)


@cache
def built(level: str) -> ctypes.CDLL | None:
    """The library compiled for a level, None where it was not built. `levels` says what this processor can run."""
    for path in sorted(Path(__file__).parent.glob(f"_native_{level}.*so")):
        try:
            found = ctypes.CDLL(str(path))
            if not hasattr(found, "chorus_supported"):
                continue  # it is for another architecture, and empty here
            for name, result, *arguments in _FUNCTIONS:
                function = getattr(found, f"chorus_{name}")
                function.restype, function.argtypes = result, arguments
            if found.chorus_descriptors() != _DESCRIPTORS:
                raise OSError("its descriptors are of another version")
        except (OSError, AttributeError) as error:
            logger.warning("%s is not used: %s; reinstall to build it anew", path.name, error)
            continue
        return found
    return None


def levels() -> list[str]:
    """The levels that were built and that this processor can run, the best first."""
    return [level for level in LEVELS if (found := built(level)) is not None and found.chorus_supported()]


def level() -> str | None:
    """The level that is used: `CHORUS_CPU_ISA` if it is set, else the best. None where there is none.

    ValueError for a level that is unknown, or that this processor or this installation does not have.
    """
    wanted, here = os.environ.get(ISA), levels()
    if not wanted:
        return here[0] if here else None
    if wanted == "none":
        return None
    if wanted not in here:
        known = "" if wanted in LEVELS else f", not one of {', '.join((*LEVELS, 'none'))}"
        raise ValueError(f"{ISA} is {wanted!r}{known}; this processor and this build have {', '.join(here) or 'none'}")
    return wanted


def library() -> ctypes.CDLL | None:
    """The library of the level that is used, None where there is none."""
    chosen = level()
    return None if chosen is None else built(chosen)


def available(dtype: torch.dtype) -> bool:
    """True if the library was built, and this processor can run it in `dtype`."""
    return why_unavailable(dtype) is None


def why_unavailable(dtype: torch.dtype) -> str | None:
    """Return the reason why the library can't be used with `dtype`; None if it can."""
    if library() is None:
        if os.environ.get(ISA) == "none":
            return f"{ISA} is 'none'"
        if not any(built(level) for level in LEVELS):
            return "it is not built: install a C++ compiler, then Chorus again"
        return f"this processor has none of the instruction sets that it is for: {', '.join(LEVELS)}"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"it computes in bfloat16 and float32, not in {str(dtype).removeprefix('torch.')}"
    return None
