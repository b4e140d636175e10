"""`chorus batch` over a fake engine: every request has its answer, once, whatever comes between."""

from __future__ import annotations

import json

import pytest

from chorus.server.cli import batch
from chorus.server.cli.command import main
from chorus.server.engine.worker import EngineWorker
from chorus.server.errors import EngineUnavailable
from chorus.server.settings import Settings
from chorus.server.start.flags import UsageError

from ..conftest import FakeEngine

COMPLETIONS = "/v1/completions"


def line(custom_id, url=COMPLETIONS, **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"prompt": custom_id}})


@pytest.fixture
def ask(tmp_path, tokenizer):
    """`ask(*lines)`: answers them, the output's old lines staying there, and returns the exit code."""

    class Asking:
        given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        engine = FakeEngine(["alice"])

        def __call__(self, *lines):
            self.given.write_text("\n".join(lines))
            worker = EngineWorker(lambda: self.engine)

            def opened(_):
                worker.start()
                return worker, tokenizer

            return batch.run(Settings(model="/models/base"), self.given, self.output, opened)

        def answers(self):
            lines = [json.loads(text) for text in self.output.read_text().splitlines()]
            by_id = {each["custom_id"]: each["response"] for each in lines}
            assert len(by_id) == len(lines)
            return by_id

        def texts(self):
            return {name: response["body"]["choices"][0]["text"] for name, response in self.answers().items()}

    return Asking()


def test_every_request_has_an_answer(ask):
    many = [line(f"n{number}") for number in range(2 * batch.IN_FLIGHT)]
    others = [
        "",
        line("chat", "/v1/chat/completions", model="alice", messages=[{"role": "user", "content": "hi"}]),
        line("answer", "/v1/responses", input="hi"),
        line("message", "/v1/messages", max_tokens=50, messages=[{"role": "user", "content": "hi"}]),
        line("absent", prompt="a", model="absent"),
        line("wrong", prompt="a", temperature=-1),
        line("odd", prompt="\ud800"),
    ]
    assert ask(*many, *others) == 0
    answers = ask.answers()
    assert all(answers[f"n{number}"]["body"]["choices"][0]["text"] == f"n{number}" for number in range(len(many)))
    said = "user: hi\nassistant: "
    assert answers["chat"]["body"]["choices"][0]["message"]["content"] == said[::-1]
    assert answers["answer"]["body"]["output"][0]["content"][0]["text"] == said
    assert answers["message"]["body"]["content"][0]["text"] == said
    assert answers["absent"]["status_code"] == 404 and answers["absent"]["body"]["error"]["param"] == "model"
    assert answers["wrong"]["status_code"] == answers["odd"]["status_code"] == 400


def test_another_run_asks_for_what_is_not_there(ask):
    """Answers of a run that was cut short stay; one that was cut off, or that the server failed to give, comes anew."""
    assert ask(line("a"), line("b\0", prompt="\0")) == 1 and ask.answers()["b\0"]["status_code"] == 500
    asked = len(ask.engine.asked)
    with ask.output.open("a") as out:
        out.write('{"custom_id": "c", "resp')
    ask.engine = FakeEngine([])
    assert ask(line("a"), line("b\0", prompt="b"), line("c")) == 0
    assert ask.texts() == {"a": "a", "b\0": "b", "c": "c"} and len(ask.engine.asked) == asked == 2
    assert ask(line("a"), line("c")) == 0 and len(ask.engine.asked) == 2


def test_an_engine_that_ends_ends_the_batch(ask):
    """Requests that it leaves have no answer, so that another run asks for them."""
    ask.engine.step_error = MemoryError("broken for good")
    ask.engine.fail_steps = 10**6
    ask.engine.accounts_match = False
    with pytest.raises(EngineUnavailable):
        ask(*(line(f"n{number}") for number in range(40)))
    assert all(answer["status_code"] == 500 for answer in ask.answers().values()) and len(ask.answers()) < 40
    ask.engine = FakeEngine([])
    assert ask(*(line(f"n{number}") for number in range(40))) == 0 and len(ask.texts()) == 40


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "must be a JSON object"),
        ("[]", "must be a JSON object"),
        ('{"custom_id": "b"}', "must be a JSON object"),
        (line(5), "custom_id must be a string"),
        (json.dumps({"custom_id": "b", "url": COMPLETIONS, "body": []}), "body an object"),
        (line("b", "/v1/adapters"), "method must be POST, and url one of /v1/chat/completions"),
        (line("b", stream=True), "stream"),
        (line("a"), "line 1 has the same custom_id"),
    ],
)
def test_a_wrong_line_is_named_before_the_model_is_loaded(ask, text, said):
    with pytest.raises(UsageError, match=f"line 2: .*{said}"):
        ask(line("a"), text)
    assert not ask.output.exists() and not ask.engine.asked


def test_the_command_names_a_file_that_is_not_there(tmp_path, capsys):
    assert main(["batch", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert "No such file" in capsys.readouterr().err
