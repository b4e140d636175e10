"""The benchmark of speculation counts steps and proposals, and finds answers that differ."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chorus.core.speculation.speculation import Speculation
from chorus.perf.bench import speculation
from chorus.perf.bench.speculation import main, read_chats, read_prompts
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL

FLAGS = ["--rows", "1", "3", "--requests", "6", "--rounds", "1", "--threads", "1", "--free"]


def result(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_load_that_is_copied_takes_fewer_steps(capsys):
    assert main(FLAGS) == 0
    one, three = result(capsys)["results"]
    assert (one["load"], one["rows"], three["rows"]) == ("copying", 1, 3)
    for found in (one, three):
        assert found["on"] > found["off"] and 0 < found["accepted"] <= found["proposed"]
        assert found["share"] == found["accepted"] / found["proposed"]
    assert one["off"] == 1


class Clocked:
    """A stand-in of a runner that generates `each` tokens a step, of `total`; each step takes `seconds`."""

    def __init__(self, name, each, total, seconds, log):
        self.name, self.each, self.total, self.seconds, self.log = name, each, total, seconds, log

    def begin(self, prompts):
        self.num_tokens, self.spent = 0, 0.0

    def has_work(self):
        return self.num_tokens < self.total

    def step(self):
        self.log.append(self.name)
        self.num_tokens, self.spent = self.num_tokens + self.each, self.spent + self.seconds


def test_runs_with_and_without_alternate_by_steps():
    """By the tokens generated, so that both are at the same token when others have the processor."""
    log = []
    runners: dict[str, Any] = {"off": Clocked("off", 1, 9, 2.0, log), "ngram": Clocked("ngram", 3, 9, 2.5, log)}
    assert speculation.run_together(runners, []) == {"off": 18.0, "ngram": 7.5}
    assert log == ["off", "ngram", "off", "off", *["off", "ngram", "off", "off"] * 2]
    log.clear()
    speculation.run_together(dict(reversed(runners.items())), [])
    assert log[:3] == ["ngram", "off", "off"]


def test_answers_that_differ_miss_the_bar(capsys, monkeypatch):
    compare = speculation._compare  # noqa: SLF001
    monkeypatch.setattr(speculation, "_compare", lambda *args: {**compare(*args), "same": False})
    assert main(FLAGS) == 1
    assert result(capsys)["met"] is False


@pytest.mark.wide
def test_texts_of_a_file_are_copied_and_free(capsys, tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = [{"instruction": "short"}, *({"context": "abcdefgh" * 5, "instruction": "x"} for _ in range(6))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loads = read_prompts([path], 4, [None, "reverse"], 30, lambda text: list(text.encode()))
    text = list(b"abcdefgh" * 5)[:30]
    assert loads["free"] == [(None, text), ("reverse", text)] * 2
    assert loads["copying"] == [(name, tokens + text[:10]) for name, tokens in loads["free"]]
    more = ["--model", str(BUILTIN_MODEL), "--adapters", str(BUILTIN_ADAPTERS), "--prompts", str(path)]
    assert main([*FLAGS, *more]) == 0
    assert [(each["load"], each["rows"]) for each in result(capsys)["results"]] == [
        ("copying", 1), ("copying", 3), ("free", 1), ("free", 3),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="has fewer than 7 texts"):
        read_prompts([path], 7, [None], 30, lambda text: list(text.encode()))


def test_a_model_needs_texts(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["--model", str(tmp_path)])
    assert "--model needs --prompts" in capsys.readouterr().err


def test_without_proposals_nothing_is_shared(capsys, monkeypatch):
    monkeypatch.setattr(Speculation, "drafts", lambda *_: {})
    assert main([*FLAGS[:2], *FLAGS[3:]]) == 0
    assert result(capsys)["results"][0]["share"] is None


def test_loads_are_parts_of_all_files_and_chats_are_prompts(tmp_path):
    paths = [tmp_path / name for name in ("a", "b")]
    for path, letter in zip(paths, "ab", strict=True):
        path.write_text(json.dumps({"question": letter * 30}) + "\n" + json.dumps({"question": letter * 40}) + "\n")

    def encode(text):
        return list(text.encode())

    loads = read_prompts(paths, 3, [None], 99, encode)
    assert [bytes(tokens).decode() for _, tokens in loads["free"]] == ["a" * 30, "b" * 30, "b" * 40]
    chats = tmp_path / "chats"
    lines = [{"requests": [{"prompt": "x" * 30}, {"prompt": "short"}]}, {"requests": [{"prompt": "y" * 50}]}]
    chats.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_chats(chats, 2, [None, "n"], 40, encode)
    assert [(name, bytes(tokens).decode()) for name, tokens in found] == [(None, "x" * 30), ("n", "y" * 40)]
