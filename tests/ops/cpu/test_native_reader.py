"""The native reader writes the same bits as torch's casts and transposes, and names unreadable data."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.ops.cpu.native_reader import FileRows, ReadJobs
from chorus.ops.library.native_descriptors import Element, ReadJob

pytestmark = [pytest.mark.native, pytest.mark.wide]

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
OUT = [torch.float32, torch.float16, torch.bfloat16]
GAP = 7.0  # the value between the rows before and after


class Layer:
    """Tensors of some modules in a file, and the jobs that read them into slabs with gaps."""

    def __init__(self, path, tensors, padding=3, lead=5, first=11):
        """tensors: per module (A, B) in the file's element types."""
        self.path, self.tensors, self.lead, self.first = path, tensors, lead, first
        data, starts = bytearray(b"\xff" * 13), []
        for pair in tensors:
            for tensor in pair:
                starts.append(len(data))
                data += tensor.contiguous().view(torch.uint8).numpy().tobytes()
        path.write_bytes(data)
        self.num_bytes = len(data)
        offset, self.offsets = lead, []
        for a, b in tensors:
            self.offsets.append((offset, offset + a.shape[1] + padding))
            offset += a.shape[1] + b.shape[0] + 2 * padding
        self.slab_elems = offset
        self.rank = len(tensors[0][0])
        self.out_elems = first + self.rank * self.slab_elems
        names = {dtype: number for name, number in Element.__members__.items() for dtype in [DTYPES[name]]}
        self.jobs = [
            ReadJob(
                starts[2 * m],
                starts[2 * m + 1],
                names[a.dtype],
                names[b.dtype],
                self.rank,
                a.shape[1],
                b.shape[0],
                first,
                self.slab_elems,
                *self.offsets[m],
            )
            for m, (a, b) in enumerate(tensors)
        ]

    def expected(self, dtype):
        out = torch.full((self.out_elems,), GAP, dtype=dtype)
        slabs = out[self.first :].view(self.rank, self.slab_elems)
        for (a, b), (at_a, at_b) in zip(self.tensors, self.offsets, strict=True):
            slabs[:, at_a : at_a + a.shape[1]] = a.to(dtype)
            slabs[:, at_b : at_b + b.shape[0]] = b.to(dtype).T
        return out

    def read(self, dtype, flags=os.O_RDONLY):
        out = torch.full((self.out_elems,), GAP, dtype=dtype)
        fd = os.open(self.path, flags)
        try:
            return out, FileRows(fd, one_group(self), dtype).next(out)
        finally:
            os.close(fd)


def one_group(layer, jobs=None):
    """A layer's jobs at once; the file is as long as it was written."""
    jobs = jobs or layer.jobs
    return ReadJobs(jobs, np.array([[0, 1, 0, len(jobs)]]), np.array([[0, layer.num_bytes]]), layer.out_elems)


def values(generator, shape, dtype, scale=1.0):
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def bits(tensor):
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16)


@pytest.mark.parametrize("out", OUT, ids=str)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("rank", [1, 3, 5, 8, 16, 33, 64])
def test_rows_are_what_torch_casts_and_transposes(tmp_path, stored, out, rank):
    generator = torch.Generator().manual_seed(rank)
    dtype = DTYPES[stored]
    shapes = [(48, 17), (129, 96), (16, 700)]
    pairs = [
        (values(generator, (rank, d_in), dtype), values(generator, (d_out, rank), dtype)) for d_in, d_out in shapes
    ]
    layer = Layer(tmp_path / "weights", pairs)
    got, fault = layer.read(out)
    assert fault is None
    assert torch.equal(bits(got), bits(layer.expected(out)))


@pytest.mark.parametrize("stored", DTYPES)
def test_tensors_larger_than_the_buffer(tmp_path, stored):
    generator = torch.Generator().manual_seed(1)
    dtype = DTYPES[stored]
    pair = (values(generator, (40, 5000), dtype), values(generator, (9001, 40), dtype))
    wide = (values(generator, (40, 90001), dtype), values(generator, (3, 40), dtype))
    layer = Layer(tmp_path / "weights", [pair, wide])
    got, fault = layer.read(torch.bfloat16)
    assert fault is None
    assert torch.equal(bits(got), bits(layer.expected(torch.bfloat16)))


