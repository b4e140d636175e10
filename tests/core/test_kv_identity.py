"""The identity of a server's KV: the same for the same checkpoint, settings and pages, and for nothing else."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from chorus.core import kv_identity
from chorus.core.config import EngineConfig
from chorus.core.kv_identity import identity_of
from chorus.memory.disk.remembered import RememberedHashes
from chorus.memory.pages.layout import PageLayout
from chorus.memory.pages.states import StateShape


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def seal(data):
    return hashlib.sha256(b"key" + data).digest()


def layout(**changes):
    state = StateShape(2, conv_elems=4, num_heads=2, head_elems=8)
    return PageLayout(
        **{"num_layers": 2, "kv_heads": 2, "head_dim": 8, "block_tokens": 16, "itemsize": 4, "state": state} | changes
    )


def identity(model, remembered=None, pages=None, device="CpuExecutor", **settings):
    path = model.parent / "remembered" if remembered is None else Path(remembered)
    hashes = RememberedHashes(path, seal)
    return identity_of(EngineConfig(model=model, **settings), pages or layout(), device, hashes)


def test_it_is_the_same_at_every_start(model):
    first = identity(model)
    (model.parent / "remembered").unlink()
    assert identity(model) == first
    assert "object at" not in str(first), "an address is another at every start"


def test_a_version_that_reads_the_same_files_otherwise_finds_no_kv_of_the_one_before(tmp_path, monkeypatch):
    """Its ropes may be right where the former ones were wrong."""
    from transformers import LlamaConfig

    path = tmp_path / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 160}
    LlamaConfig(num_hidden_layers=2, architectures=["LlamaForCausalLM"], **sizes).save_pretrained(path)
    first = identity(path)
    assert identity(path) == first
    read = kv_identity.read_model_config

    def read_otherwise(*where):
        model = read(*where)
        rope = replace(model.layers[0].mixer.rope, theta=700.0)
        first, *others = model.layers
        return replace(model, layers=(replace(first, mixer=replace(first.mixer, rope=rope)), *others))

    monkeypatch.setattr(kv_identity, "read_model_config", read_otherwise)
    assert identity(path) != first


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "int8"},
        {"tensor_parallel_size": 2},
        {"share_prefix_cache": True},
        {"pages": layout(block_tokens=32)},
        {"pages": layout(float8_kv=True)},
        {"pages": layout(windows=(None, 16))},
        {"device": "CudaExecutor"},
    ],
)
def test_another_setting_is_another_identity(model, change):
    assert identity(model, **change) != identity(model)


def test_other_weights_are_another_identity_though_they_are_as_many_bytes(model):
    first = identity(model)
    before = (model / "model.safetensors").stat()
    (model / "model.safetensors").write_bytes(b"wEights")
    os.utime(model / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert identity(model) != first, "the change time tells"


def test_the_hash_is_remembered_and_no_other_file_is_believed(model, monkeypatch):
    first, remembered = identity(model), model.parent / "remembered"
    monkeypatch.setattr(hashlib, "sha256", lambda *data: pytest.fail("hashed again") if not data else _sha(*data))
    assert identity(model) == first
    monkeypatch.undo()
    remembered.write_text(remembered.read_text().replace(first["weights"], "0" * 64))
    assert identity(model) == first
    remembered.write_text("[]")
    assert identity(model) == first


_sha = hashlib.sha256


def test_a_cpu_s_isa_level_counts(model, monkeypatch):
    first = identity(model)
    monkeypatch.setattr("chorus.core.kv_identity.level", lambda: "another")
    assert identity(model) != first
