"""A file of many tensors, as of experts one by one, is checked with little work and memory for each of them."""

from __future__ import annotations

import gc
import sys
import tracemalloc

import pytest

from chorus.core.model.read_config import read_model_config
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.module_paths import ExpertForm
from chorus.perf.bench.models.random_mixture import MixtureShape, write_adapter

SHAPE = MixtureShape(layers=4, hidden=8, size=8, count=64, per_token=2, heads=2, kv_heads=1, head_dim=4, vocab=64)
NUM_TENSORS = 2 * SHAPE.layers * (3 * SHAPE.count + 4)

MOST_CALLS = 26
"""Calls of Python's functions for each tensor; chosen, as are the bytes."""

MOST_BYTES = 1200

MOST_KEPT = 1 << 18
"""Bytes, of the manifest and of caches."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The base model's modules, and an adapter of each expert."""
    root = tmp_path_factory.mktemp("many")
    config = read_model_config(SHAPE.write_config(root / "model"))
    adapter = write_adapter(root / "adapter", SHAPE, 1, ExpertForm.EACH)
    inspect_adapter(adapter, config.module_paths)  # what is kept for a model is made once
    return adapter, config.module_paths


def test_calls_for_each_tensor(files):
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        manifest = inspect_adapter(*files)
    finally:
        sys.setprofile(None)
    assert manifest.tensor_spans is not None
    assert len(list(manifest.tensor_spans)) == NUM_TENSORS
    assert count / NUM_TENSORS < MOST_CALLS


def test_memory_for_each_tensor(files):
    """What was read of the header is gone once it was checked: nothing is left to the garbage collector."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        manifest = inspect_adapter(*files)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.enable()
    assert peak / NUM_TENSORS < MOST_BYTES
    assert manifest.tensor_spans is not None
    assert len(manifest.tensor_spans.packed) == 8 * NUM_TENSORS
    assert kept < MOST_KEPT
