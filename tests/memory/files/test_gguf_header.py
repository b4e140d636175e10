"""Headers of GGUF files from strangers: read as the gguf package does, or refused with one line."""

from __future__ import annotations

import os
import random
import struct
from contextlib import closing
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.gguf_header import GgufHeader
from chorus.memory.files.tensor_file import TensorFile


def header(path):
    with TensorFile(path, os.open(path, os.O_RDONLY)) as file:
        return GgufHeader.read(file)


def write(path, alignment=None):
    with closing(gguf.GGUFWriter(path, "llama")) as writer:
        if alignment:
            writer.add_custom_alignment(alignment)
        writer.add_float32("a.float", 1.5)
        writer.add_uint64("an.integer", 1 << 40)
        writer.add_bool("a.truth", True)
        writer.add_string("a.text", "ä")
        writer.add_array("some.texts", ["a", "b"])
        writer.add_array("some.numbers", [1, 2, 3])
        writer.add_tensor("one", np.arange(15, dtype=np.float32).reshape(3, 5))
        writer.add_tensor("two", np.arange(7, dtype=np.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    return path


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_as_the_package_reads_it(tmp_path, alignment):
    path = write(tmp_path / "a.gguf", alignment)
    it, peer = header(path), gguf.GGUFReader(path)
    for name, value in it.metadata.items():
        assert value == peer.fields[name].contents()
    assert set(it.metadata) == {name for name in peer.fields if not name.startswith("GGUF.")}
    for tensor in peer.tensors:
        info = it.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.offset, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)


def refusal(path, data):
    path.write_bytes(data)
    with pytest.raises(AdapterFormatError) as caught:
        header(path)
    return str(caught.value)


def test_cut_off_anywhere(tmp_path):
    data = write(tmp_path / "a.gguf").read_bytes()
    last = max(info.offset + info.num_bytes for info in header(tmp_path / "a.gguf").tensors.values())
    for end in range(0, last, 3):
        assert "cut off or corrupt" in refusal(tmp_path / "b.gguf", data[:end])


def test_changed_bytes_are_read_or_refused(tmp_path):
    data, rng = write(tmp_path / "a.gguf").read_bytes(), random.Random(1)
    for _ in range(500):
        other = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            other[rng.randrange(len(data) - 80)] = rng.choice((0, 1, 8, 9, 127, 255, rng.randrange(256)))
        (tmp_path / "b.gguf").write_bytes(other)
        try:
            header(tmp_path / "b.gguf")
        except AdapterFormatError as error:
            assert str(error).isprintable()


def test_other_kinds_of_files(tmp_path):
    data, path = write(tmp_path / "a.gguf").read_bytes(), tmp_path / "b.gguf"
    assert "not a GGUF file" in refusal(path, b"\x80" + data[1:])
    assert "version 1;" in refusal(path, data[:4] + struct.pack("<I", 1) + data[8:])
    assert "little-endian" in refusal(path, data[:4] + struct.pack(">I", 3) + data[8:])
    assert "no adapter" in refusal(path, data[:8] + struct.pack("<Q", 1 << 40) + data[16:])
    assert "no adapter" in refusal(path, data[:16] + struct.pack("<Q", 1 << 40) + data[24:])


def test_quantised_tensors_say_how_to_convert(tmp_path):
    path = tmp_path / "a.gguf"
    with closing(gguf.GGUFWriter(path, "llama")) as writer:
        values = gguf.quantize(np.ones((2, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor("one", values, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    with pytest.raises(AdapterFormatError, match=r"tensor 'one' has GGUF's type 8; .*--outtype f16"):
        header(path)


def test_a_huge_file_is_read_only_at_its_beginning(tmp_path):
    path = tmp_path / "a.gguf"
    write(path)
    os.truncate(path, 1 << 40)
    assert set(header(path).tensors) == {"one", "two"}
    file = SimpleNamespace(size=1 << 40, path=path, read_into=lambda target, offset: target.release())
    with pytest.raises(AdapterFormatError, match="not a GGUF file"):
        GgufHeader.read(file)
