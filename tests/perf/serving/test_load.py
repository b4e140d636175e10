"""The load of a server: input of aiperf, results from its files, and messages about both.

A stand-in for aiperf sends the same file without its times and writes the same files; the test that needs the program
itself runs where it is installed.
"""

from __future__ import annotations

import json
import shutil
import sys
from itertools import pairwise
from urllib.parse import urlsplit

import pytest

from chorus.perf.serving.__main__ import main
from chorus.perf.serving.streams import read_streams

pytestmark = pytest.mark.wide

STAND_IN = """
import json, sys, urllib.request
from pathlib import Path

flags = dict(zip(sys.argv[2::1], sys.argv[3::1]))
directory = Path(flags["--artifact-dir"])
(directory / "flags.json").write_text(json.dumps(sys.argv[1:]))
answers, done = [], 0
for line in open(flags["--input-file"]):
    row, text = json.loads(line), None
    path = "/v1/chat/completions" if flags["--endpoint-type"] == "chat" else "/v1/completions"
    body = json.dumps({**row["payload"], "stream": False}).encode()
    try:
        sent = urllib.request.Request(flags["--url"] + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(sent) as response:
            text = json.load(response)["choices"][0]["text"]
        done += 1
    except urllib.error.HTTPError:
        pass
    times = {} if text is None else {"time_to_first_token": 7.0, "inter_token_latency": 2.0}
    answers.append({"conversation_id": row["session_id"], "response_text": text, "metrics": times})
answers.reverse()
(directory / "outputs.json").write_text(json.dumps({"data": answers}))
summary = {"request_count": {"unit": "requests", "avg": done}, "error_summary": [len(answers) - done]}
(directory / "profile_export_aiperf.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def aiperf(tmp_path) -> str:
    program = tmp_path / "aiperf.py"
    program.write_text(STAND_IN)
    return f"{sys.executable} {program}"


def bench(capsys, *argv: str) -> tuple[int, str, dict]:
    code = main(list(argv))
    *text, last = capsys.readouterr().out.splitlines()
    return code, "\n".join(text), json.loads(last)


def setting(*fields: str) -> tuple[str, ...]:
    return tuple(word for field in fields for word in ("--set", field))


FAST = (*setting("arrivals.rate=1e6", "lengths.prompt.tokens=8", "lengths.output.tokens=4"), "--warm-up", "1")


def test_the_command_sends_a_workload_and_reads_its_answers(scripted, capsys, tmp_path, aiperf):
    out = tmp_path / "out"
    code, text, found = bench(
        capsys,
        scripted.url + "/v1/",
        *FAST,
        *setting("requests=30"),
        "--slo-ttft",
        "500",
        "--slo-e2e",
        "60000",
        "--out",
        str(out),
        "--aiperf",
        aiperf,
    )
    assert code == 0
    assert (found["requests"], found["failed"], found["load"]["request_count"]["avg"]) == (30, 0, 30)
    assert {row["model"] for row in found["models"]} == {"left", "right"}
    assert sum(row["requests"] for row in found["models"]) == 30
    assert all((row["TTFT p99"], row["TPOT p50"]) == (7.0, 2.0) for row in found["models"])
    assert "by model" in text
    assert json.loads((out / "serving.json").read_text()) == found
    warm, *bodies = scripted.bodies
    assert (warm["model"], warm["stream"]) == ("base", False)
    lines = [json.loads(line) for line in (out / "load.jsonl").read_text().splitlines()]
    assert [{**line["payload"], "stream": False} for line in lines] == bodies
    assert {len(line["payload"]["prompt"].split()) for line in lines} == {8}
    assert (
        lines[0]["payload"].items()
        >= {
            "max_tokens": 4,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }.items()
    )
    flags = json.loads((out / "flags.json").read_text())
    assert flags[flags.index("--goodput") + 1] == "time_to_first_token:500 request_latency:60000"


def test_requests_come_when_the_workload_says(scripted, capsys, tmp_path, aiperf):
    argv = (*setting("arrivals.process=constant", "arrivals.rate=4", "requests=3"), "--endpoint", "chat", "--plain")
    code, _, _ = bench(capsys, scripted.url, *argv, "--out", str(tmp_path), "--aiperf", aiperf)
    assert code == 0
    lines = [json.loads(line) for line in (tmp_path / "load.jsonl").read_text().splitlines()]
    times = [line["timestamp"] for line in lines]
    assert [after - before for before, after in pairwise(times)] == [250.0, 250.0]
    assert all("ignore_eos" not in line["payload"] for line in lines)
    assert lines[0]["payload"]["messages"][0]["role"] == "user"
    assert set(scripted.paths) == {"/v1/chat/completions"}


def test_failures_fail_the_command(scripted, capsys, aiperf):
    scripted.fail["left"] = "http"
    argv = (*setting("requests=20", "popularity.kind=distinct"), "--aiperf", aiperf)
    code, _, found = bench(capsys, scripted.url, *FAST, *argv)
    assert code == 1
    assert (found["failed"], found["errors"]) == (10, [10])


def test_a_workload_file_is_served_by_the_adapters_there_are(scripted, capsys, tmp_path, aiperf):
    spec = tmp_path / "load.json"
    lengths = {"kind": "laws", "prompt": {"law": "constant", "tokens": 100}, "output": {"law": "constant", "tokens": 4}}
    fields = {
        "requests": 9,
        "arrivals": {"process": "constant", "rate": 1000.0},
        "popularity": {"kind": "distinct"},
        "adapters": {"count": 3},
        "lengths": lengths,
    }
    spec.write_text(json.dumps(fields))
    argv = ("--workload", str(spec), "--set", "requests=6", "--aiperf", aiperf)
    code, _, found = bench(capsys, scripted.url, *argv)
    assert code == 0
    assert found["requests"] == 6
    assert found["substituted_adapters"] == 3
    assert found["shortened_requests"] == 6, "100 + 4 tokens do not fit in 64"
    assert [body["model"] for body in scripted.bodies[-6:]].count("left") == 4


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--adapters", "nobody"), "has no model 'nobody'; it has base, left, right"),
        (("--prompts", "skills"), "needs the built-in model"),
        (setting("arrivals.rate=-1"), "arrivals.rate is -1"),
        (setting("popularity.kind=pareto"), "popularity.kind is 'pareto'; use one of"),
        (("--workload", "/nowhere.toml"), "/nowhere.toml"),
    ],
)
def test_what_is_asked_wrongly_is_said(scripted, capsys, argv, message):
    assert main([scripted.url, *argv]) == 2
    assert message in capsys.readouterr().err
    assert not scripted.bodies


def test_a_server_that_is_not_there_is_said(capsys):
    assert main(["http://127.0.0.1:9"]) == 2
    assert "can't be reached" in capsys.readouterr().err


def test_a_model_that_can_not_answer_is_said_before_the_load(scripted, capsys):
    scripted.fail["base"] = "http"
    assert main([scripted.url, *setting("requests=50")]) == 2
    error = capsys.readouterr().err
    assert "base answered 503" in error and "no room" in error
    assert len(scripted.bodies) == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [("/nowhere/aiperf", "uv tool install aiperf"), ("false", "ended with 1"), ("true", "outputs.json can't be read")],
)
def test_an_aiperf_that_does_not_run_is_said(scripted, capsys, command, message):
    assert main([scripted.url, *FAST, "--aiperf", command]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("aiperf") is None, reason="needs aiperf: uv tool install aiperf")
def test_aiperf_itself(scripted, capsys, tmp_path):
    code, _, found = bench(capsys, scripted.url, *FAST, *setting("requests=8"), "--out", str(tmp_path))
    assert (code, found["failed"], found["load"]["request_count"]["avg"]) == (0, 0, 8)
    assert all(row["TTFT p50"] > 0 for row in found["models"])


# -- streams that are read at little cost


def address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


def test_streams_are_read_and_counted(scripted):
    bodies = [{"model": model, "prompt": "hi", "max_tokens": count} for model, count in (("left", 5), ("right", 2))]
    found = read_streams(address(scripted.url), bodies)
    assert (len(found.firsts), len(found.gaps)) == (2, 5)
    assert 0 < found.firsts[0] <= found.firsts[1] <= found.seconds
    assert min(found.gaps) >= 0
    assert sorted(body["model"] for body in scripted.bodies) == ["left", "right"]


def test_a_stream_that_breaks_off_is_an_error(scripted):
    scripted.fail["left"] = "cut"
    with pytest.raises(RuntimeError, match="broke off after 1 events"):
        read_streams(address(scripted.url), [{"model": "left", "prompt": "hi", "max_tokens": 5}])
