"""Hashes that are remembered: sealed, bounded, shared by servers, and computed again after any fault."""

from __future__ import annotations

import hashlib
import os
import stat

import pytest

from chorus.memory.disk import remembered
from chorus.memory.disk.remembered import RememberedHashes


@pytest.fixture
def path(tmp_path):
    return tmp_path / "hashes"


def seal(data):
    return hashlib.sha256(b"key" + data).digest()


def open_file(path, **options):
    return RememberedHashes(path, seal, **options)


def test_a_hash_is_recalled_by_its_mark_alone(path):
    first = open_file(path)
    assert first.recall("a") is None
    first.remember("a", "11")
    first.remember("b", "22")
    first.remember("a", "33")
    for each in (first, open_file(path)):
        assert [each.recall(mark) for mark in ("a", "b", "c")] == ["33", "22", None]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_line_of_another_key_or_that_was_changed_is_not_believed(path):
    open_file(path).remember("a", "1" * 64)
    assert RememberedHashes(path, lambda data: hashlib.sha256(data).digest()).recall("a") is None
    path.write_text(path.read_text().replace("1" * 64, "2" * 64))
    assert open_file(path).recall("a") is None


@pytest.mark.parametrize("junk", [b"", b"\xff\xfe", b"[]", b"a b c\n" * 3])
def test_a_torn_line_spoils_no_other(path, junk):
    path.write_bytes(junk)
    open_file(path).remember("a", "11")
    with path.open("ab") as file:
        file.write(path.read_bytes()[:-9])
    open_file(path).remember("b", "22")
    assert [open_file(path).recall(mark) for mark in ("a", "b")] == ["11", "22"]


def test_of_a_file_that_is_too_long_the_newest_lines_are_kept(path, monkeypatch):
    monkeypatch.setattr(remembered, "_MOST_BYTES", 1000)
    first = open_file(path)
    for number in range(50):
        first.remember(str(number), f"{number:02}")
    assert path.stat().st_size > 2000
    assert [open_file(path).recall(mark) for mark in ("0", "49")] == [None, "49"]
    assert path.stat().st_size < 1000, "it is written anew, or no server would ever read it again"


def test_two_servers_remember_in_one_file(path):
    first, second = open_file(path), open_file(path)
    first.remember("a", "11")
    second.remember("b", "22")
    first.remember("c", "33")
    third = open_file(path)
    assert [third.recall(mark) for mark in "abc"] == ["11", "22", "33"]


def test_the_newer_half_stays_of_a_file_that_is_too_long(path):
    first = open_file(path)
    for number in range(30):
        first.remember(f"{number}", f"{number}")
    size = path.stat().st_size
    second = open_file(path, most=20)
    assert [second.recall(f"{number}") for number in (0, 19, 20, 29)] == [None, None, "20", "29"]
    assert path.stat().st_size < size / 2


def test_a_file_that_can_t_be_written_is_told_once(tmp_path, caplog):
    remembered = open_file(tmp_path / "gone" / "hashes")
    for number in range(10):
        remembered.remember(f"{number}", f"{number}")
    assert len(caplog.records) == 1
    assert remembered.recall("7") == "7", "this server still knows"


def test_a_link_is_not_written_to(path, tmp_path):
    os.symlink(tmp_path / "elsewhere", path)
    open_file(path).remember("a", "11")
    assert not (tmp_path / "elsewhere").exists()
