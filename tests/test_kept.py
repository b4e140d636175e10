"""What is kept between test processes, and in the repository: once made, and made again if what makes it changes."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time

import pytest

from . import kept, references
from .kept import DAY, KeptAnswers, kept_files, kept_root


@pytest.fixture
def source(tmp_path, monkeypatch):
    """The tests of a project: `a`, which writes what `b` says, and `c`."""
    (tmp_path / "core" / "model").mkdir(parents=True)
    (tmp_path / "core" / "model" / "names.py").write_text("")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text("from .b import (\n    one,\n)\n")
    (tmp_path / "tests" / "b.py").write_text("one = 1")
    (tmp_path / "tests" / "c.py").write_text("")
    monkeypatch.setattr(kept, "ROOT", tmp_path)
    forget()
    yield tmp_path
    forget()


def forget():
    """As another process begins."""
    for known in (kept.source_of, kept.imports_of, kept.source_of_program, kept_root):
        known.cache_clear()


def writer(source, act):
    """A function of the project's file `a` that writes what `act` does."""
    scope = {"act": act}
    exec(compile("def write(root):\n    act(root)\n", source / "tests" / "a.py", "exec"), scope)
    return scope["write"]


@pytest.mark.parametrize(
    ("changed", "is_made_again"),
    [("tests/a.py", True), ("tests/b.py", True), ("tests/c.py", False), ("core/model/names.py", True)],
)
def test_files_are_made_once_until_what_makes_them_changes(source, changed, is_made_again):
    made = []

    def act(root):
        made.append(root)
        (root / "x").write_text(str(len(made)))

    first = kept_files("tiny", writer(source, act))
    forget()
    assert kept_files("tiny", writer(source, act)) == first == made[0]
    with (source / changed).open("a") as file:
        file.write("\n# changed\n")
    forget()
    again = kept_files("tiny", writer(source, act))
    assert (again != first) == (len(made) == 2) == is_made_again
    assert (first / "x").read_text() == "1"


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
    old, new = (kept_files(name, writer(source, lambda root: (root / "x").touch())) for name in ("old", "new"))
    past = time.time() - 2 * DAY
    os.utime(old, (past, past))
    forget()
    kept_root()
    assert new.exists() and not old.exists()
    assert kept_files("old", writer(source, lambda root: (root / "x").touch())) == old and (old / "x").exists()


class Model:
    """A model of `kept_files` that is asked, and counts how often."""

    def __init__(self, source, name="tiny", answer=((5, 6), 0.5), text="weights"):
        self.asked = 0
        self.answer = answer
        path = kept_files(f"{name}", writer(source, lambda root: (root / "x").write_text(text)))
        self.kept = KeptAnswers(path)

    def ask(self, question="which?"):
        def answer():
            self.asked += 1
            return self.answer

        tokens, _ = self.kept.get(question, answer)
        return [*tokens]


@pytest.fixture
def written(source, monkeypatch):
    """The project, whose repository has the answer of "tiny", and of no other model."""
    monkeypatch.setattr(references, "FOLDER", source / "tests" / "reference_answers")
    monkeypatch.setattr(references, "is_drawn", lambda name: False)
    Model(source).ask()
    references.merge(kept.made_answers())
    shutil.rmtree(kept_root())
    forget()
    return source


def test_what_the_repository_has_is_not_asked(written):
    model = Model(written)
    assert model.ask() == [5, 6]
    assert model.asked == 0
    assert model.ask("another") == [5, 6]
    assert model.asked == 1


def test_another_model_is_asked(written):
    model = Model(written, text="other weights", answer=((7,), 0.5))
    assert model.ask() == [7]


def test_a_drawn_model_is_asked_again(written, monkeypatch):
    monkeypatch.setattr(references, "is_drawn", lambda name: True)
    model = Model(written, answer=((5, 6), 0.50001))
    assert model.ask() == [5, 6]
    assert model.asked == 1


@pytest.mark.parametrize("answer", [((5, 7), 0.5), ((5, 6, 7), 0.5), ((5, 6), 0.6)])
def test_a_model_whose_answer_is_another_is_told(written, monkeypatch, answer):
    monkeypatch.setattr(references, "is_drawn", lambda name: True)
    with pytest.raises(AssertionError, match=r"'tiny' was asked .* If the new answer is right, run `make references`"):
        Model(written, answer=answer).ask()


def test_a_choice_that_is_not_clear_may_go_either_way(written, monkeypatch):
    monkeypatch.setattr(references, "is_drawn", lambda name: True)
    assert Model(written, answer=((5, 7), 0.0005)).ask() == [5, 7]


def test_other_versions_of_the_libraries_ask_all_again(written, monkeypatch):
    monkeypatch.setattr(references, "versions_of", lambda *_: {"transformers": "99", "peft": "1"})
    model = Model(written)
    model.ask()
    assert model.asked == 1


def test_answers_are_added_to_those_of_the_same_model(written):
    Model(written).ask("another")
    Model(written, "second").ask()
    references.merge(kept.made_answers())
    assert len(references.read("tiny")["answers"]) == 2
    assert len(references.read("second")["answers"]) == 1
    shutil.rmtree(kept_root())
    forget()
    Model(written, text="other weights").ask("a third")
    references.merge(kept.made_answers())
    assert len(references.read("tiny")["answers"]) == 1


def test_a_tenth_is_drawn_and_all_if_asked_for(monkeypatch):
    names = [str(each) for each in range(1000)]
    drawn = []
    for each in ("one", "other", "all"):
        monkeypatch.setenv(references.AGAIN, each)
        drawn.append({name for name in names if references.is_drawn(name)})
    assert 60 < len(drawn[0]) < 140
    assert drawn[0] != drawn[1]
    assert len(drawn[2]) == 1000


def test_contents_are_those_of_any_version_and_process(tmp_path):
    found = []
    for targets, version in ((["a", "b"], "1"), (["b", "a"], "2"), (["a"], "2")):
        config = {"target_modules": targets, "peft_version": version, "base_model_name_or_path": f"/{version}"}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        found.append(references.contents_of(tmp_path))
    assert found[0] == found[1] != found[2]


def test_one_token_of_many_may_go_to_another_expert():
    many = [-0.25 * number for number in range(30)]
    assert references.is_same([many], [[*many[:4], -9.0, *many[5:]]])
    assert not references.is_same([many], [[*many[:4], -9.0, -9.0, *many[6:]]])
    assert not references.is_same([many[:5]], [[*many[:4], -9.0]])
    assert not references.is_same([*range(30)], [*range(29), 5]), "tokens are compared all"
    assert not references.is_same([many], [many[1:]])
