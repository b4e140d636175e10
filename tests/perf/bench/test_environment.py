"""The origin of results: machine, versions, commit."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError

import pytest

from chorus.perf.bench import environment


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A source tree of its own."""
    monkeypatch.setattr(environment, "_ROOT", tmp_path)
    monkeypatch.delenv(environment.COMMIT_VARIABLE, raising=False)
    return tmp_path


def git(tree, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_and_whether_the_tree_differs(tree):
    git(tree, "init", "-q")
    (tree / "a").write_text("1")
    git(tree, "add", "a")
    git(tree, "commit", "-q", "-m", "first")
    found = git(tree, "rev-parse", "HEAD")
    (tree / "untracked").touch()
    assert environment.commit() == {"hash": found, "dirty": False}
    (tree / "a").write_text("2")
    assert environment.commit() == {"hash": found, "dirty": True}


def test_a_copied_tree_is_told_its_commit(tree, monkeypatch):
    assert environment.commit() == {"hash": None, "dirty": None}
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "abc-dirty")
    assert environment.commit() == {"hash": "abc", "dirty": True}


def test_the_driver_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.driver_version() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 580.159.04\n")
    tool.chmod(0o755)
    assert environment.driver_version() == "580.159.04"


def test_a_description(tree):
    found = environment.describe("cpu")
    assert found["device"] == {"type": "cpu", "name": "cpu"}
    assert found["driver"] is None
    assert {"python", "torch", "numpy"} <= set(found["versions"])
    assert found["date"].endswith("+00:00")


@pytest.mark.parametrize(
    ("triton", "numpy", "can"),
    [
        ("3.6.0", "2.5.5", False),
        ("3.6.0", "2.4.0", False),
        ("3.6.0", "2.3.5", True),
        ("3.7.0", "2.5.5", True),
        ("3.10.1", "2.5.5", True),
        (None, "2.5.5", True),
    ],
)
def test_versions_that_cannot_interpret_are_named_with_their_mend(monkeypatch, triton, numpy, can):
    def version(name: str) -> str:
        if (found := {"triton": triton, "numpy": numpy}[name]) is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(environment, "version", version)
    obstacle = environment.interpreter_obstacle()
    if can:
        assert obstacle is None
    else:
        assert obstacle is not None
        assert f"Triton {triton}" in obstacle
        assert "'numpy<2.4' or 'triton>=3.7'" in obstacle
