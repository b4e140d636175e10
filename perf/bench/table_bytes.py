"""Bytes of the adapter tables of a GPU's steps, counted without a GPU.

Tests: tests/perf/bench/test_table_bytes.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from ...core.model.lora.lora_state_cuda import CudaLoraState, StepLimits
from ...core.model.read_config import read_model_config
from ...ops.table_records import Copy
from .models.sizes import SIZES

#: (rows, largest rank) of the counted engines: defaults of GPUs with 14 GiB and with 40 GiB, and the most rows.
CASES = (128, 256), (256, 64), (256, 256), (4096, 256)


def table_bytes(rows: int, rank: int, size: str = "llama-3.1-8b") -> dict[str, int]:
    """Page-locked host memory, and device memory, of an engine of `rows` sequences and adapters of up to `rank`.

    Partial sums of the kernels are left out.
    """
    locked = []

    def make_copy(num_bytes: int) -> Copy:
        locked.append(2 * num_bytes)  # two blocks, used in turn
        return torch.Tensor.copy_

    with tempfile.TemporaryDirectory() as work:
        config = read_model_config(SIZES[size].write_config(Path(work), "bfloat16"))
    layout = SIZES[size].geometry.page_layout(itemsize=2)
    arena = torch.zeros(1, layout.page_elems, dtype=torch.bfloat16, device="meta")
    limits = StepLimits(rank, adapters=rows, rows=rows, tokens=max(8192, rows), padded=512)
    state = CudaLoraState(config, arena, layout, limits, max_stall=0.0, make_copy=make_copy)
    return {"rows": rows, "rank": rank, "page-locked": sum(locked), "device": state.table_bytes}


def all_table_bytes(count: Callable[[int, int], dict[str, int]] = table_bytes) -> list[dict[str, int]]:
    """The counts of every case."""
    return [count(*case) for case in CASES]
