"""The compiled native library: its functions, and the ISA levels for which it is compiled.

If a C++ compiler is present when the package is built, `ops/native/` is compiled for the best of `LEVELS` that the
machine's processor supports, or for all (`setup.py`). The best level that was built and that the processor supports is
used. `CHORUS_CPU_ISA` names another one, or `none`. Without any, `available` is False and callers use torch operators.

Tests: tests/ops/library/test_native_levels.py, tests/ops/cpu/test_native_best.py,
tests/ops/library/test_native_build.py
"""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import POINTER, c_double, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from .native_layout import Field, NativeLayout, layout_of

logger = logging.getLogger(__name__)

LEVELS = ("amx", "avx512bf16", "avx512", "avx2", "neon")
"""ISA levels for which the library is compiled, best first."""

ISA = "CHORUS_CPU_ISA"
"""The environment variable that selects a level."""


#: Name, result and argument types of each function of the library.
_FUNCTIONS = (
    ("layout", POINTER(Field), POINTER(c_int64)),
    ("supported", c_int),
    ("rows_open", c_void_p, c_int, c_void_p, c_void_p, c_int64, c_void_p, c_int64),
    ("rows_next", c_int, c_void_p, c_void_p, c_void_p),
    ("rows_at", c_void_p, c_void_p, c_int64, c_int64),
    ("rows_close", None, c_void_p),
    ("decoder_create", c_void_p, c_int64, c_void_p, c_int),
    ("decoder_forward", None, c_void_p, c_void_p),
    ("decoder_prompt_logits", None, c_void_p, c_int, c_int, c_void_p),
    ("decoder_hidden_states", None, c_void_p, c_int, c_int, c_void_p),
    ("decoder_sample", None, c_void_p, c_void_p, c_int, c_void_p, c_int, c_int),
    ("ban", None, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64),
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
    ("ranks_count", c_int64, c_void_p),
    ("ranks_word", c_void_p, c_void_p, c_int),
    ("ranks_sums", c_int, c_void_p),
    ("ranks_mine", c_void_p, c_void_p),
    ("ranks_part", c_void_p, c_void_p, c_int),
    ("ranks_destroy", None, c_void_p),
    ("offload_input", c_int, c_int64),
    ("offload_row", c_int64, c_int64, c_int),
    ("offload_create", c_void_p, c_int64, c_void_p, c_void_p),
    ("offload_post", None, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64),
    ("offload_begin", None, c_void_p, c_void_p),
    ("offload_end", None, c_void_p),
    ("offload_destroy", None, c_void_p),
    ("read_rate", c_double, c_int, c_void_p, c_int64),
    ("update_rate", c_double, c_int, c_void_p, c_int64),
    ("gemm_rate", c_double, c_int, c_int64, c_int64),
    ("multiply", None, c_int, c_int64, c_int, *(c_void_p,) * 4, c_int, c_int, c_void_p, c_void_p),
    ("mix", None, c_int, c_int64, c_void_p, c_void_p),
    ("pack", None, c_int, c_void_p, c_int64, c_int64, c_void_p),
    ("gguf_blocks", c_int, c_int, c_int, c_void_p, c_int64, c_void_p),
    ("delta_run", c_double, c_int, c_void_p, c_int),
)


#: Tables that Python writes as rows of numbers, with their columns.
_TABLES = {
    "ReadJob": (
        "a_start", "b_start", "a_element", "b_element", "rank", "d_in", "d_out", "first", "slab_elems", "a_offset",
        "b_offset",
    ),
    "ReadGroup": ("spans_begin", "spans_end", "jobs_begin", "jobs_end"),
    "Span": ("start", "end"),
}  # fmt: skip


@cache
def built(level: str) -> ctypes.CDLL | None:
    """The library compiled for a level; None if it was not built. `levels` lists those that this processor can run."""
    for path in sorted(Path(__file__).parents[1].glob(f"_native_{level}.*so")):
        try:
            found = opened(path)
        except OSError as error:
            logger.warning("%s is not used: %s; reinstall to build it anew", path.name, error)
            continue
        if hasattr(found, "chorus_supported"):
            return found  # else it is for another architecture, and empty here
    return None


def opened(path: Path) -> ctypes.CDLL:
    """Open a library and set its functions' types. Raises OSError if it was built from other sources."""
    found = ctypes.CDLL(str(path))
    if hasattr(found, "chorus_supported"):
        for name, result, *arguments in _FUNCTIONS:
            function = getattr(found, f"chorus_{name}", None)
            if function is None:
                raise OSError(f"it was built from other sources, without {name}")
            function.restype, function.argtypes = result, arguments
        if differing := layout_of(found).lacking(_TABLES):
            raise OSError(f"it was built from other sources, with another {', '.join(differing)}")
    return found


def levels() -> list[str]:
    """The levels that were built and that this processor can run, best first."""
    return [level for level in LEVELS if (found := built(level)) is not None and _is_supported(found)]


@cache
def _is_supported(found: ctypes.CDLL) -> bool:
    """A library is asked once: one with tiles multiplies by them to see whether it can, which takes milliseconds."""
    return bool(found.chorus_supported())


def level() -> str | None:
    """The level in use: `CHORUS_CPU_ISA` if it is set, else the best; None if there is none.

    Raises ValueError for a level that is unknown, or that this processor or this installation lacks.
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
    """The library of the level in use; None if there is none."""
    chosen = level()
    return None if chosen is None else built(chosen)


def required() -> ctypes.CDLL:
    """The library of the level in use. Raises RuntimeError if there is none."""
    if (found := library()) is None:
        raise RuntimeError("the native library is not built; reinstall chorus with a C++ compiler")
    return found


def native_layout() -> NativeLayout:
    """The structures of the library in use. Raises RuntimeError if there is none."""
    return layout_of(required())


def lacks(name: str) -> bool:
    """True if there is a library, and it has no such enumerator, as `NormKind.kRms`."""
    return (found := library()) is not None and not layout_of(found).has(name)


def available(dtype: torch.dtype) -> bool:
    """True if the library was built, and this processor can run it in `dtype`."""
    return why_unavailable(dtype) is None


def why_unavailable(dtype: torch.dtype) -> str | None:
    """Return why the library can't be used with `dtype`; None if it can."""
    if library() is None:
        if os.environ.get(ISA) == "none":
            return f"{ISA} is 'none'"
        return _why_of_others() or "it is not built: install a C++ compiler, then Chorus again"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"it computes in bfloat16 and float32, not in {str(dtype).removeprefix('torch.')}"
    return None


def _why_of_others() -> str | None:
    """Why there is no library for this processor, where there are some for others: it is another machine's build."""
    others = [level for level in LEVELS if built(level)]
    if not others or levels():
        return None
    return (
        f"it is built for {', '.join(others)}, which this processor lacks: install Chorus on this machine again, or "
        "for all processors, with CHORUS_BUILD_LEVELS=all"
    )


def warn_of_others() -> None:
    """Log that only other processors have a library: PyTorch's operators, which serve, are several times slower."""
    if os.environ.get(ISA) != "none" and (reason := _why_of_others()):
        logger.warning("the native library is not used: %s", reason)


warn_of_others()
