"""A GGUF file's header is what the package's reader makes of it; arrays that the file does not hold are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from chorus.core.model.checkpoints.gguf_file import GgufFile
from chorus.core.model.specs.config import UnsupportedModel

gguf = pytest.importorskip("gguf")

TOKENS = [*(f"token {number}" for number in range(300)), "", "ä"]


def write(path: Path, endian: int = gguf.GGUFEndian.LITTLE) -> GgufFile:
    writer = gguf.GGUFWriter(path, "llama", False, endian)
    writer.add_array("texts", TOKENS)
    writer.add_array("kinds", [*range(302)])
    writer.add_array("scores", [0.5, -1.25])
    writer.add_array("flags", [True, False, True])
    writer.add_array("one", ["alone"])
    writer.add_array("nested", [[1, 2], [3, 4]])
    writer.add_uint32("llama.block_count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


@pytest.mark.parametrize("endian", gguf.GGUFEndian)
def test_fields_are_those_of_the_package(tmp_path, endian):
    file = write(tmp_path / "a.gguf", endian)
    known = gguf.GGUFReader(tmp_path / "a.gguf").fields
    assert {"texts", "kinds", "scores", "flags", "one", "nested"} < known.keys()
    for name, field in known.items():
        assert file.get(name) == field.contents()
        assert file.length(name) == len(field.data)
    assert file.get("texts") == TOKENS


@pytest.mark.parametrize(("name", "after", "value"), [("texts", 8, 255), ("kinds", 8, 255), ("texts", 16, 200)])
def test_an_array_that_goes_beyond_the_file_is_refused(tmp_path, name, after, value):
    """after: the byte behind the name, and the types of a field and of its elements: of the length, or of a text's."""
    write(path := tmp_path / "a.gguf")
    data = bytearray(path.read_bytes())
    at = data.index(name.encode()) + len(name) + after
    data[at : at + 4] = [value] * 4
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel, match=r"cannot be read as GGUF: .*; download the file again"):
        GgufFile(path)
