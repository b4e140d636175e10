"""Files that became others, adapters with equal parts, and adapters that change nothing."""

from __future__ import annotations

import os
import shutil
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.compose.composed import composed
from chorus.core.model.compose.decoder_layer import DecoderLayer
from chorus.core.model.specs.attention import AttentionSpec
from chorus.core.model.specs.feed_forward import GatedSpec
from chorus.core.model.specs.norms import Norms, NormSpec
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.identity import moved, open_unchanged, with_content
from chorus.memory.files.module_paths import ModulePaths
from chorus.memory.files.tensor_file import TensorFile
from chorus.memory.pages.projections import Projections

from ...tables import TINY_PATHS
from ..conftest import DIMS, FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, tensor_name
from .loading import WEIGHTS


def inspect(path):
    return inspect_adapter(path, TINY_PATHS)


def content(path):
    return with_content(inspect(path))


def is_accepted(manifest) -> bool:
    try:
        with open_unchanged(manifest):
            return True
    except AdapterFormatError as error:
        assert "changed on disk" in str(error)
        return False


def keep_times(file, status):
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("is_hashed", [False, True])
def test_a_replaced_file_of_equal_size_and_time_is_another(adapter_draft, tmp_path, is_hashed):
    path = adapter_draft(seed=1).write(tmp_path / "a")
    other = adapter_draft(seed=2).write(tmp_path / "b")
    manifest = content(path) if is_hashed else inspect(path)
    status = (path / WEIGHTS).stat()
    assert is_accepted(manifest)
    keep_times(other / WEIGHTS, status)
    os.rename(other / WEIGHTS, path / WEIGHTS)
    assert (path / WEIGHTS).stat().st_mtime_ns == status.st_mtime_ns
    assert (path / WEIGHTS).stat().st_size == status.st_size
    assert not is_accepted(manifest)


@pytest.mark.parametrize("is_hashed", [False, True])
def test_a_file_that_is_written_over_is_another(adapter_draft, tmp_path, is_hashed):
    path = adapter_draft().write(tmp_path / "a")
    manifest = content(path) if is_hashed else inspect(path)
    status = (path / WEIGHTS).stat()
    with (path / WEIGHTS).open("r+b") as stream:
        stream.seek(-4, os.SEEK_END)
        stream.write(b"\0\0\0\0")
    keep_times(path / WEIGHTS, status)
    assert (path / WEIGHTS).stat().st_ino == status.st_ino
    assert not is_accepted(manifest)


def test_a_copy_of_the_callers_own_is_not_read_again(adapter_draft, tmp_path, monkeypatch):
    """Another copy is, and so is one of another file."""
    path, other = adapter_draft(seed=1).write(tmp_path / "a"), adapter_draft(seed=2).write(tmp_path / "b")
    manifest, copy = content(path), tmp_path / "copy"
    shutil.copytree(path, copy)
    read = list[int]()

    def counted(self, target, offset):
        read.append(len(target))
        return read_into(self, target, offset)

    read_into = TensorFile.read_into
    monkeypatch.setattr(TensorFile, "read_into", counted)
    assert moved(manifest, copy, manifest.identity).path == copy
    few = sum(read)
    assert moved(manifest, copy).path == copy
    assert few < 0.2 * (sum(read) - few)
    with pytest.raises(AdapterFormatError, match="changed on disk"):
        moved(manifest, other, content(other).identity)
    (copy / WEIGHTS).write_bytes((copy / WEIGHTS).read_bytes()[:-4])
    with pytest.raises(AdapterFormatError):
        moved(manifest, copy, manifest.identity)


def test_a_new_mode_or_a_copy_is_told_from_a_change_by_the_hash(adapter_draft, tmp_path):
    path = adapter_draft().write(tmp_path / "a")
    known, unknown = content(path), inspect(path)
    os.chmod(path / WEIGHTS, 0o600)
    os.link(path / WEIGHTS, tmp_path / "link")
    assert is_accepted(known)
    assert not is_accepted(unknown), "without a hash it can't be told from a change"
    shutil.copy(path / WEIGHTS, tmp_path / "copy")
    os.rename(tmp_path / "copy", path / WEIGHTS)
    assert is_accepted(known)


