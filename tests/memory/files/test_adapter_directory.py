"""Files of an adapter directory are opened once, stay as they were when inspected, and lie only where they may."""

from __future__ import annotations

import os
import shutil

import pytest

from chorus.memory.adapters.adapter import check_name
from chorus.memory.files.directory import MAX_PATH_BYTES, AdapterDirectory
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter, is_adapter_dir

from ...tables import TINY_PATHS
from .loading import CONFIG, WEIGHTS


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_file_that_is_swapped_after_it_was_looked_at(adapter_draft, tmp_path, monkeypatch, name, make):
    """The file that is read is the one that was looked at, though a pipe, a directory or a device took its place."""
    path = adapter_draft().write(tmp_path / "a")
    expected = inspect_adapter(path, TINY_PATHS)
    opened, plain_open = [], os.open

    def open_and_swap(file, *args, **options):
        fd = plain_open(file, *args, **options)
        if file == name and not opened:
            os.unlink(path / name)
            make(path / name)
        opened.append(file)
        return fd

    monkeypatch.setattr(os, "open", open_and_swap)
    assert inspect_adapter(path, TINY_PATHS).parts == expected.parts
    assert name in opened


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_what_is_no_regular_file_is_never_opened_for_reading(adapter_draft, tmp_path, monkeypatch, name):
    path = adapter_draft().write(tmp_path / "a")
    os.unlink(path / name)
    os.mkfifo(path / name)
    modes, plain_open = [], os.open

    def watched(file, flags, *args, **options):
        modes.append((os.fspath(file), flags))
        return plain_open(file, flags, *args, **options)

    monkeypatch.setattr(os, "open", watched)
    before = num_open_files()
    with pytest.raises(AdapterFormatError, match="not a regular file"):
        inspect_adapter(path, TINY_PATHS)
    assert num_open_files() == before
    assert (name, True) in [(file, bool(flags & os.O_PATH)) for file, flags in modes]
    assert all(flags & os.O_NONBLOCK and flags & os.O_CLOEXEC for _, flags in modes)
    assert not [file for file, flags in modes if file == name and not flags & os.O_PATH]


def test_only_what_really_lies_below_the_roots_is_read(adapter_draft, tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    draft = adapter_draft()
    draft.write(outside)
    for name in (CONFIG, WEIGHTS):
        path = draft.write(root / f"linked-{name}")
        os.unlink(path / name)
        os.symlink(outside / name, path / name)
        with pytest.raises(AdapterFormatError, match="lies outside the directories") as caught:
            inspect_adapter(path, TINY_PATHS, [root])
        assert str(caught.value).startswith(str(path / name))
        inspect_adapter(path, TINY_PATHS)  # whoever set the server up may link to anywhere
    os.symlink(outside, root / "directory")
    with pytest.raises(AdapterFormatError, match="lies outside the directories"):
        inspect_adapter(root / "directory", TINY_PATHS, [root])
    sibling = draft.write(tmp_path / "root-and-more")
    with pytest.raises(AdapterFormatError, match="lies outside the directories"):
        inspect_adapter(sibling, TINY_PATHS, [root])


def test_links_within_a_root_are_followed_as_in_caches(adapter_draft, tmp_path):
    """Hugging Face's caches have `snapshots/…/file` as a link to `blobs/…`."""
    made = adapter_draft().write(tmp_path / "root" / "made")
    snapshot = tmp_path / "root" / "snapshots" / "1234"
    snapshot.mkdir(parents=True)
    (tmp_path / "root" / "blobs").mkdir()
    for name in (CONFIG, WEIGHTS):
        shutil.move(made / name, tmp_path / "root" / "blobs" / f"hash-of-{name}")
        os.symlink(f"../../blobs/hash-of-{name}", snapshot / name)
    os.symlink(snapshot, tmp_path / "root" / "link")
    for path in (snapshot, tmp_path / "root" / "link"):
        assert inspect_adapter(path, TINY_PATHS, [tmp_path / "root"]).rank == 4


def test_nothing_stays_open(adapter_draft, tmp_path):
    path = adapter_draft().write(tmp_path / "a")
    before = num_open_files()
    for roots in ([], [tmp_path], [tmp_path / "other"]):
        for _ in range(3):
            try:
                inspect_adapter(path, TINY_PATHS, roots)
            except AdapterFormatError:
                assert roots == [tmp_path / "other"]
    (path / CONFIG).write_text("{}")
    with pytest.raises(AdapterFormatError):
        inspect_adapter(path, TINY_PATHS)
    assert num_open_files() == before


def test_paths_and_names_have_bounds(tmp_path):
    with pytest.raises(AdapterFormatError, match="at most 4096 bytes") as caught:
        AdapterDirectory(tmp_path / ("x/" * MAX_PATH_BYTES))
    assert len(str(caught.value)) < 500
    for bad in ("", " x", "x\n", "a\x00", "..", "a//b", "/a", "a/", "\u200b", "\udc80", "\x1b[2J", "n" * 257):
        with pytest.raises(AdapterFormatError) as caught:
            check_name(bad)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500
    for good in ("a", "org/name", "voix-é", "a b", "n" * 256):
        assert check_name(good) == good


def test_a_configuration_of_the_wrong_kind_still_means_an_adapter(tmp_path):
    """So that it is listed as broken instead of passed over."""
    for number, make in enumerate((os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path))):
        (tmp_path / str(number)).mkdir()
        assert not is_adapter_dir(tmp_path / str(number))
        make(tmp_path / str(number) / CONFIG)
        assert is_adapter_dir(tmp_path / str(number))


def test_a_broken_gguf_file_is_explained(tmp_path):
    (tmp_path / "adapter.gguf").write_bytes(b"GGUF")
    with pytest.raises(AdapterFormatError, match=r"adapter\.gguf: its header goes on after 4 bytes"):
        inspect_adapter(tmp_path / "adapter.gguf", TINY_PATHS)


@pytest.fixture
def shared(monkeypatch, tmp_path):
    """A directory that counts as shared memory."""
    monkeypatch.setattr("chorus.memory.files.directory.SHARED_MEMORY", str(tmp_path))
    return tmp_path


def test_an_adapter_in_shared_memory_is_read(adapter_draft, shared):
    assert inspect_adapter(adapter_draft().write(shared / "a"), TINY_PATHS, [shared]).parts


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_in_shared_memory_files_are_no_links(adapter_draft, shared, name):
    path = adapter_draft().write(shared / "a")
    os.rename(path / name, shared / name)
    os.symlink(shared / name, path / name)
    with pytest.raises(AdapterFormatError, match=r"is a link, and in .* files must not be links"):
        inspect_adapter(path, TINY_PATHS, [shared])
    os.symlink(path, shared / "link")
    with pytest.raises(AdapterFormatError, match="is a link"):
        inspect_adapter(shared / "link", TINY_PATHS, [shared])
    os.remove(path / name)
    os.rename(shared / name, path / name)
    assert inspect_adapter(shared / "link", TINY_PATHS, [shared]).parts, "a link to a directory is followed"


@pytest.mark.parametrize("name", [".", CONFIG, WEIGHTS])
def test_in_shared_memory_another_user_s_files_are_refused(adapter_draft, shared, monkeypatch, name):
    path = adapter_draft().write(shared / "a")
    theirs, plain = os.stat(path / name).st_ino, os.fstat

    def fstat(fd):
        found = plain(fd)
        return os.stat_result((*found[:4], found.st_uid + 1, *found[5:10])) if found.st_ino == theirs else found

    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(AdapterFormatError, match="belongs to another user"):
        inspect_adapter(path, TINY_PATHS, [shared])
