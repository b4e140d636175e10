"""Adapters that came as bytes: a directory is whole or not there, and goes once nothing uses it."""

from contextlib import suppress

import pytest

from chorus.memory.files.directory import AdapterDirectory
from chorus.memory.files.uploads import content_store
from chorus.memory.files.uploads.content_store import ContentStore, StoreFull, TooLarge

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def store(tmp_path):
    return ContentStore(tmp_path / "uploads", 100, 250)


def put(store, weights, config=b"{}"):
    with store.draft() as draft:
        draft.write("adapter_config.json", config)
        for byte in range(0, len(weights), 7):
            draft.write("adapter_model.safetensors", weights[byte : byte + 7])
        return draft.seal()


def test_equal_files_have_one_directory(store):
    first, second = put(store, b"a" * 50), put(store, b"a" * 50)
    assert first == second and (first / "adapter_model.safetensors").read_bytes() == b"a" * 50
    assert put(store, b"a" * 50, b"{ }") != first != put(store, b"b" * 50)
    assert len(store.directories()) == 3 == len(list(store.root.iterdir()))


def test_what_is_too_large_or_not_sealed_leaves_nothing(store):
    with pytest.raises(TooLarge), store.draft() as draft:
        draft.write("adapter_model.safetensors", b"a" * 101)
    with store.draft() as draft:
        draft.write("adapter_model.safetensors", b"a")
    assert list(store.root.iterdir()) == []
    for letter in (b"a", b"b"):
        put(store, letter * 98)
    with pytest.raises(StoreFull):
        put(store, b"c" * 98)
    assert len(list(store.root.iterdir())) == 2
    store.remove_unused(lambda _: ())
    assert put(store, b"c" * 98)


def test_a_file_is_copied_while_it_is_read_and_counts_as_if_it_were_there(store, tmp_path):
    (tmp_path / "given").write_bytes(bytes(range(80)))
    with (tmp_path / "given").open("rb", buffering=0) as given, store.draft(known_later=[WEIGHTS]) as draft:
        draft.write("adapter_config.json", b"{}")
        copy = draft.copy_beside(WEIGHTS, given)
        given.close()
        with AdapterDirectory(draft.directory()) as directory:
            assert directory.read(WEIGHTS, 100, "the weights") == bytes(range(80))
        assert draft.num_bytes == 82 and set(draft.names) == {"adapter_config.json", WEIGHTS}
        assert draft.copied(WEIGHTS) is None
        copy()
        path = draft.seal({WEIGHTS: "of the weights"})
        assert (path / WEIGHTS).read_bytes() == bytes(range(80))
        assert draft.copied(WEIGHTS).inode == (tmp_path / "given").stat().st_ino
    assert sorted(each.name for each in path.iterdir()) == ["adapter_config.json", WEIGHTS]
    with (tmp_path / "given").open("rb", buffering=0) as given, store.draft(known_later=[WEIGHTS]) as draft:
        draft.write("adapter_config.json", b"{}")
        draft.copy_beside(WEIGHTS, given)()
        assert draft.seal({WEIGHTS: "of the weights"}) == path
        assert draft.copied(WEIGHTS) is None, "another one lay there"
    assert list(store.root.iterdir()) == [path]


def test_a_copy_that_is_too_large_or_not_sealed_leaves_nothing(store, tmp_path):
    for size in (101, 90):
        (tmp_path / "given").write_bytes(bytes(size))
        with (
            (tmp_path / "given").open("rb", buffering=0) as given,
            suppress(TooLarge),
            store.draft(known_later=[WEIGHTS]) as draft,
        ):
            draft.copy_beside(WEIGHTS, given)
            assert size == 90
    assert list(store.root.iterdir()) == [] and store.num_bytes == 0
    with store.draft(known_later=[WEIGHTS]) as draft, pytest.raises(ValueError, match="closed"):
        draft.copy_beside(WEIGHTS, given)
    with store.draft(known_later=[WEIGHTS]) as draft:
        draft.write(WEIGHTS, b"a")
        for name in (WEIGHTS, "adapter_config.json"):
            with pytest.raises(ValueError, match=f"{name} is written already, or hashed"):
                draft.copy_beside(name, given)
    assert list(store.root.iterdir()) == []


def test_a_copy_counts_before_its_bytes_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(content_store, "ROOM_STEP", 10)
    store = ContentStore(tmp_path / "uploads", 100, 250)
    (tmp_path / "given").write_bytes(bytes(80))
    with (tmp_path / "given").open("rb", buffering=0) as given, store.draft(known_later=[WEIGHTS]) as draft:
        draft.copy_beside(WEIGHTS, given)
        store.recount()
        assert store.num_bytes == 80
    assert store.num_bytes == 0


def test_only_what_nothing_uses_is_removed(store):
    one, two, three = (put(store, letter) for letter in (b"1", b"2", b"3"))
    with store.draft() as draft:
        draft.write("adapter_config.json", b"{}")
        draft.write("adapter_model.safetensors", b"2")
        assert draft.seal() == two
        store.remove_unused(lambda found: [one] if sorted(found) == sorted([one, three]) else found)
        assert sorted(store.directories()) == sorted([one, two])
    store.remove_unused(lambda _: [one])
    assert list(store.root.iterdir()) == [one]


def test_drafts_of_a_process_that_ended_are_removed_and_others_are_not(store, tmp_path):
    left = store.root / ".draft-left"
    left.mkdir()
    (left / "adapter_model.safetensors").write_bytes(b"half")
    with store.draft() as draft:
        draft.write("adapter_model.safetensors", b"a")
        again = ContentStore(tmp_path / "uploads", 100, 250)
        assert not left.exists()
        draft.write("adapter_model.safetensors", b"b")
        assert draft.seal() in again.directories()
