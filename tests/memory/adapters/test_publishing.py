"""Changes to a registry's names by a load or a removal."""

import sqlite3

import pytest

from chorus.memory.adapters import registry_store
from chorus.memory.adapters.publishing import LabelTaken, plan_load, plan_removal
from chorus.memory.adapters.registry_store import Entry, RegistryStore


@pytest.fixture
def store(tmp_path):
    store = RegistryStore(tmp_path / "names.sqlite")
    yield store
    store.close()


def entry(name="a", content="1", label=""):
    return Entry(name, content * 64, f"/adapters/{content}", 0, 8, 1 << 20, False, label)


def load(store, one, **about):
    plan = plan_load(store, one, **about)
    store.change(plan.changes)
    return plan.entry.label


def remove(store, name):
    store.change(plan_removal(store, name))


def labels(store):
    return {one.name: one.label for one in store.entries()}


def test_numbers_count_per_name_and_never_come_again(store, tmp_path):
    assert [load(store, entry(content=one)) for one in "123"] == ["1", "2", "3"]
    assert load(store, entry("b")) == "1"
    assert load(store, entry(content="4", label="10")) == "10" and load(store, entry(content="5")) == "11"
    with pytest.raises(LabelTaken, match="versions of 'a' up to 11 were already given"):
        load(store, entry(content="6", label="7"))
    remove(store, "a")
    store.close()
    store.__init__(tmp_path / "names.sqlite")
    assert load(store, entry(content="6")) == "12"
    assert load(store, entry("c"), last_number=4) == "5", "versions of the start have numbers, too"
    with pytest.raises(LabelTaken, match="at most"):
        load(store, entry("d", label="9" * 20))


def test_the_newest_versions_are_kept(store):
    for content in "123":
        load(store, entry(content=content), keep=2)
    assert labels(store) == {"a": "3", "a@2": "2"}
    remove(store, "a@3")
    assert labels(store) == {"a": "2"}, "the one before is the newest again"
    load(store, entry(content="4"), keep=3)
    remove(store, "a@2")
    assert labels(store) == {"a": "4"}
    remove(store, "a@4")
    assert labels(store) == {}
    for name in ("a", "a@4"):
        with pytest.raises(KeyError):
            remove(store, name)
    before = entry(content="9", label="0")
    load(store, entry(content="5"), keep=2, before=before)
    assert labels(store) == {"a": "5", "a@0": "0"}


def test_a_label_means_one_content(store, monkeypatch):
    load(store, entry(label="x"), keep=2)
    assert plan_load(store, entry(label="x"), replace=False).changes == (), "the same again"
    with pytest.raises(LabelTaken, match="version 'a@x' already exists with other content"):
        load(store, entry(content="2", label="x"))
    load(store, entry(content="2", label="y"))
    with pytest.raises(LabelTaken, match="version 'a@x' had other content and was retired"):
        load(store, entry(content="2", label="x"))
    assert load(store, entry(label="x")) == "x" and labels(store) == {"a": "x"}
    with pytest.raises(FileExistsError):
        load(store, entry(content="3", label="z"), replace=False)
    with pytest.raises(FileExistsError):
        load(store, entry(content="3"), replace=False)
    monkeypatch.setattr(registry_store, "MAX_RETIRED", 1)
    for label in "pqr":
        load(store, entry("b", content="1", label=label))
    assert load(store, entry("b", content="2", label="p")) == "p", "the last ones are remembered"


def test_what_is_taken_back_is_forgotten(store):
    load(store, entry(label="x"), keep=2)
    plan = plan_load(store, entry(content="2", label="y"), keep=2)
    done = store.change(plan.changes)
    assert [one.label for one in done.retired] == ["x"] and labels(store) == {"a": "y", "a@x": "x"}
    store.change(done.before, retires=False)
    assert labels(store) == {"a": "x"} and store.get("a").content_hash == "1" * 64
    assert load(store, entry(content="3", label="y")) == "y"


def test_a_name_of_its_own_with_a_mark_stays(store):
    store.put(entry("a@1", content="7", label="1000"))
    load(store, entry(), keep=2)
    assert labels(store) == {"a": "2", "a@1": "1000"}
    load(store, entry(content="2"), keep=2)
    assert labels(store) == {"a": "3", "a@1": "1000", "a@2": "2"}


def test_changes_are_made_together_or_not_at_all(store, monkeypatch):
    load(store, entry())
    generation = store.generation
    with pytest.raises(registry_store.RegistryError):
        store.change([("b", entry("b")), ("a", entry()._replace(rank=None))])
    assert labels(store) == {"a": "1"} and store.generation == generation


def test_names_of_an_older_file_go_on(tmp_path):
    path = tmp_path / "names.sqlite"
    with sqlite3.connect(path) as db:
        for statements in registry_store.MIGRATIONS[:2]:
            for statement in statements.split(";"):
                db.execute(statement)
        db.execute("INSERT INTO registry VALUES ('them', 9)")
        db.execute("INSERT INTO adapters VALUES ('a', ?, '/adapters/1', 9, 8, 100, 0, '', 0)", ("1" * 64,))
        db.execute(f"PRAGMA application_id = {registry_store.APPLICATION_ID}")
        db.execute("PRAGMA user_version = 2")
    db.close()
    store = RegistryStore(path)
    assert labels(store) == {"a": "9"} and not store.is_new
    assert load(store, entry(content="2"), keep=2) == "10" and labels(store) == {"a": "10", "a@9": "9"}
    store.close()