@pytest.mark.parametrize("out", OUT, ids=str)
@pytest.mark.parametrize("stored", DTYPES)
def test_every_finite_value_rounds_as_torch_rounds(tmp_path, stored, out):
    """All 65,536 halves; of float32 those around every rounding step of both halves, with both signs, subnormal too."""
    if stored == "F32":
        steps = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16
        around = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF, 0x1001, 0x3000])
        every = (steps + around).flatten().to(torch.int32).view(torch.float32)
    else:
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(DTYPES[stored])
    keep = every.to(out).isfinite()
    every = torch.where(keep, every, torch.ones((), dtype=every.dtype))
    layer = Layer(tmp_path / "weights", [(every.view(16, -1), every.view(-1, 16))])
    got, fault = layer.read(out)
    assert fault is None
    assert torch.equal(bits(got), bits(layer.expected(out)))


@pytest.mark.parametrize("out", OUT, ids=str)
@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("side", "AB")
def test_nan_and_infinity_are_found_wherever_they_are(tmp_path, stored, out, bad, side):
    generator = torch.Generator().manual_seed(2)
    dtype = DTYPES[stored]
    for at in (0, 31, 32, 209, 5 * 42 - 1):
        pairs = [(values(generator, (5, 42), dtype, 0.01), values(generator, (42, 5), dtype, 0.01)) for _ in range(3)]
        pairs[1]["AB".index(side)].view(-1)[at] = bad
        _, fault = Layer(tmp_path / "weights", pairs).read(out)
        assert (fault.job, fault.side, fault.kind) == (1, side, "not finite")


@pytest.mark.parametrize(
    ("stored", "out", "fits", "too_large"),
    [
        ("F32", torch.float16, 65519.996, 65520.0),
        ("F32", torch.bfloat16, float.fromhex("0x1.fefffep127"), float.fromhex("0x1.ffp127")),
        ("BF16", torch.float16, 65280.0, 65536.0),
    ],
)
def test_values_beyond_the_range_are_told_from_values_that_round_into_it(tmp_path, stored, out, fits, too_large):
    dtype = DTYPES[stored]
    a, b = torch.zeros(3, 8, dtype=dtype), torch.zeros(8, 3, dtype=dtype)
    b[7, 2] = -fits
    layer = Layer(tmp_path / "weights", [(a, b)])
    got, fault = layer.read(out)
    assert layer.expected(out).isfinite().all(), "the test's own value does not fit"
    assert fault is None
    assert torch.equal(bits(got), bits(layer.expected(out)))
    b[7, 2] = -too_large
    layer = Layer(tmp_path / "weights", [(a, b)])
    assert not layer.expected(out).isfinite().all(), "the test's own value fits"
    fault = layer.read(out)[1]
    assert (fault.job, fault.side, fault.kind) == (0, "B", "beyond range")


def test_a_cut_file_and_an_unreadable_one(tmp_path):
    layer = Layer(tmp_path / "weights", [(torch.ones(2, 8), torch.ones(8, 2))])
    os.truncate(layer.path, layer.num_bytes - 1)
    assert layer.read(torch.float32)[1].kind == "ends"
    fault = layer.read(torch.float32, os.O_WRONLY)[1]
    assert (fault.kind, fault.error) == ("unreadable", errno.EBADF)


def test_wrong_jobs_and_outputs_are_refused_before_anything_is_written(tmp_path):
    layer = Layer(tmp_path / "weights", [(torch.ones(2, 8), torch.ones(8, 2))])
    job = layer.jobs[0]
    for wrong in (
        job._replace(first=job.first + 4),
        job._replace(d_out=9 + 3),
        job._replace(rank=0),
        job._replace(a_start=-1),
        job._replace(b_element=3),
    ):
        with pytest.raises(ValueError, match="job 1 "):
            one_group(layer, [job, wrong])
    with layer.path.open("rb") as file:
        rows = FileRows(file.fileno(), one_group(layer), torch.float32)
        for out in (
            torch.zeros(layer.out_elems - 1),
            torch.zeros(layer.out_elems, dtype=torch.int32),
            torch.zeros(layer.out_elems, 2)[:, 0],
        ):
            with pytest.raises(ValueError, match="contiguous elements"):
                rows.next(out)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shapes_in_any_mix_of_element_types(tmp_path_factory, data):
    rank = data.draw(st.integers(1, 70), "rank")
    seed = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30), "seed"))
    dtypes, widths = st.sampled_from(list(DTYPES.values())), st.integers(1, 90)
    pairs = [
        (
            values(seed, (rank, data.draw(widths, "d_in")), data.draw(dtypes)),
            values(seed, (data.draw(widths, "d_out"), rank), data.draw(dtypes)),
        )
        for _ in range(data.draw(st.integers(1, 3), "modules"))
    ]
    layer = Layer(tmp_path_factory.mktemp("w") / "weights", pairs, padding=data.draw(st.integers(0, 9)))
    out = data.draw(st.sampled_from(OUT), "out")
    got, fault = layer.read(out)
    assert fault is None
    assert torch.equal(bits(got), bits(layer.expected(out)))
