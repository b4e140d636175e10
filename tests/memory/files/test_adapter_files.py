"""Adapter directories whose files are corrupt, of the wrong kind, or replaced."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.memory.adapters.image import ImageForm, read_image
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.tensor_file import FileIdentity, TensorFile
from chorus.memory.host.buffers import HostBuffers
from chorus.memory.host.image import HostImage

from ...tables import TINY
from .loading import CONFIG, PAGE_ELEMS, Q0_A, Q0_B, WEIGHTS, load, refusal

pytestmark = pytest.mark.wide


def header_of(path: Path) -> tuple[dict, bytes]:
    data = (path / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put_header(path: Path, header: str | bytes | dict, data: bytes, length: int | None = None) -> None:
    if isinstance(header, dict):
        header = json.dumps(header)
    raw = header.encode() if isinstance(header, str) else header
    (path / WEIGHTS).write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def edited(edit):
    """Change the safetensors header as a dictionary."""

    def change(path):
        header, data = header_of(path)
        put_header(path, edit(header) or header, data)

    return change


def twice(path):
    header, data = header_of(path)
    entry = json.dumps(header[Q0_A])
    put_header(path, json.dumps(header)[:-1] + f', "{Q0_A}": {entry}}}', data)


def long_sizes(path, digits):
    """Multiplied with each other they would keep the interpreter for a minute."""
    header, data = header_of(path)
    header[Q0_A]["shape"] = ["N", "N"]
    put_header(path, json.dumps(header).replace('"N"', "9" * digits), data)


def cut(path):
    file = path / WEIGHTS
    os.truncate(file, file.stat().st_size - 5)


def replaced(name, content):
    return lambda path: (path / name).write_bytes(content)


def looped(name):
    def change(path):
        (path / name).unlink()
        (path / name).symlink_to(path / name)

    return change


def made(name, make):
    def change(path):
        (path / name).unlink()
        make(path / name)

    return change


def pickled(path):
    (path / WEIGHTS).unlink()
    (path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")


CORRUPT = {
    "empty": (replaced(WEIGHTS, b""), WEIGHTS, "0 bytes", "cut off"),
    "seven bytes": (replaced(WEIGHTS, b"1234567"), WEIGHTS, "7 bytes"),
    "cut in data": (cut, WEIGHTS, "end at byte", "cut off"),
    "cut in header": (lambda path: os.truncate(path / WEIGHTS, 100), WEIGHTS, "claims a header", "cut off"),
    "more data": (lambda path: (path / WEIGHTS).open("ab").write(b"xx"), WEIGHTS, "end at byte"),
    "huge header": (lambda path: put_header(path, "{}", b"", 1 << 60), WEIGHTS, "header of 1152921504606846976"),
    "header not JSON": (lambda path: put_header(path, "{nope", b""), WEIGHTS, "not JSON"),
    "header not UTF-8": (lambda path: put_header(path, b'{"\xff": 1}', b""), WEIGHTS, "not JSON"),
    "header a list": (lambda path: put_header(path, "[]", b""), WEIGHTS, "not a JSON object"),
    "header nested": (lambda path: put_header(path, "[" * 100_000, b""), WEIGHTS, "nested"),
    "header with space": (lambda path: put_header(path, " {}", b""), WEIGHTS, "not a JSON object"),
    "a key twice": (twice, WEIGHTS, Q0_A, "twice"),
    "an entry number": (edited(lambda h: h.update({Q0_A: 3})), WEIGHTS, Q0_A, "not an object"),
    "no dtype": (edited(lambda h: h[Q0_A].pop("dtype") and None), WEIGHTS, Q0_A, "dtype None"),
    "negative size": (edited(lambda h: h[Q0_A].update(shape=[-4, -16])), WEIGHTS, Q0_A, "shape"),
    "float size": (edited(lambda h: h[Q0_A].update(shape=[4.0, 16])), WEIGHTS, Q0_A, "shape"),
    "huge size": (edited(lambda h: h[Q0_A].update(shape=[2**62, 2**62])), WEIGHTS, Q0_A, "corrupt"),
    "sizes of 4,290 digits": (lambda path: long_sizes(path, 4290), WEIGHTS, Q0_A, "[inf, inf]"),
    "sizes of 4,301 digits": (lambda path: long_sizes(path, 4301), WEIGHTS, "not JSON", "4301 digits"),
    "many dimensions": (edited(lambda h: h[Q0_A].update(shape=[1] * 9)), WEIGHTS, Q0_A, "shape"),
    "many tensors": (
        edited(lambda h: {str(n): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(8193)}),
        WEIGHTS,
        "8193 tensors",
    ),
    "header of two MiB": (lambda path: put_header(path, "{" + " " * (2 << 20) + "}", b""), WEIGHTS, "at most 1048576"),
    "weights a device": (made(WEIGHTS, lambda file: file.symlink_to("/dev/zero")), WEIGHTS, "not a regular file"),
    "config a device": (made(CONFIG, lambda file: file.symlink_to("/dev/zero")), CONFIG, "not a regular file"),
    "config float": (replaced(CONFIG, b'{"lora_alpha": 0.' + b"9" * 9000 + b"}"), CONFIG, "not JSON", "characters"),
    "three places": (edited(lambda h: h[Q0_A].update(data_offsets=[0, 1, 2])), WEIGHTS, Q0_A, "data_offsets"),
    "overlap": (edited(lambda h: h[Q0_A].update(data_offsets=h[Q0_B]["data_offsets"])), WEIGHTS, "begins at byte"),
    "backwards": (edited(lambda h: h[Q0_A]["data_offsets"].reverse()), WEIGHTS, Q0_A, "needs"),
    "metadata": (edited(lambda h: h.update(__metadata__={"a": 1})), WEIGHTS, "__metadata__"),
    "surrogate name": (edited(lambda h: h.update({"\ud800": h.pop(Q0_A)})), WEIGHTS, "\\ud800"),
    "endless name": (edited(lambda h: h.update({"x" * 10_000: h.pop(Q0_A)})), WEIGHTS, "xxx"),
    "weights absent": (lambda path: (path / WEIGHTS).unlink(), WEIGHTS, "not found"),
    "weights a directory": (made(WEIGHTS, Path.mkdir), WEIGHTS, "not a regular file"),
    "weights a pipe": (made(WEIGHTS, os.mkfifo), WEIGHTS, "not a regular file"),
    "weights a loop": (looped(WEIGHTS), WEIGHTS, "cannot be read", "symbolic links"),
    "weights dangling": (made(WEIGHTS, lambda file: file.symlink_to("gone")), WEIGHTS, "cannot be read"),
    "pickle only": (pickled, WEIGHTS, "adapter_model.bin", "never read", "safetensors"),
    "config absent": (lambda path: (path / CONFIG).unlink(), CONFIG, "not found"),
    "config empty": (replaced(CONFIG, b""), CONFIG, "not JSON"),
    "config not JSON": (replaced(CONFIG, b"r: 4"), CONFIG, "not JSON"),
    "config binary": (replaced(CONFIG, b"\xff\xfe{}"), CONFIG, "not JSON"),
    "config a list": (replaced(CONFIG, b"[4]"), CONFIG, "object", "list"),
    "config null": (replaced(CONFIG, b"null"), CONFIG, "object"),
    "config nested": (replaced(CONFIG, b"[" * 100_000), CONFIG, "nested"),
    "config endless": (replaced(CONFIG, b" " * (2 << 20)), CONFIG, "longer"),
    "config long number": (replaced(CONFIG, b'{"r": ' + b"9" * 5000 + b"}"), CONFIG, "not JSON", "5000 digits"),
    "config key twice": (replaced(CONFIG, b'{"r": 4, "r": 8}'), CONFIG, "'r'", "twice"),
    "config a directory": (made(CONFIG, Path.mkdir), CONFIG, "not a regular file"),
    "config a pipe": (made(CONFIG, os.mkfifo), CONFIG, "not a regular file"),
    "config a loop": (looped(CONFIG), CONFIG, "cannot be read", "symbolic links"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupt_files_are_refused_by_name(adapter_draft, tmp_path, case):
    change, file, *words = CORRUPT[case]
    path = adapter_draft().write(tmp_path / "a")
    change(path)
    message = refusal(path)
    assert message.startswith(str(path / file)), message
    for word in words:
        assert word in message
    assert len(message) < 1200
    assert message.isprintable()


def test_paths_that_are_no_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, word in {
        "absent": "no such directory",
        "file": "not a directory",
        "file/below": "cannot be read",
        "loop": "symbolic links",
        "n" * 300: "too long",
        "nul\0": "null",
    }.items():
        assert word in refusal(tmp_path / name)


def test_links_to_a_good_adapter_are_followed(adapter_draft, tmp_path):
    path = adapter_draft().write(tmp_path / "a")
    (tmp_path / "link").symlink_to(path)
    assert load(tmp_path / "link")[0].parts == load(path)[0].parts


# -- changes between registration and reading


def test_a_file_that_changed_since_registration_is_refused(adapter_draft, tmp_path):
    path = adapter_draft().write(tmp_path / "a")
    manifest, layout, _ = load(path)

    def read(it=manifest):
        read_image(it, ImageForm(layout, TINY, PAGE_ELEMS, torch.float32), HostImage(), HostBuffers())

    read()
    adapter_draft(seed=1).write(path)
    os.utime(path / WEIGHTS, ns=(0, manifest.mtime_ns + 1))
    with pytest.raises(AdapterFormatError, match=r"changed on disk since .* register the adapter again"):
        read()
    os.utime(path / WEIGHTS, ns=(0, manifest.mtime_ns))
    with pytest.raises(AdapterFormatError, match="changed on disk"):
        read()  # of the same size and time, and a good adapter; but not the one that was registered
    save_file({**load_file(path / WEIGHTS), "x": torch.ones(1)}, path / WEIGHTS)
    with pytest.raises(AdapterFormatError, match="changed on disk"):
        read()
    adapter_draft(rank=8, targets=("q_proj",)).write(path)
    status = (path / WEIGHTS).stat()
    identity = FileIdentity(status.st_dev, status.st_ino, status.st_ctime_ns)
    with pytest.raises(AdapterFormatError, match="changed on disk"):
        read(replace(manifest, file_size=status.st_size, mtime_ns=status.st_mtime_ns, identity=identity))
    (path / WEIGHTS).unlink()
    with pytest.raises(AdapterFormatError, match="not found"):
        read()


def test_a_file_that_changes_while_it_is_read_is_refused(adapter_draft, tmp_path, monkeypatch):
    path = adapter_draft().write(tmp_path / "a")
    manifest, layout, _ = load(path)
    read_into = TensorFile.read_into

    def read_and_touch(self, target, offset):
        read_into(self, target, offset)
        if offset > 8:
            os.utime(path / WEIGHTS, ns=(0, manifest.mtime_ns + offset))

    monkeypatch.setattr(TensorFile, "read_into", read_and_touch)
    with pytest.raises(AdapterFormatError, match="changed on disk"):
        read_image(manifest, ImageForm(layout, TINY, PAGE_ELEMS, torch.float32), HostImage(), HostBuffers())
