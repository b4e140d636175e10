"""Adapters read by jobs: the values that torch reads, for all shapes, and only from the inspected file."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from chorus.memory.adapters.image import ImageForm, read_image, row_jobs
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.tensor_file import ITEM_BYTES, TensorSpans
from chorus.memory.files.tensor_info import TensorInfo
from chorus.memory.host.buffers import HostBuffers
from chorus.memory.host.image import HostImage
from chorus.memory.pages.adapter_layout import AdapterLayout

from ...tables import TINY, TINY_PATHS
from ..files.loading import LAYERS, PAGE_ELEMS

WEIGHTS = "adapter_model.safetensors"
DTYPES = [{"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name] for name in ITEM_BYTES]

#: The dtypes that an adapter is drafted with and that its tensors are saved in.
DRAFTS = {
    "all modules": ({"rank": 4}, torch.float32),
    "some modules": ({"rank": 3, "targets": ("q_proj", "down_proj")}, torch.float16),
    "half precision": ({"rank": 5}, torch.bfloat16),
}


class RowsByTorch:
    """Reads an open file's groups as `RowJobs` describes them."""

    def __init__(self, fd, jobs, out_elems, dtype):
        self._fd, self._jobs, self._group = fd, jobs, -1

    def next(self, out):
        self._group += 1
        _, _, begin, end = self._jobs.groups[self._group].tolist()
        for a_at, b_at, a_type, b_type, rank, d_in, d_out, first, slab_elems, a_offset, b_offset in self._jobs.table[
            begin:end
        ].tolist():
            a, b = self._matrix(a_at, a_type, (rank, d_in)), self._matrix(b_at, b_type, (d_out, rank)).T
            for row in range(rank):
                slab = out[first + row * slab_elems :]
                slab[a_offset : a_offset + d_in], slab[b_offset : b_offset + d_out] = a[row], b[row]

    def bytes(self, start, end):
        first, last, *_ = self._jobs.groups[self._group].tolist()
        for span in self._jobs.spans[first:last].tolist():
            if span[0] <= start and end <= span[1]:
                return os.pread(self._fd, end - start, start)
        raise LookupError

    def close(self):
        closed.append(self)

    def _matrix(self, at, element, shape):
        dtype = DTYPES[element]
        self.bytes(at, at + shape[0] * shape[1] * dtype.itemsize)
        raw = bytearray(os.pread(self._fd, shape[0] * shape[1] * dtype.itemsize, at))
        return torch.frombuffer(raw, dtype=dtype).view(shape)


class RowsRefused(RowsByTorch):
    def next(self, out):
        self._group += 1
        return "refused"


closed = []


def read(manifest, layout, open_rows, dtype=torch.float32):
    """The image, and how many layers each publication told."""
    image, told = HostImage(), []
    image.follow(lambda: told.append(image.stream.num_ready))
    buffers = HostBuffers()
    buffers.take((layout.num_pages, PAGE_ELEMS), dtype).zero_()
    closed.clear()
    try:
        read_image(manifest, ImageForm(layout, TINY, PAGE_ELEMS, dtype), image, buffers, open_rows)
    finally:
        assert len(closed) == (open_rows is not None)
    return image.data, told


def inspected(path):
    manifest = inspect_adapter(path, TINY_PATHS)
    return manifest, AdapterLayout.build(manifest.parts, TINY, PAGE_ELEMS, 4)


@pytest.mark.parametrize("draft, dtype", DRAFTS.values(), ids=DRAFTS)
def test_jobs_give_what_torch_gives(adapter_draft, tmp_path, draft, dtype):
    it = adapter_draft(**draft)
    it.tensors = {name: tensor.to(dtype) for name, tensor in it.tensors.items()}
    manifest, layout = inspected(it.write(tmp_path / "a"))
    (by_torch, one_by_one), (by_jobs, told) = read(manifest, layout, None), read(manifest, layout, RowsByTorch)
    assert torch.equal(by_torch, by_jobs)
    assert one_by_one == [1, 2, 3]
    assert told == [3], "layers as small as these come at once"


def test_adapters_of_one_shape_share_their_jobs(adapter_draft, tmp_path):
    found = []
    for seed in range(2):
        manifest, layout = inspected(adapter_draft(seed=seed).write(tmp_path / f"a{seed}"))
        found.append((manifest.tensor_spans, row_jobs(manifest.parts, manifest.tensor_spans, layout, TINY)))
    assert found[0][0] is found[1][0]
    assert found[0][1] is found[1][1]


def test_another_header_in_a_file_that_looks_the_same_is_told(adapter_draft, tmp_path):
    path = adapter_draft().write(tmp_path / "a")
    manifest, layout = inspected(path)
    file = path / WEIGHTS
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    a, b = (f"base_model.model.model.layers.0.self_attn.{name}_proj.lora_A.weight" for name in "qk")
    header[a], header[b] = header[b], header[a]
    data[8 : 8 + length] = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    file.write_bytes(data)
    os.utime(file, ns=(0, manifest.mtime_ns))
    assert file.stat().st_size == manifest.file_size
    with pytest.raises(AdapterFormatError, match="changed on disk"):
        read(replace(manifest, identity=None), layout, RowsByTorch)


def test_rows_that_are_refused_are_read_again_to_say_why(adapter_draft, tmp_path):
    it = adapter_draft()
    name = next(iter(it.tensors))
    manifest, layout = inspected(it.write(tmp_path / "good"))
    data, _ = read(manifest, layout, RowsRefused)
    assert torch.equal(data, read(manifest, layout, None)[0])
    it.tensors[name][0, 0] = float("nan")
    manifest, layout = inspected(it.write(tmp_path / "bad"))
    with pytest.raises(AdapterFormatError, match="NaN or infinity"):
        read(manifest, layout, RowsRefused)


def test_places_are_packed_and_unpacked():
    tensors = [TensorInfo(name, (1, 1), offset, 1) for offset, name in enumerate(ITEM_BYTES, start=1 << 40)]
    places = TensorSpans.pack(99, b"digest", tensors)
    assert list(places) == [((1 << 40) + index, index) for index in range(len(ITEM_BYTES))]
    assert len(places.packed) == 8 * len(tensors)
    assert np.frombuffer(places.packed, dtype=np.int64).min() > 0


def test_spans_that_lie_close_are_read_as_one(adapter_draft, tmp_path):
    manifest, layout = inspected(adapter_draft().write(tmp_path / "a"))
    jobs = row_jobs(manifest.parts, manifest.tensor_spans, layout, TINY)
    assert jobs.layers == (range(LAYERS),)
    assert jobs.groups.tolist() == [[0, 1, 0, len(jobs.table)]]
    assert jobs.spans.tolist() == [[0, manifest.file_size]]


def test_a_header_that_cannot_be_read_is_told_by_the_plain_reader(adapter_draft, tmp_path):
    class Unreadable(RowsRefused):
        def bytes(self, start, end):
            raise LookupError

    manifest, layout = inspected(adapter_draft().write(tmp_path / "a"))
    assert torch.equal(read(manifest, layout, Unreadable)[0], read(manifest, layout, None)[0])
