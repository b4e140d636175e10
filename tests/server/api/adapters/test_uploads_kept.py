"""Uploaded adapters outlive a wrong start: with another model, a smaller arena, or lost names nothing is deleted."""

import logging
import time

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.memory.files.uploads import owned_store
from chorus.memory.files.uploads.owned_store import LOST, OtherOwner
from chorus.server.engine import adapter_health

from ....attacks.swaps import FILES, NAME
from ...conftest import live_server

pytestmark = pytest.mark.wide

CONTENTS = ("r64-qkv-up", "r8-attention")
TURN_SECONDS = 0.1


@pytest.fixture(scope="module")
def reference(subject):
    return subject("wide_heads")


@pytest.fixture
def uploads(tmp_path):
    return tmp_path / "uploads"


@pytest.fixture
def serve(tokenizer, reference, uploads, monkeypatch):
    """One start each, for a `with` block; the upload cleanup runs often, and orphans have no grace."""
    monkeypatch.setattr(adapter_health, "TURN_SECONDS", TURN_SECONDS)
    monkeypatch.setattr(owned_store, "ORPHAN_SECONDS", 0.0)
    monkeypatch.setattr(owned_store, "CLAIM_SECONDS", 0.2)

    def serve(model=reference.model, memory=8 << 20, **settings):
        config = EngineConfig(model=model, memory_bytes=memory, threads=1, cpu_kernels="torch")
        named = {"adapter_uploads": uploads, "keep_versions": 2, **settings}
        return live_server(Engine.from_config(config), tokenizer, settings=named)

    return serve


def push(live, path, name=NAME):
    files = {file: (file, (path / file).read_bytes()) for file in FILES}
    return live.client.post("/v1/load_lora_adapter", data={"lora_name": name}, files=files)


def push_all(live, reference):
    for content in CONTENTS:
        assert push(live, reference.adapters[content]).status_code == 200


def files(uploads):
    """The bytes of all weights below the directory."""
    return sorted(path.read_bytes() for path in uploads.rglob(FILES[1]))


def served(live):
    listed = live.client.get("/v1/adapters").json()["data"]
    return {one["name"]: one["content_hash"] for one in listed}


def wait_for_turns():
    time.sleep(20 * TURN_SECONDS)


@pytest.mark.parametrize("wrong", ["model", "arena"])
def test_a_wrong_start_deletes_nothing(serve, subject, reference, uploads, wrong, caplog):
    with serve() as live:
        push_all(live, reference)
        before, kept = served(live), files(uploads)
    start = {"model": subject("gqa").model} if wrong == "model" else {"memory": 1 << 16}
    with caplog.at_level(logging.WARNING), serve(**start) as live:
        assert f"{NAME}@1" not in served(live)
        wait_for_turns()
        assert f"adapter {NAME}@1 of an earlier run is not served; its files stay" in caplog.text
        assert len(kept) == 2 and files(uploads) == kept
    with serve() as live:
        assert served(live) == before


@pytest.mark.wide
def test_lost_names_are_told_and_their_files_are_kept(serve, reference, uploads, caplog):
    with serve() as live:
        push_all(live, reference)
        before, kept = served(live), files(uploads)
    names = {path.name: path.read_bytes() for path in uploads.glob("names.sqlite*")}
    for name in names:
        (uploads / name).unlink()
    with caplog.at_level(logging.WARNING), serve() as live:
        assert served(live) == {}
        assert "names.sqlite is new, but its directory holds 2 adapters" in caplog.text
        live.wait_until(lambda: len(list((uploads / LOST).glob("*"))) == 2, 60)
        live.wait_until(lambda: files(uploads) == kept, 60)
        assert "was not retired: it is kept in" in caplog.text
        assert push(live, reference.adapters[CONTENTS[0]], "again").status_code == 200
    for path in uploads.glob("names.sqlite*"):
        path.unlink()
    (uploads / "owner.json").unlink()
    for name, data in names.items():
        (uploads / name).write_bytes(data)
    with serve() as live:
        assert served(live) == before, "the file of names was restored"


@pytest.mark.wide
def test_names_of_another_server_are_refused(serve, reference, uploads, tmp_path):
    with serve() as live:
        push_all(live, reference)
        with pytest.raises(Exception, match=r"(held by another registry|in use by another)"), serve():
            pass
    other = tmp_path / "other"
    with serve(adapter_uploads=other) as live:
        push_all(live, reference)
    for path in [*uploads.glob("names.sqlite*")]:
        path.unlink()
    for path in other.glob("names.sqlite*"):
        (uploads / path.name).write_bytes(path.read_bytes())
    kept = files(uploads)
    with pytest.raises(OtherOwner, match="belongs to another server or cluster"), serve():
        pass
    assert files(uploads) == kept


def test_an_adapter_that_is_not_served_after_a_restart_can_be_removed(serve, subject, reference, uploads):
    with serve() as live:
        push_all(live, reference)
    with serve(model=subject("gqa").model) as live:
        assert live.client.delete(f"/v1/adapters/{NAME}@1").status_code == 200
        assert live.client.delete(f"/v1/adapters/{NAME}").status_code == 200
        assert live.client.delete(f"/v1/adapters/{NAME}").status_code == 404
        live.wait_until(lambda: files(uploads) == [], 60)
