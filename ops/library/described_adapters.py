"""Adapters as the native library reads them.

Tests: tests/ops/lora/test_sgmv.py, tests/ops/cpu/test_native_sgmv.py
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure

import torch

from ..lora.sgmv import AdapterRows
from .native_library import native_layout


def described(rows: AdapterRows) -> tuple[Structure, tuple[torch.Tensor, ...]]:
    """Return a part of an adapter in the library's form, and the tensors to which it points."""
    pages = torch.tensor(rows.pages, dtype=torch.int64)
    first_elem = torch.tensor(rows.first_elem, dtype=torch.int64)
    layout = native_layout()
    room = layout.length("Adapter.a_offset")
    vectors, tokens = _vectors(rows, room), torch.tensor(rows.token_ids, dtype=torch.int64)
    descriptor = layout.filled(
        "Adapter",
        pages=pages.data_ptr(),
        first_elem=first_elem.data_ptr(),
        rank=rows.rank,
        scale=rows.scale,
        slab_elems=rows.slab_elems,
        a_offset=_offsets(rows.a_offset, room),
        b_offset=_offsets(rows.b_offset, room),
        vectors=None if vectors is None else vectors.data_ptr(),
        tokens=tokens.data_ptr() if rows.token_ids else None,
    )
    return descriptor, (pages, first_elem, tokens, *(() if vectors is None else (vectors,)))


def _vectors(rows: AdapterRows, room: int) -> torch.Tensor | None:
    """Where vectors begin `[layers, room]`, for the library."""
    if rows.vectors is None:
        return None
    places = torch.tensor(rows.vectors, dtype=torch.int64)[:, :room]
    table = torch.full((len(places), room), -1)
    table[:, : places.shape[1]] = places
    return table


def _offsets(offsets: Sequence[int], room: int) -> tuple[int, ...]:
    """Offsets of a model's modules, and -1 for the others that the library has room for. A model may have more, if rows
    of this kind have none of them: those of mixtures, which are the last, have descriptors of their own.
    """
    if any(offset >= 0 for offset in offsets[room:]):
        last = max(module for module, offset in enumerate(offsets) if offset >= 0)
        raise ValueError(f"an adapter has module {last}, but the native library has room for {room}")
    known = offsets[:room]
    return (*known, *[-1] * (room - len(known)))
