"""The registry's file."""

from __future__ import annotations

import sqlite3

import pytest

from chorus.memory.adapters import registry_store
from chorus.memory.adapters.registry_store import Entry, RegistryError, RegistryFull, RegistryStore, check_entry

HASH = "a" * 64
ALICE = Entry("alice", HASH, "/adapters/alice", 0, 8, 1 << 20, False)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "registry.db"


@pytest.fixture
def opened(path):
    stores = []

    def make():
        stores.append(RegistryStore(path))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def test_generations_only_grow(opened):
    store = opened()
    assert store.put(ALICE).generation == 1
    assert store.put(ALICE._replace(name="bob", pinned=True)).generation == 2
    assert store.put(ALICE._replace(content_hash="b" * 64)).generation == 3
    assert store.remove("alice") == 4
    identity, entries = store.identity, store.entries()
    assert [entry.name for entry in entries] == ["bob"]
    store.close()
    again = opened()
    assert (again.identity, again.generation, again.entries()) == (identity, 4, entries)
    assert again.put(ALICE).generation == 5, "a name that comes back is newer than it ever was"
    with pytest.raises(FileExistsError):
        again.put(ALICE, replace=False)
    with pytest.raises(KeyError):
        again.remove("nobody")
    assert again.generation == 5


def test_it_is_bounded(opened, monkeypatch):
    monkeypatch.setattr(registry_store, "MAX_ADAPTERS", 1)
    store = opened()
    store.put(ALICE)
    store.put(ALICE)
    with pytest.raises(RegistryFull, match="remove some"):
        store.put(ALICE._replace(name="bob"))


def test_a_file_is_held_by_one_registry(opened, path):
    opened()
    with pytest.raises(RegistryError, match=rf"{path} is held by another registry"):
        RegistryStore(path)


def test_an_older_schema_is_migrated(opened, path, monkeypatch):
    store = opened()
    store.put(ALICE)
    store.close()
    further = "ALTER TABLE registry ADD COLUMN note TEXT NOT NULL DEFAULT 'none'"
    monkeypatch.setattr(registry_store, "MIGRATIONS", (*registry_store.MIGRATIONS, further))
    store = opened()
    assert store.get("alice") == ALICE._replace(generation=1) and store.generation == 1
    store.close()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT note FROM registry").fetchone() == ("none",)
        assert db.execute("PRAGMA user_version").fetchone() == (len(registry_store.MIGRATIONS),)


def test_a_migration_that_fails_leaves_the_file_as_it_was(opened, path, monkeypatch):
    store = opened()
    store.put(ALICE)
    store.close()
    with monkeypatch.context() as patch:
        broken = "CREATE TABLE more (id INTEGER); ALTER TABLE nowhere ADD COLUMN note TEXT"
        patch.setattr(registry_store, "MIGRATIONS", (*registry_store.MIGRATIONS, broken))
        with pytest.raises(RegistryError, match="nowhere"):
            RegistryStore(path)
    assert opened().get("alice") is not None


def test_a_newer_schema_is_refused_by_name(opened, path):
    opened().close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(RegistryError, match=rf"{path} has schema 7, written by a newer Chorus; this one reads up to 3"):
        RegistryStore(path)


def test_another_program_s_file_is_refused_and_left_alone(path):
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE theirs (id INTEGER)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(RegistryError, match="another program's database"):
        RegistryStore(path)
    assert path.read_bytes() == before
    path.write_bytes(b"not a database at all, but long enough to look at" * 100)
    with pytest.raises(RegistryError, match=rf"{path} can't be used"):
        RegistryStore(path)
    with pytest.raises(RegistryError, match="can't be opened"):
        RegistryStore(path.parent / "nowhere" / "registry.db")


WRONG = {
    "name": ["", "../up", 7, "x" * 300, "two\nlines"],
    "content_hash": ["A" * 64, HASH[:-1], None],
    "path": ["relative/path", "/with\0zero", "/" + "x" * 5000, b"/bytes"],
    "generation": [-1, 1 << 63],
    "rank": [True, 1 << 20],
    "bytes": [1.5, -1],
    "pinned": [1, None],
    "version": ["a@b", 7],
    "paused": [None],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in WRONG for value in WRONG[field]])
def test_what_no_entry_has(field, value):
    assert check_entry(list(ALICE)) == ALICE
    with pytest.raises(ValueError, match=field if field != "name" else "name"):
        check_entry(list(ALICE._replace(**{field: value})))
    with pytest.raises(ValueError, match="9 fields, not 8"):
        check_entry(list(ALICE)[:-1])
