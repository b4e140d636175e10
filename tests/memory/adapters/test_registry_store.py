"""The registry's file."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from random import Random

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
    (path.parent / "link").symlink_to(path)
    with pytest.raises(RegistryError, match="held by another registry"):
        RegistryStore(path.parent / "link")


def test_others_read_a_file_that_is_held(opened, path, tmp_path):
    """A backup while a server runs: a copy with all entries; and a reader keeps no change away."""
    store = opened()
    store.put(ALICE)
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT name FROM adapters").fetchall() == [("alice",)]
        store.put(ALICE._replace(name="bob"))
        reader.execute("COMMIT")
        with closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
            reader.backup(copy)
    copied = RegistryStore(tmp_path / "copy.db")
    assert (copied.identity, copied.entries()) == (store.identity, store.entries()) and len(copied.entries()) == 2
    copied.close()
    store.close()
    RegistryStore(path).close()


def test_a_file_that_is_refused_is_not_held(opened, path):
    path.write_bytes(b"not a database at all, but long enough to look at" * 100)
    with pytest.raises(RegistryError, match="can't be used"):
        RegistryStore(path)
    path.unlink()
    assert opened().is_new


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
    with pytest.raises(RegistryError, match=rf"{path} has schema 7, written by a newer Chorus; this one reads up to 4"):
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


@pytest.fixture
def written(path):
    """The bytes of a closed file with entries of every kind, and what it says."""
    store = RegistryStore(path)
    for number in range(12):
        name = f"adapter-{number}"
        store.put(ALICE._replace(name=name, path=f"/adapters/{name}", pinned=number % 2 == 0, paused=number % 3 == 0))
    store.put(ALICE._replace(name="adapter-1", version="step-7", content_hash="c" * 64))
    store.put(ALICE._replace(name="adapter-2@5", version="5"))
    store.remove("adapter-3")
    said = store.identity, store.generation, sorted(store.entries())
    store.close()
    left = {each.name for each in path.parent.iterdir()}
    assert left == {path.name, f"{path.name}.lock"}, "nothing is left in SQLite's log"
    return path.read_bytes(), said


def test_a_damaged_file_is_served_right_or_refused(path, written):
    """Bytes changed, runs of bytes lost, and a file cut off: no traceback, and no entry that differs unseen."""
    good, said = written
    random = Random(4)
    outcomes = Counter()
    for _ in range(400):
        bad = bytearray(good)
        kind = random.choice(("flip", "flip", "run", "cut"))
        at = random.randrange(len(bad))
        if kind == "flip":
            bad[at] ^= 1 << random.randrange(8)
        elif kind == "run":
            size = random.randrange(1, 200)
            bad[at : at + size] = random.randbytes(min(size, len(bad) - at))
        else:
            del bad[at:]
        for left in path.parent.iterdir():
            left.unlink()
        path.write_bytes(bad)
        try:
            store = RegistryStore(path)
        except RegistryError as error:
            assert str(path) in str(error)
            outcomes["refused"] += 1
            continue
        found = store.identity, store.generation, sorted(store.entries())
        is_new = store.is_new and not store.entries()  # cut to nothing, it is an empty file
        store.close()
        assert found == said or (is_new and not any(bad)), (kind, at)
        outcomes["served"] += 1
    assert outcomes["refused"] > 100 and outcomes["served"] > 20


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE adapters SET paused = 1 - paused WHERE name = 'adapter-4'",
        "UPDATE adapters SET pinned = 1 - pinned WHERE name = 'adapter-4'",
        "UPDATE adapters SET version = 'step-9' WHERE name = 'adapter-1'",
        "UPDATE adapters SET generation = generation + 1 WHERE name = 'adapter-4'",
        "UPDATE adapters SET paused = 7 WHERE name = 'adapter-4'",
        "UPDATE adapters SET name = '../up' WHERE name = 'adapter-4'",
        "DELETE FROM adapters WHERE name = 'adapter-4'",
        "UPDATE registry SET generation = 3",
        "UPDATE registry SET identity = ''",
        "UPDATE registry SET digest = ''",
        "DELETE FROM registry",
        "INSERT INTO registry SELECT * FROM registry",
    ],
)
def test_an_entry_that_nobody_wrote_is_refused(path, written, change):
    with sqlite3.connect(path) as db:
        db.execute(change)
    db.close()
    with pytest.raises(RegistryError, match=rf"{path} is damaged: .*; restore it from a backup, or remove it"):
        RegistryStore(path)


def test_changes_that_are_undone_keep_the_digest_right(opened):
    store = opened()
    store.put(ALICE)
    done = store.change(
        [("alice", None), ("bob", ALICE._replace(name="bob")), ("bob", ALICE._replace(name="bob", rank=4))]
    )
    store.change(done.before, retires=False)
    entries = store.entries()
    store.close()
    again = opened()
    assert again.entries() == entries and [one.name for one in entries] == ["alice"]


def test_a_file_without_a_digest_gets_one(opened, path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(registry_store, "MIGRATIONS", registry_store.MIGRATIONS[:3])
        with sqlite3.connect(path) as db:
            for number in range(3):
                for statement in registry_store.MIGRATIONS[number].split(";"):
                    db.execute(statement)
            db.execute("INSERT INTO registry VALUES (?, 1)", ("d" * 32,))
            row = (*ALICE[:3], 1, *ALICE[4:6], 0, "", 0)
            db.execute("INSERT INTO adapters VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            db.execute(f"PRAGMA application_id = {registry_store.APPLICATION_ID}")
            db.execute("PRAGMA user_version = 3")
        db.close()
    for _ in range(2):
        store = opened()
        assert store.entries() == [ALICE._replace(generation=1)]
        store.close()
