"""Adapters that came as bytes: a directory is whole or not there, and goes once nothing uses it."""

import pytest

from chorus.memory.files.uploads.content_store import ContentStore, StoreFull, TooLarge


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


def test_a_file_is_copied_after_what_was_written_and_counts_as_if_it_were(store, tmp_path):
    (tmp_path / "given").write_bytes(bytes(range(80)))
    weights = "adapter_model.safetensors"
    with (tmp_path / "given").open("rb", buffering=0) as given, store.draft(known_later=[weights]) as draft:
        draft.write("adapter_config.json", b"{}")
        draft.write(weights, b"head")
        draft.copy(weights, given, 10, 30)
        draft.copy(weights, given, 40, 40)
        draft.write(weights, b"tail")
        assert (draft.directory() / weights).read_bytes() == b"head" + bytes(range(10, 80)) + b"tail"
        assert draft.num_bytes == 2 + 78
        with pytest.raises(TooLarge):
            draft.copy(weights, given, 0, 30)
        with pytest.raises(OSError, match="ends after 80 bytes"):
            draft.copy(weights, given, 75, 10)
        with pytest.raises(ValueError, match="hashed as it is written"):
            draft.copy("adapter_config.json", given, 0, 1)
    with store.draft(known_later=[weights]) as draft, pytest.raises(ValueError, match="closed"):
        draft.copy(weights, given, 0, 1)
    assert list(store.root.iterdir()) == []


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
