"""What is kept between test processes: once made, and made again if the source changes."""

from __future__ import annotations

import os
import threading
import time

import pytest

from . import kept
from .kept import DAY, KeptAnswers, kept_files, kept_root


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A project of one file."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text("1")
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    kept_root.cache_clear()
    yield tmp_path / "tests" / "a.py"
    kept_root.cache_clear()


def test_files_are_made_once_until_the_source_changes(source):
    made = []

    def write(root):
        made.append(root)
        (root / "x").write_text(str(len(made)))

    first = kept_files("tiny", write)
    kept_root.cache_clear()  # as in another process
    assert kept_files("tiny", write) == first == made[0]
    source.write_text("2")
    kept_root.cache_clear()
    again = kept_files("tiny", write)
    assert [path.read_text() for path in (first / "x", again / "x")] == ["1", "2"]


def test_what_was_half_written_is_made_again(source):
    def fail(root):
        (root / "half").touch()
        raise OSError

    with pytest.raises(OSError):
        kept_files("tiny", fail)
    assert not (kept_files("tiny", lambda root: (root / "x").touch()) / "half").exists()


def test_others_wait_for_the_first(source):
    begun, made = threading.Event(), []

    def write(root):
        begun.set()
        time.sleep(0.05)
        made.append(root)

    first = threading.Thread(target=kept_files, args=("tiny", write))
    first.start()
    assert begun.wait(30)
    kept_files("tiny", write)
    assert len(made) == 1, "it was there when the lock was free"
    first.join()


def test_answers_are_those_of_another_process(tmp_path):
    question, asked = ["r1", [3, 4], None, 8], []

    def answer():
        asked.append(question)
        return [5, 6], 0.1 + 0.2, float("inf")

    for answers in (KeptAnswers(tmp_path), KeptAnswers(tmp_path)):
        for _ in range(2):
            tokens, margin, most = answers.get(question, answer)
            assert (list(tokens), margin, most) == ([5, 6], 0.1 + 0.2, float("inf"))
    assert len(asked) == 1
    KeptAnswers().get(question, answer)
    KeptAnswers(tmp_path).get([*question, 1], answer)
    assert len(asked) == 3


def test_what_is_old_is_removed(source):
    old = kept_root()
    source.write_text("2")
    kept_root.cache_clear()
    assert kept_root() != old and old.exists()
    past = time.time() - 2 * DAY
    os.utime(old, (past, past))
    kept_root.cache_clear()
    kept_root()
    assert not old.exists()
