"""Adapters as the native library reads them.

Tests: tests/ops/lora/test_sgmv.py, tests/ops/cpu/test_native_sgmv.py
"""

from __future__ import annotations

from ctypes import Structure

import torch

from ..lora.sgmv import AdapterRows
from .native_library import native_layout


def described(rows: AdapterRows) -> tuple[Structure, tuple[torch.Tensor, ...]]:
    """Return a part of an adapter in the library's form, and the tensors to which it points."""
    pages = torch.tensor(rows.pages, dtype=torch.int64)
    first_elem = torch.tensor(rows.first_elem, dtype=torch.int64)
    offsets = torch.tensor([rows.a_offset, rows.b_offset], dtype=torch.int32)
    vectors = None if rows.vectors is None else torch.tensor(rows.vectors, dtype=torch.int64)
    tokens = torch.tensor(rows.token_ids, dtype=torch.int64)
    descriptor = native_layout().filled(
        "Adapter",
        pages=pages.data_ptr(),
        first_elem=first_elem.data_ptr(),
        rank=rows.rank,
        scale=rows.scale,
        slab_elems=rows.slab_elems,
        a_offset=offsets[0].data_ptr(),
        b_offset=offsets[1].data_ptr(),
        vectors=None if vectors is None else vectors.data_ptr(),
        modules=len(rows.a_offset),
        tokens=tokens.data_ptr() if rows.token_ids else None,
    )
    return descriptor, (pages, first_elem, offsets, tokens, *(() if vectors is None else (vectors,)))