def test_the_hash_is_of_what_is_computed(adapter_draft, tmp_path):
    it = adapter_draft(seed=3)
    first = content(it.write(tmp_path / "a")).content_hash
    assert len(first) == 64
    it.config |= {"lora_dropout": 0.5, "base_model_name_or_path": "org/base"}
    again = it.write(tmp_path / "elsewhere")
    tensors = load_file(again / WEIGHTS)
    save_file(dict(reversed(tensors.items())), again / WEIGHTS, {"format": "pt"})
    assert content(again).content_hash == first
    others = set()
    for number, (fields, change) in enumerate(
        [
            ({"lora_alpha": 9}, None),
            ({"use_rslora": True}, None),
            ({"alpha_pattern": {"q_proj": 1}}, None),
            ({}, lambda t: t.bfloat16()),
            ({}, lambda t: t + 1),
        ]
    ):
        one = adapter_draft(seed=3, **fields)
        if change:
            one.tensors = {name: change(tensor) for name, tensor in one.tensors.items()}
        others.add(content(one.write(tmp_path / str(number))).content_hash)
    assert len(others | {first}) == 6


def test_the_hash_is_the_same_where_a_model_has_its_modules_in_another_order(adapter_draft, tmp_path):
    """Layers whose parts are parallel have their feed-forward part before attention's output."""
    attention = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, rope=None)
    parallel = DecoderLayer(attention, GatedSpec(FFN), Norms.PARALLEL)
    table = Projections((composed(parallel, NormSpec(1e-6), HIDDEN).projections,) * LAYERS)
    assert [table.id(name) for name in ("down_proj", "o_proj")] == [5, 6]
    for name, fields in {"plain": {}, "dora": {"use_dora": True}}.items():
        it = adapter_draft(**fields)
        for layer, (module, (_, outputs)) in product(range(LAYERS), DIMS.items() if fields else ()):
            it.tensors[tensor_name(layer, module, "magnitude_vector")[: -len(".weight")]] = torch.randn(outputs)
        path = it.write(tmp_path / name)
        found = with_content(inspect_adapter(path, ModulePaths(table)))
        assert len(found.vectors) == len(DIMS) * LAYERS * len(fields)
        assert found.content_hash == content(path).content_hash


def fill(draft, side, value):
    for name, tensor in draft.tensors.items():
        if f"lora_{side}" in name:
            tensor.fill_(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [0.0, -0.0])
@pytest.mark.parametrize("side", "AB")
def test_an_adapter_that_changes_nothing_is_told(adapter_draft, tmp_path, dtype, value, side):
    it = adapter_draft(dtype=dtype)
    assert content(it.write(tmp_path / "a")).no_effect is False
    fill(it, side, value)
    assert content(it.write(tmp_path / "b")).no_effect is True
    next(tensor for name, tensor in it.tensors.items() if f"lora_{side}" in name).view(-1)[-1] = 1e-4
    assert content(it.write(tmp_path / "c")).no_effect is False
    assert content(adapter_draft(dtype=dtype, lora_alpha=0).write(tmp_path / "d")).no_effect is True


def test_a_file_that_changes_while_it_is_hashed(adapter_draft, tmp_path, monkeypatch):
    path = adapter_draft().write(tmp_path / "a")
    manifest = inspect(path)
    read_into = TensorFile.read_into

    def read_and_touch(self, target, offset):
        read_into(self, target, offset)
        os.utime(path / WEIGHTS)

    monkeypatch.setattr(TensorFile, "read_into", read_and_touch)
    with pytest.raises(AdapterFormatError, match="changed on disk"):
        with_content(manifest)
