"""Content hashes that requests need: found once for each version, from what is remembered or from the weights."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from chorus.memory.adapters.adapter import Adapter
from chorus.memory.disk import adapter_contents
from chorus.memory.disk.adapter_contents import AdapterContents
from chorus.memory.disk.remembered import RememberedHashes
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.manifest import AdapterManifest
from chorus.memory.files.tensor_file import FileIdentity
from chorus.memory.pages.adapter_layout import AdapterPart


class Pool:
    """Runs calls at once."""

    is_full = False

    def submit(self, function, /, *arguments):
        if self.is_full:
            raise RuntimeError("full")
        future = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self):
        self.is_full = True


class Store:
    def __init__(self):
        self.adapters = {}

    def find_version(self, version):
        return self.adapters.get(version)

    def note(self, adapter, manifest):
        adapter.manifest = manifest


def manifest(scale=1.0, inode=1, **fields):
    part = AdapterPart(8, scale, (0, 1), ("q_proj",))
    return AdapterManifest(Path("/adapters/a"), (part,), 10, 20, identity=FileIdentity(1, inode, 3), **fields)


def adapter(version, about, sources=()):
    found = Adapter(f"a{version}", version, about, layout=None)
    found.sources = tuple(sources)
    return found


@pytest.fixture
def read(monkeypatch):
    """The manifests whose weights were read."""
    found = []

    def with_content(about):
        found.append(about)
        if about.identity.inode == 13:
            raise AdapterFormatError("the files have changed since")
        return replace(about, content_hash=f"{about.identity.inode:064x}", no_effect=False)

    monkeypatch.setattr(adapter_contents, "with_content", with_content)
    return found


def open_contents(tmp_path, identity=b"identity"):
    def seal(data):
        return hashlib.sha256(data).digest()

    store = Store()
    contents = AdapterContents(store, RememberedHashes(tmp_path / "hashes", seal), identity, lambda: None)
    contents.pool = Pool()
    return contents, store.adapters


def learn(contents, version):
    assert contents.learn(version) is not None
    assert contents.is_busy
    contents.advance()
    assert not contents.is_busy


def test_a_hash_is_read_once_and_remembered_over_a_restart(tmp_path, read):
    for _ in range(2):
        contents, adapters = open_contents(tmp_path)
        adapters[1] = adapter(1, manifest(inode=7))
        learn(contents, 1)
        assert adapters[1].manifest.content_hash == f"{7:064x}"
        assert adapters[1].manifest.no_effect is None, "nobody has checked its weights"
        assert contents.learn(1) is None, "it is known"
    assert len(read) == 1


def test_a_hash_that_is_known_is_remembered(tmp_path, read):
    contents, adapters = open_contents(tmp_path)
    adapters[1] = adapter(1, manifest(content_hash="c" * 64))
    learn(contents, 1)
    contents, adapters = open_contents(tmp_path)
    adapters[1] = adapter(1, manifest())
    learn(contents, 1)
    assert adapters[1].manifest.content_hash == "c" * 64 and read == []


@pytest.mark.parametrize(
    "change", [{"inode": 2}, {"scale": 2.0}, {"invocation_tokens": (5,)}, {"stem": "other"}, {"file_size": 11}]
)
def test_what_has_changed_is_read_again(tmp_path, read, change):
    contents, adapters = open_contents(tmp_path)
    adapters[1] = adapter(1, manifest())
    learn(contents, 1)
    contents, adapters = open_contents(tmp_path)
    size = {name: change.pop(name) for name in list(change) if name == "file_size"}
    adapters[1] = adapter(1, replace(manifest(**change), **size))
    learn(contents, 1)
    assert len(read) == 2


def test_a_configuration_that_has_changed_is_read_again(tmp_path, read):
    """Of VB-LoRA, the number of vectors that are mixed is in no part of a manifest, and changes what it computes."""
    about = replace(manifest(), path=tmp_path)
    for topk in (2, 2, 3):
        config = f'{{"peft_type": "VBLORA", "topk": {topk}}}'
        if not (file := tmp_path / "adapter_config.json").exists() or file.read_text() != config:
            (new := tmp_path / "new").write_text(config)
            new.replace(file)
        contents, adapters = open_contents(tmp_path)
        adapters[1] = adapter(1, about)
        learn(contents, 1)
    assert len(read) == 2


def test_another_model_s_hash_is_another(tmp_path, read):
    for identity in (b"one", b"other"):
        contents, adapters = open_contents(tmp_path, identity)
        adapters[1] = adapter(1, manifest())
        learn(contents, 1)
    assert len(read) == 2


def test_a_composition_s_adapters_are_read(tmp_path, read):
    contents, adapters = open_contents(tmp_path)
    one, two = adapter(1, manifest(inode=1)), adapter(2, manifest(inode=2))
    adapters.update({1: one, 2: two, 3: adapter(3, manifest(), sources=(one, two))})
    learn(contents, 3)
    assert [each.manifest.content_hash for each in (one, two)] == [f"{1:064x}", f"{2:064x}"]


def test_what_can_t_be_read_stays_unknown_and_is_not_tried_again(tmp_path, read):
    contents, adapters = open_contents(tmp_path)
    adapters[1] = adapter(1, manifest(inode=13))
    learn(contents, 1)
    assert adapters[1].manifest.content_hash is None
    assert contents.learn(1) is None and len(read) == 1


def test_a_version_that_left_meanwhile_and_the_base_model_are_nothing(tmp_path, read):
    contents, adapters = open_contents(tmp_path)
    assert contents.learn(0) is None
    adapters[1] = gone = adapter(1, manifest())
    contents.learn(1)
    del adapters[1]
    contents.advance()
    assert gone.manifest.content_hash is None


def test_where_too_many_wait_the_next_request_asks_again(tmp_path, read):
    contents, adapters = open_contents(tmp_path)
    adapters[1] = adapter(1, manifest())
    contents.pool.is_full = True
    assert contents.learn(1) is None
    contents.pool.is_full = False
    learn(contents, 1)
