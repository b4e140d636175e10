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


def test_it_is_read_before_it_is_whole(given, tmp_path):
    before, path, content = number_of_descriptors(), tmp_path / "copy", (tmp_path / "given").read_bytes()
    copy = FileCopy(path, given)
    assert copy.link() and path.is_symlink() and path.read_bytes() == content
    assert (copy.num_bytes, copy.identity.inode) == (100_000, os.fstat(given.fileno()).st_ino)
    copying = threading.Timer(0.05, copy.run)
    copying.start()
    copy.finish()
    assert not path.is_symlink() and path.read_bytes() == content and copy.is_finished
    copy.close()
    copying.join()
    assert number_of_descriptors() == before and sorted(os.listdir(tmp_path)) == ["copy", "given"]


def test_it_is_given_up(given, tmp_path, monkeypatch):
    """The copy ends within a piece of it, and nothing is left open, nor a link whose number may become another file."""
    monkeypatch.setattr(file_copy, "_PIECE", 1)
    send, began = os.sendfile, threading.Event()

    def slowly(*each):
        began.set()
        time.sleep(0.01)
        return send(*each)

    monkeypatch.setattr(file_copy.os, "sendfile", slowly)
    before = number_of_descriptors()
    copy = FileCopy(tmp_path / "copy", given)
    assert copy.link()
    copying = threading.Thread(target=copy.run)
    copying.start()
    assert began.wait(60)
    copy.close()
    copying.join()
    with pytest.raises(OSError, match="given up"):
        copy.finish()
    assert number_of_descriptors() == before and not copy.is_finished and not (tmp_path / "copy").is_symlink()


def test_one_that_never_began_is_given_up(given, tmp_path):
    before, copy = number_of_descriptors(), FileCopy(tmp_path / "copy", given)
    copy.link()
    copy.close()
    copy.run()
    with pytest.raises(OSError, match="given up"):
        copy.finish()
    assert number_of_descriptors() == before and os.listdir(tmp_path) == ["given"]


def fails(error):
    def send(*_):
        if error is None:
            return 0
        raise error

    return send


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), "No space left"),
        (None, "ends after 0 bytes"),
        (ValueError("anything"), "anything"),
    ],
)
def test_what_the_copy_met_is_told_when_it_is_needed(given, tmp_path, monkeypatch, error, told):
    monkeypatch.setattr(file_copy.os, "sendfile", fails(error))
    copy = FileCopy(tmp_path / "copy", given)
    copy.link()
    copy.run()
    with pytest.raises(type(error or OSError()), match=told):
        copy.finish()
    copy.close()
    assert not (tmp_path / "copy").exists()
