"""Commands that measure: their own description, and their exit codes."""

from __future__ import annotations

import json

import pytest

from chorus.perf import report
from chorus.perf.report.command import conclude, judge, parser
from chorus.perf.report.table import Goal
from chorus.perf.serving.__main__ import main as serving

DOC = """Count sheep: `python -m sheep`.

    python -m sheep --most 3
"""


def test_help_has_the_docstring_and_the_defaults_that_say_something(capsys):
    command = parser(report.__spec__, DOC)
    command.add_argument("--most", type=int, default=0, help="how many")
    command.add_argument("--black", action="store_true", help="black ones")
    command.add_argument("--flags", default="", help="more")
    with pytest.raises(SystemExit):
        command.parse_args(["--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: python -m chorus.perf.report [-h]")
    assert "Count sheep" in text and "\n    python -m sheep --most 3\n" in text
    assert "how many (default: 0)" in text
    assert text.count("default") == 1


def test_help_does_not_print_a_key(capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    with pytest.raises(SystemExit):
        serving(["--help"])
    assert "sk-very-secret" not in capsys.readouterr().out


def test_the_last_line_is_the_result(capsys):
    assert (conclude({"a": 1}, ok=True), conclude({"a": 1}, ok=False)) == (0, 1)
    assert capsys.readouterr().out == '{"a": 1}\n' * 2


@pytest.mark.parametrize(("value", "met"), [(1.0, True), (1.5, True), (1.6, False), (None, False)])
def test_a_result_is_held_against_its_bars(capsys, value, met):
    goals = [Goal("least", 2.0, 2.0), Goal("most", value, 1.5, at_most=True)]
    assert judge({"a": 1}, goals) == (0 if met else 1)
    *table, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {"a": 1, "met": met}
    assert any("MISSED" in line or "not measured" in line for line in table) is not met
