"""Uploads that their owner alone removes: tombstones, orphans, the lost folder, the owner's identity and lock."""

import errno
import logging
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from chorus.memory.files.uploads import owned_store
from chorus.memory.files.uploads.content_store import StoreFull
from chorus.memory.files.uploads.owned_store import LOST, LOST_SECONDS, ORPHAN_SECONDS, OtherOwner, OwnedStore, Owner


@pytest.fixture
def opened(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(owned_store, "CLAIM_SECONDS", 0.1)
    stores = []

    def opened(owner="a", *, total=1000, grace_seconds=0.0, **about):
        sizes = tmp_path / "uploads", 100, total
        stores.append(OwnedStore(*sizes, Owner(owner, **about), grace_seconds=grace_seconds, clock=clock))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


def put(store, weights):
    with store.draft() as draft:
        draft.write("adapter_config.json", b"{}")
        draft.write("adapter_model.safetensors", weights)
        return draft.seal()


def sweep(store, *named, used=()):
    store.sweep(lambda: {path.name for path in named}, lambda: {path.name for path in used})


def test_only_what_was_retired_is_removed(opened, clock):
    store = opened(grace_seconds=60)
    retired, named, held, orphan = (put(store, letter) for letter in (b"r", b"n", b"h", b"o"))
    store.retire([retired, named, held, store.root.parent / "an adapter that was not sent"])
    sweep(store, named, used=[held])
    assert retired.is_dir(), "another process may hold it"
    clock.now += 61
    sweep(store, named, used=[held])
    assert not retired.exists() and named.is_dir() and held.is_dir()
    sweep(store, named)
    clock.now += 61
    sweep(store, named)
    assert not held.exists()
    sweep(store)
    clock.now += 61
    sweep(store)
    assert not named.exists() and (store.root / LOST / named.name).is_dir(), "it was named again: its tombstone is gone"
    assert not orphan.exists() and (store.root / LOST / orphan.name).is_dir()


def test_what_is_retired_during_a_sweep_is_removed_by_the_next(opened):
    """Its name is gone before its tombstone is there; a sweep that has read the name must not take the tombstone."""
    store = opened()
    retired = put(store, b"r")

    def names():
        store.retire([retired])
        return {retired.name}

    store.sweep(names, set)
    sweep(store)
    assert not retired.exists()


def test_an_orphan_is_kept_for_days_and_comes_back(opened, clock, caplog):
    store = opened()
    orphan, other = put(store, b"o"), put(store, b"p")
    sweep(store)
    clock.now += ORPHAN_SECONDS - 1
    sweep(store)
    assert orphan.is_dir()
    clock.now += 2
    with caplog.at_level(logging.WARNING):
        sweep(store)
    assert not orphan.exists() and f"{orphan} belongs to no adapter" in caplog.text
    assert store.find(orphan) == orphan and (orphan / "adapter_model.safetensors").read_bytes() == b"o"
    clock.now += LOST_SECONDS - 1
    sweep(store, orphan)
    assert (store.root / LOST / other.name).is_dir()
    clock.now += 2
    sweep(store, orphan)
    assert not (store.root / LOST / other.name).exists() and orphan.is_dir()
    assert f"{other.name} was lost for 7 days" in caplog.text


def test_a_directory_that_was_moved_with_its_names_is_found(opened, tmp_path):
    store = opened()
    path = put(store, b"x")
    assert store.find(tmp_path / "elsewhere" / path.name) == path
    assert store.find(tmp_path / "elsewhere" / "policy") == tmp_path / "elsewhere" / "policy"
    assert store.find(tmp_path / "elsewhere" / ("0" * 64)) == tmp_path / "elsewhere" / ("0" * 64)


def test_a_failed_load_leaves_nothing_unless_a_name_means_it(opened):
    store = opened()
    before = put(store, b"n")
    for letter in (b"n", b"x"):
        with pytest.raises(RuntimeError), store.draft() as draft:
            draft.write("adapter_config.json", b"{}")
            draft.write("adapter_model.safetensors", letter)
            draft.seal()
            raise RuntimeError
    sweep(store, before)
    assert store.directories() == [before]


def test_what_a_draft_holds_stays(opened, clock):
    store = opened()
    with store.draft() as draft:
        draft.write("adapter_config.json", b"{}")
        path = draft.seal()
        store.retire([path])
        clock.now += ORPHAN_SECONDS + 1
        sweep(store)
        assert path.is_dir()
    sweep(store)
    assert not path.exists()


def test_one_owner_has_the_directory(opened, tmp_path):
    first = opened("a")
    with pytest.raises(OtherOwner, match="in use by another server or cluster; stop that one"):
        opened("a")
    with pytest.raises(OtherOwner, match="in use"):
        opened("b", takes_over=True)
    first.close()
    with pytest.raises(OtherOwner, match=r"belongs to another server or cluster.*identity a.*this one's has b"):
        opened("b")
    one, two = opened("a", is_shared=True), opened("a", is_shared=True)
    with pytest.raises(OtherOwner, match="in use"):
        opened("a")
    with pytest.raises(OtherOwner, match="belongs to another"):
        opened("c", is_shared=True)
    one.close()
    two.close()
    opened("b", takes_over=True).close()
    with pytest.raises(OtherOwner, match="belongs"):
        opened("a")


@pytest.mark.parametrize("text", ["{", "[]", "7", '{"identity": null}', '{"identity": ""}', "[" * 3000, "\udc80"])
def test_a_damaged_owner_file_is_named(opened, tmp_path, text):
    opened("a").close()
    file = tmp_path / "uploads" / "owner.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(OtherOwner, match=rf"^{file} names no owner: it holds .*; restore it from a backup"):
        opened("a")
    opened("b", takes_over=True).close()
    opened("b").close()


def test_a_disk_that_takes_no_owner_is_told_with_the_file(opened, tmp_path, monkeypatch):
    """Writing by a descriptor fails without a file's name."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", full)
    with pytest.raises(OSError, match="No space left") as caught:
        opened("a")
    assert caught.value.filename == str(tmp_path / "uploads" / "owner.json")


def test_what_is_late_writes_nothing_once_it_is_closed(opened):
    store = opened()
    draft = store.draft()
    store.close()
    for late in (store.recount, lambda: store.reserve(1), lambda: draft.write("adapter_config.json", b"{}")):
        with pytest.raises(OSError, match="is closed"):
            late()


def test_several_processes_of_one_owner_claim_it_at_once(opened, monkeypatch):
    monkeypatch.setattr(owned_store, "CLAIM_SECONDS", 60)
    with ThreadPoolExecutor(8) as threads:
        claims = [threads.submit(opened, "a", is_shared=True) for _ in range(8)]
    assert all(claim.result().owner == "a" for claim in claims)


def test_parallel_uploads_stay_within_the_bound(opened):
    store, refused = opened(total=500), []
    barrier = threading.Barrier(15)

    def upload(number):
        try:
            with store.draft() as draft:
                barrier.wait(60)
                for _ in range(9):
                    draft.write("adapter_model.safetensors", bytes([number]) * 10)
                draft.seal()
        except StoreFull:
            refused.append(number)

    threads = [threading.Thread(target=upload, args=(number,)) for number in range(15)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    used = sum(file.stat().st_size for path in store.directories() for file in path.iterdir())
    assert used == store.num_bytes <= 500 and len(refused) >= 10


def test_bytes_in_use_are_counted_among_processes(opened):
    one, two = (opened(total=200, is_shared=True) for _ in range(2))
    path = put(one, b"x" * 98)
    assert two.num_bytes == one.num_bytes == 100
    put(two, b"x" * 98)
    assert one.num_bytes == 100, "the same files take their room once"
    put(two, b"y" * 98)
    with pytest.raises(StoreFull, match=r"200 of the 200 bytes"):
        one.draft()
    assert one.remove(path) and two.num_bytes == 100
    (one.root / "bytes").write_bytes((199).to_bytes(8, "little"))  # a process that was killed has given nothing back
    two.recount()
    assert one.num_bytes == 100
    shutil.rmtree(one.root)


def test_a_disk_that_fails_at_the_end_of_a_draft_hides_no_error_and_keeps_nothing(opened, monkeypatch, caplog):
    """Ending a draft raised: the refusal of its load became an internal error, and its lock was never released."""
    store = opened()
    draft = store.draft()
    draft.write("adapter_config.json", b"{}")
    directory = draft.seal()

    def fails(*args):
        raise OSError(errno.EFBIG, "File too large")

    with monkeypatch.context() as context:
        context.setattr(owned_store.os, "pwrite", fails)
        context.setattr(owned_store.Path, "touch", fails)
        draft.end(failed=True)
    assert "File too large" in caplog.text
    assert store.remove(directory), "nothing holds it any more"
    store.recount()
    assert store.num_bytes == 0
