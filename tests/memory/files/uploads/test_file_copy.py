"""A copy of a file that is made while the file is read."""

import os
import threading
import time

import pytest

from chorus.memory.files.uploads import file_copy
from chorus.memory.files.uploads.file_copy import FileCopy


@pytest.fixture
def given(tmp_path):
    (tmp_path / "given").write_bytes(os.urandom(100_000))
    with (tmp_path / "given").open("rb", buffering=0) as file:
        yield file


def number_of_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_it_is_read_before_it_is_whole(given, tmp_path, monkeypatch):
    may_go, send = threading.Event(), os.sendfile
    monkeypatch.setattr(file_copy.os, "sendfile", lambda *each: may_go.wait(60) and send(*each))
    before, path, content = number_of_descriptors(), tmp_path / "copy", (tmp_path / "given").read_bytes()
    copy = FileCopy(path, given)
    assert path.is_symlink() and path.read_bytes() == content and not copy.is_finished
    assert (copy.num_bytes, copy.identity.inode) == (100_000, os.fstat(given.fileno()).st_ino)
    may_go.set()
    copy.finish()
    assert not path.is_symlink() and path.read_bytes() == content and copy.is_finished
    copy.close()
    assert number_of_descriptors() == before and sorted(os.listdir(tmp_path)) == ["copy", "given"]


def test_it_is_given_up(given, tmp_path, monkeypatch):
    """The copy ends within a piece of it, and nothing is left open."""
    monkeypatch.setattr(file_copy, "_PIECE", 1)
    send, began = os.sendfile, threading.Event()

    def slowly(*each):
        began.set()
        time.sleep(0.01)
        return send(*each)

    monkeypatch.setattr(file_copy.os, "sendfile", slowly)
    before = number_of_descriptors()
    copy = FileCopy(tmp_path / "copy", given)
    assert began.wait(60)
    copy.close()
    assert number_of_descriptors() == before and not copy.is_finished


def test_a_full_disk_is_told_when_the_copy_is_needed(given, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_copy.os, "sendfile", full)
    copy = FileCopy(tmp_path / "copy", given)
    with pytest.raises(OSError, match="No space left"):
        copy.finish()
    copy.close()
    assert sorted(os.listdir(tmp_path)) == ["copy", "given"] and (tmp_path / "copy").is_symlink()


def test_a_source_that_ends_early_is_told(given, tmp_path, monkeypatch):
    monkeypatch.setattr(file_copy.os, "sendfile", lambda *_: 0)
    copy = FileCopy(tmp_path / "copy", given)
    with pytest.raises(OSError, match="ends after 0 bytes"):
        copy.finish()
    copy.close()
