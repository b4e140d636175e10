"""A load reads the weights once, and hashes them once, as they are read: of a directory, and of an upload."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from chorus import LLM
from chorus.memory.files import identity
from chorus.memory.files.config import CONFIG_FILE
from chorus.memory.files.form import WEIGHTS_FILE
from chorus.memory.files.uploads import content_store
from chorus.perf.bench.models.random_model import RandomModel, adapters, checkpoint
from chorus.perf.bench.models.sizes import SIZES, TINY

pytestmark = [pytest.mark.native, pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]

RANK = 512
SLACK = 1.1
"""Other reads of the process, and what else is hashed, over the weights' bytes."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, and an adapter with some megabytes."""
    work = tmp_path_factory.mktemp("made")
    model = RandomModel(SIZES[TINY].geometry, (RANK,))
    (adapter,) = adapters(model, work).values()
    return checkpoint(model, work), adapter


@pytest.fixture(scope="module")
def llm(made, tmp_path_factory):
    uploads = tmp_path_factory.mktemp("uploads")
    with LLM(made[0], memory_bytes="64MiB", max_adapter_bytes="64MiB", adapter_uploads=uploads, threads=1) as llm:
        yield llm, uploads


@pytest.fixture
def hashed(monkeypatch):
    """Bytes that were hashed, by the module that did."""
    counts = dict.fromkeys((content_store, identity), 0)

    def counting(module):
        class Counted:
            def __init__(self, data=b""):
                self._digest = hashlib.sha256(data)

            def update(self, data):
                counts[module] += len(data)
                self._digest.update(data)

            def hexdigest(self):
                return self._digest.hexdigest()

        class Hashlib:
            sha256 = Counted

        return Hashlib

    for module in counts:
        monkeypatch.setattr(module, "hashlib", counting(module))
    return counts


def bytes_read() -> int:
    """Bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text().partition("rchar: ")[2].split()[0])


def files_of(adapter):
    return (adapter / CONFIG_FILE).read_bytes(), (adapter / WEIGHTS_FILE).read_bytes()


def test_a_directory_is_read_and_hashed_once(llm, made, hashed):
    size = (made[1] / WEIGHTS_FILE).stat().st_size
    before = bytes_read()
    llm[0].load_adapter("a", made[1])
    assert size <= bytes_read() - before < SLACK * size
    assert size / SLACK < sum(hashed.values()) < SLACK * size


def test_an_upload_is_read_and_hashed_once(llm, made, hashed):
    config, weights = files_of(made[1])
    before = bytes_read()
    llm[0].load_adapter("b", config=config, weights=weights)
    assert len(weights) <= bytes_read() - before < SLACK * len(weights)
    assert len(weights) / SLACK < sum(hashed.values()) < SLACK * len(weights)


def test_the_hash_on_the_way_is_the_hash_of_the_files(llm, made):
    """By torch's reads of a directory, and by those of the load."""
    it, _ = llm
    it.load_adapter("c", made[1])
    loaded = it._worker.adapters.state("c").result().manifest  # noqa: SLF001
    plain = it._worker._engine.adapters.inspect(made[1])  # noqa: SLF001
    assert identity.with_content(plain).content_hash == loaded.content_hash is not None


def test_equal_uploads_have_one_directory_and_others_their_own(llm, made):
    it, uploads = llm
    config, weights = files_of(made[1])
    for name, more in (("one", b""), ("two", b""), ("three", b" ")):
        it.load_adapter(name, config=config + more, weights=weights)
    paths = [it._worker.adapters.state(name).result().manifest.path for name in ("one", "two", "three")]  # noqa: SLF001
    assert paths[0] == paths[1] != paths[2]
    assert all(path.parent == uploads and (path / WEIGHTS_FILE).read_bytes() == weights for path in paths)
    assert not list(uploads.glob(".draft-*"))


def test_a_damaged_directory_of_the_same_content_is_not_taken(llm, made):
    """It would be served after the host copy was dropped."""
    it, _ = llm
    config, weights = files_of(made[1])
    it.load_adapter("first", config=config + b"\n", weights=weights)
    path = it._worker.adapters.state("first").result().manifest.path / WEIGHTS_FILE  # noqa: SLF001
    with path.open("r+b") as file:
        file.seek(-8, 2)
        file.write(b"\1\2\3\4")
    with pytest.raises(ValueError, match="changed on disk"):
        it.load_adapter("second", config=config + b"\n", weights=weights)
