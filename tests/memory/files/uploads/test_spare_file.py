"""The room of a removed adapter's weights: the next upload's copy is written over it."""

import os

import pytest

from chorus.memory.files.uploads import spare_file
from chorus.memory.files.uploads.content_store import StoreFull
from chorus.memory.files.uploads.owned_store import OwnedStore, Owner
from chorus.memory.files.uploads.spare_file import SPARE_SECONDS, SpareFile

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def opened(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(spare_file, "LEAST_BYTES", 50)
    stores = []

    def opened(**about):
        stores.append(OwnedStore(tmp_path / "uploads", 100, 250, Owner("a", **about), clock=clock))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


@pytest.fixture
def put(tmp_path):
    def put(store, weights):
        (tmp_path / "given").write_bytes(weights)
        with (tmp_path / "given").open("rb", buffering=0) as given, store.draft(known_later=[WEIGHTS]) as draft:
            draft.write("adapter_config.json", b"{}")
            draft.copy_beside(WEIGHTS, given)()
            return draft.seal({WEIGHTS: weights.hex()})

    return put


def retire(store, path):
    store.retire([path])
    store.sweep(set, set)
    assert not path.exists()


def folders(store):
    return [path for path in store.root.iterdir() if path.name.startswith(".gone-")]


@pytest.mark.parametrize("size", [40, 80, 90])
def test_a_version_is_written_over_the_one_that_was_removed(opened, put, size):
    """The file is the same one, and holds the new version alone, whether that is shorter or longer."""
    store = opened()
    path = put(store, b"1" * 80)
    inode = (path / WEIGHTS).stat().st_ino
    retire(store, path)
    assert store.spare.num_bytes == 80 and store.num_bytes == 0
    path = put(store, b"2" * size)
    assert (path / WEIGHTS).read_bytes() == b"2" * size and (path / WEIGHTS).stat().st_ino == inode
    assert store.spare.num_bytes == 0 and store.num_bytes == size + 2
    other = put(store, b"3" * 60)
    assert (other / WEIGHTS).stat().st_ino != inode and (path / WEIGHTS).read_bytes() == b"2" * size


def test_the_larger_one_is_kept_and_none_that_is_small(opened):
    """The uploads came over HTTP, and take no spare file."""
    store = opened()
    for size, kept in [(40, 0), (60, 60), (50, 60), (80, 80)]:
        retire(store, written(store, size))
        assert store.spare.num_bytes == kept
    assert [os.listdir(folder) for folder in folders(store)] == [["spare"]]


def written(store, size):
    with store.draft() as draft:
        draft.write(WEIGHTS, b"w" * size)
        return draft.seal()


def test_it_goes_after_a_while_or_when_its_room_is_needed(opened, put, clock):
    store = opened()
    retire(store, put(store, b"1" * 90))
    clock.now += SPARE_SECONDS
    store.sweep(set, set)
    assert store.spare.num_bytes == 90
    clock.now += 1
    store.sweep(set, set)
    assert store.spare.num_bytes == 0 and os.listdir(folders(store)[0]) == []
    retire(store, put(store, b"1" * 90))
    written(store, 80)
    store.reserve(70)
    assert store.spare.num_bytes == 90
    store.reserve(20)
    assert store.spare.num_bytes == 0
    with pytest.raises(StoreFull):
        store.reserve(90)


def test_it_ends_with_its_store_or_at_the_next_start(opened, put, tmp_path, clock):
    store = opened()
    retire(store, put(store, b"1" * 90))
    left = tmp_path / "uploads" / ".gone-left"
    left.mkdir()
    other = SpareFile(tmp_path / "uploads", ".gone-", clock)
    (tmp_path / "removed").mkdir()
    (tmp_path / "removed" / "weights").write_bytes(bytes(70))
    other.keep(tmp_path / "removed")
    assert other.num_bytes == 70 and len(folders(store)) == 3
    store.close()
    store = opened()
    assert [os.listdir(folder) for folder in folders(store)] == [["spare"]], "another process holds it"
    other.close()
    assert folders(store) == []


def test_it_is_not_kept_where_several_processes_count_bytes(opened, put):
    store = opened(is_shared=True)
    retire(store, put(store, b"1" * 90))
    assert store.spare is None and folders(store) == []


def test_nothing_is_lost_when_it_cannot_be_moved(opened, put, monkeypatch):
    store = opened()
    retire(store, put(store, b"1" * 90))

    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(spare_file.Path, "rename", refused)
        spare = store.spare
        spare.take(store.root / "anywhere")
        assert spare.num_bytes == 90
        patch.setattr(spare_file.os, "replace", refused)
        spare.keep(folders(store)[0])
    assert store.spare.num_bytes == 90
    spare.keep(store.root / "not there")
    assert store.spare.num_bytes == 90


def test_a_file_with_another_name_is_not_written_over(opened, put, tmp_path):
    store = opened()
    path = put(store, b"1" * 90)
    os.link(path / WEIGHTS, tmp_path / "backup")
    retire(store, path)
    assert store.spare.num_bytes == 0
    put(store, b"2" * 90)
    assert (tmp_path / "backup").read_bytes() == b"1" * 90


def test_a_disk_that_has_no_room_for_both_holds_what_is_sent(opened, put):
    """An upload whose bytes come in the request is written to a new file."""
    store = opened()
    retire(store, put(store, b"1" * 90))
    with store.draft(known_later=[WEIGHTS]) as draft:
        draft.write("adapter_config.json", b"{}")
        assert store.spare.num_bytes == 90
        draft.write(WEIGHTS, b"2")
        assert store.spare.num_bytes == 0 and os.listdir(folders(store)[0]) == []


def test_nothing_is_kept_after_the_end(opened, put):
    store = opened()
    path, spare = put(store, b"1" * 90), store.spare
    store.close()
    spare.keep(path)
    assert spare.num_bytes == 0 and folders(store) == [] and (path / WEIGHTS).exists()
