"""The demo over a fake engine whose adapters have the skills, or almost."""

import io
import json

import pytest
from rich.console import Console

from chorus.server.cli import command
from chorus.server.cli.command import main
from chorus.server.demo import skew
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from chorus.server.demo.client import Answer
from chorus.server.demo.questions import Question, Score
from chorus.server.demo.skills import BASE, SKILLS
from chorus.server.demo.table import Lane, LaneTable, printable
from chorus.server.engine.worker import EngineWorker
from chorus.server.start import launch

BUILTIN_FILES = [(BUILTIN_MODEL, "config.json"), *((BUILTIN_ADAPTERS / s, "adapter_config.json") for s in SKILLS)]


@pytest.fixture
def serve(monkeypatch, make_engine, tokenizer):
    """Makes the demo serve a fake engine with these adapters; `wrong` maps skills to the ones they use instead."""

    def install(adapters, wrong=None, skilled=True):
        class SkilledEngine(make_engine):
            def answer(self, request):
                if not skilled:
                    return super().answer(request)
                text = bytes(request.token_ids[1:]).decode().removesuffix("\n")
                name = request.adapter_name or BASE.name
                skill = {BASE.name: BASE, **SKILLS}[(wrong or {}).get(name, name)]
                return [*skill.apply(text).encode()]

        def load(settings):
            worker = EngineWorker(lambda: SkilledEngine(list(adapters)))
            worker.start()
            return worker, tokenizer

        monkeypatch.setattr(launch, "load", load)
        for module in (launch, command):
            monkeypatch.setattr(module, "check_model", lambda settings: None)

    return install


def test_right_answers_pass(serve, capsys):
    serve(SKILLS)
    assert main(["demo", "--inputs", "2"]) == 0
    out = capsys.readouterr().out
    assert "100.0 % exact, 0 answers were another skill's" in out
    assert f"{2 * (len(SKILLS) + 1)} requests" in out
    assert out.count("✓") == 2 * (len(SKILLS) + 1)


def test_check_prints_json_last(serve, capsys):
    serve(SKILLS)
    assert main(["demo", "--check", "3", "--seed", "5"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["accuracy"] == 1.0 and report["cross_talk"] == 0 and report["seed"] == 5
    assert report["requests"] == 3 * (len(SKILLS) + 1)
    assert set(report["exact"].values()) == {100.0} and set(report["exact"]) == {BASE.name, *SKILLS}
    assert 1 < report["max_adapters_in_step"] <= len(SKILLS)


@pytest.mark.parametrize("flags", [["--inputs", "2"], ["--check", "2"]])
def test_another_skills_answers_fail(serve, capsys, flags):
    serve(SKILLS, wrong={"upper": "reverse"})
    assert main(["demo", *flags]) == 1
    assert "gave reverse's answer" in capsys.readouterr().out


@pytest.mark.wide
def test_skew_shows_the_mode(serve, capsys, monkeypatch):
    monkeypatch.setattr(skew, "SHARE_LINES", 1)
    monkeypatch.setattr(skew, "LINE_SECONDS", 0.3)
    serve(SKILLS)
    assert main(["demo", "--skew"]) == 0
    heading, *lines = capsys.readouterr().out.partition("exact answers")[0].splitlines()
    assert heading.split()[:2] == ["seconds", [*SKILLS][-1]]
    assert [line.split()[1] for line in lines if "%" in line] == ["0%", "50%", "100%", "50%", "0%"]


def test_skew_needs_an_adapter_and_no_check(serve, capsys, tmp_path):
    serve([], skilled=False)
    assert main(["demo", "--skew", "--model", str(tmp_path)]) == 1
    assert "needs an adapter" in capsys.readouterr().err
    assert main(["demo", "--skew", "--check", "2"]) == 2
    assert "--check and --skew" in capsys.readouterr().err


def test_a_missing_adapter_is_one_line(serve, capsys):
    serve([name for name in SKILLS if name != "upper"])
    assert main(["demo"]) == 1
    assert "upper" in capsys.readouterr().err


def test_other_models_are_shown_without_judgement(serve, capsys, tmp_path):
    serve(["alice"], skilled=False)
    assert main(["demo", "--model", str(tmp_path), "--inputs", "1"]) == 0
    out = capsys.readouterr().out
    assert "alice" in out and "2 requests" in out and "exact" not in out


def test_score():
    score = Score()
    assert score.add(Question("upper", "abc", skill="upper"), "ABC") is True
    assert score.add(Question("upper", "abc", skill="upper"), "cba") is False
    assert score.add(Question("upper", "abc", skill="upper"), "nonsense") is False
    assert (score.asked, score.exact, len(score.crossed)) == (3, 1, 1)


@pytest.mark.skipif(
    not all((folder / name).is_file() for folder, name in BUILTIN_FILES), reason="the built-in model is not there"
)
def test_the_builtin_model_answers_right(capsys):
    assert main(["demo", "--check", "2", "--threads", "1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["cross_talk"] == 0


def test_answers_do_not_steer_the_terminal():
    assert printable("a\nb\x1b[2J\r é") == "a b·[2J  é"


def test_the_live_table_shows_every_lane():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40)
    lane = Lane("upper", 2, [], Question("upper", "abc[/]", skill="upper"), Answer("ABC", 4, 0.5, 3), True)
    lane.score.add(lane.question, "ABC[/]")
    with LaneTable(console, [lane, Lane("repeat", 0, [])], judged=True) as table:
        table.finished(lane)
    shown = out.getvalue()
    for words in ("upper", "repeat", "abc[/]", "ABC", "1/1", "✓"):
        assert words in shown
