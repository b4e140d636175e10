"""Measurements of a night: what commands print is kept, and the page of all runs is drawn."""

from __future__ import annotations

import importlib.util
import json

import pytest

from chorus.perf.report import headlines, record
from chorus.perf.report.history import COMMANDS, PAGE
from chorus.perf.report.record import main

PRINTS = """
import json, sys
print("a table")
if sys.argv[1:] != ["nothing"]:
    print(json.dumps({"answers": 10, "wrong": 0, "lost": 0, "delayed": 1, "longest_delay": 0.25}))
sys.exit(int(sys.argv[1]) if sys.argv[1:2] in (["1"], ["2"]) else 0)
"""


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A module that prints a result, or none, and ends with a status."""
    (tmp_path / "printed.py").write_text(PRINTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def given(**options):
        monkeypatch.setattr(record, "COMMANDS", {name: f"printed {each}".strip() for name, each in options.items()})

    return given


@pytest.mark.parametrize(("option", "code"), [("", 0), ("1", 0), ("2", 2), ("nothing", 2)])
def test_what_a_command_prints_is_kept_unless_it_failed(commands, tmp_path, capsys, option, code):
    commands(killed_replica=option)
    assert main([str(tmp_path / "all"), "--commit", "abcdef1234", "--machine", "a runner"]) == code
    (folder,) = [path for path in (tmp_path / "all").iterdir() if path.is_dir()]
    assert folder.name.endswith("-abcdef12") and (folder / "about.txt").read_text() == "a runner\n"
    page = (tmp_path / "all" / PAGE).read_text()
    if code:
        assert not (folder / "killed_replica.json").exists() and "failed with" in capsys.readouterr().err
    else:
        assert json.loads((folder / "killed_replica.json").read_text())["answers"] == 10
        assert "| abcdef12 | a runner " in page and "| 10 | 0 | 0 | 1 | 0.25 |" in page


def test_a_failure_stops_no_other_command(commands, tmp_path):
    commands(company="2", killed_replica="")
    assert main([str(tmp_path / "all"), "--commit", "abcdef1", "--machine", "idle"]) == 2
    (folder,) = [path for path in (tmp_path / "all").iterdir() if path.is_dir()]
    assert sorted(path.name for path in folder.iterdir()) == ["about.txt", "killed_replica.json"]


def test_a_wrong_commit_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--commit", "HEAD", "--machine", "idle"])
    assert "seven digits of a commit's hash" in capsys.readouterr().err


def test_each_command_exists_and_has_its_table():
    for name, command in record.COMMANDS.items():
        module, *options = command.split()
        assert importlib.util.find_spec(module) is not None
        assert name in COMMANDS and headlines.HEADLINES[name].command == module
        if options:
            with pytest.raises(SystemExit) as ended:
                importlib.import_module(module).main([*options, "--help"])
            assert ended.value.code == 0
