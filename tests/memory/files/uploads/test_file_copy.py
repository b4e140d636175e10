"""A copy of a file that is made while the file is read."""

import os
import threading
import time

import pytest

from chorus.memory.files.directory import AdapterDirectory
from chorus.memory.files.given_up import GivenUp, wanted_while
from chorus.memory.files.uploads import file_copy
from chorus.memory.files.uploads.file_copy import FileCopy


@pytest.fixture
def given(tmp_path):
    (tmp_path / "given").write_bytes(os.urandom(100_000))
    with (tmp_path / "given").open("rb", buffering=0) as file:
        yield file


def number_of_descriptors():
    return len(os.listdir("/proc/self/fd"))


def opened(path):
    """What is read in an adapter's directory under a file's name."""
    with AdapterDirectory(path.parent) as directory:
        return directory.read(path.name, 1 << 20, "the copy")


def test_it_is_read_before_it_is_whole(given, tmp_path):
    before, path, content = number_of_descriptors(), tmp_path / "copy", (tmp_path / "given").read_bytes()
    copy = FileCopy(path, given)
    assert opened(path) == opened(path) == content and path.read_bytes() == b""
    assert (copy.num_bytes, copy.identity.inode) == (100_000, os.fstat(given.fileno()).st_ino)
    copying = threading.Timer(0.05, copy.run)
    copying.start()
    copy.finish()
    path.write_bytes(content + b"!")
    assert opened(path) == content + b"!", "the path is the copy now"
    copy.close()
    copying.join()
    assert number_of_descriptors() == before and sorted(os.listdir(tmp_path)) == ["copy", "given"]


def test_it_is_lent_in_its_own_directory_alone(given, tmp_path):
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "other" / "copy", tmp_path / "file"):
        path.write_bytes(b"not it")
    copy = FileCopy(tmp_path / "copy", given)
    assert opened(tmp_path / "other" / "copy") == opened(tmp_path / "file") == b"not it"
    (tmp_path / "other" / "copy").unlink()
    tmp_path.rename(moved := tmp_path.with_name(f"{tmp_path.name} moved"))
    assert len(opened(moved / "copy")) == 100_000
    copy.close()
    assert opened(moved / "copy") == b""


@pytest.mark.parametrize("size", [200_000, 10])
def test_it_is_written_over_what_counts_no_more(given, tmp_path, size):
    path = tmp_path / "copy"
    path.write_bytes(b"x" * size)
    copy = FileCopy(path, given)
    assert path.stat().st_size <= 100_000, "what is there counts as the upload's"
    copy.run()
    copy.finish()
    copy.close()
    assert path.read_bytes() == (tmp_path / "given").read_bytes()


def test_no_link_is_followed(given, tmp_path):
    before = number_of_descriptors()
    (tmp_path / "copy").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        FileCopy(tmp_path / "copy", given)
    assert number_of_descriptors() == before and not (tmp_path / "elsewhere").exists()


def test_it_is_given_up(given, tmp_path, monkeypatch):
    """The copy ends within a piece of it, and nothing is left open, nor lent."""
    monkeypatch.setattr(file_copy, "_PIECE", 1)
    send, began = os.sendfile, threading.Event()

    def slowly(*each):
        began.set()
        time.sleep(0.01)
        return send(*each)

    monkeypatch.setattr(file_copy.os, "sendfile", slowly)
    before = number_of_descriptors()
    copy = FileCopy(tmp_path / "copy", given)
    copying = threading.Thread(target=copy.run)
    copying.start()
    assert began.wait(60)
    copy.close()
    copying.join()
    with pytest.raises(OSError, match="given up"):
        copy.finish()
    assert number_of_descriptors() == before and len(opened(tmp_path / "copy")) < 100_000


def test_one_that_never_began_is_given_up(given, tmp_path):
    before, copy = number_of_descriptors(), FileCopy(tmp_path / "copy", given)
    copy.close()
    copy.run()
    with pytest.raises(OSError, match="given up"):
        copy.finish()
    assert number_of_descriptors() == before and opened(tmp_path / "copy") == b""


def test_who_waits_for_it_stops_when_nobody_wants_it_or_it_is_stopped(given, tmp_path):
    copy = FileCopy(tmp_path / "copy", given)
    wanted = iter([True, True, False])
    with wanted_while(lambda: next(wanted)), pytest.raises(GivenUp):
        copy.finish()
    threading.Timer(0.05, copy.stop).start()
    with pytest.raises(OSError, match="given up"):
        copy.finish()
    copy.close()


def test_a_file_that_is_read_only_is_replaced(given, tmp_path, monkeypatch):
    path = tmp_path / "copy"
    path.write_bytes(b"x")
    system_open = os.open

    def refused(name, flags, *more):
        if name == path and not flags & os.O_EXCL:
            raise PermissionError(13, "Permission denied")
        return system_open(name, flags, *more)

    monkeypatch.setattr(file_copy.os, "open", refused)
    copy = FileCopy(path, given)
    copy.run()
    copy.finish()
    copy.close()
    assert path.read_bytes() == (tmp_path / "given").read_bytes()


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
    copy.run()
    with pytest.raises(type(error or OSError()), match=told):
        copy.finish()
    copy.close()
    assert opened(tmp_path / "copy") == b""
