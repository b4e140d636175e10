"""`chorus batch` over a fake engine: every request has its answer, once, whatever comes between."""

from __future__ import annotations

import asyncio
import json
import resource
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from chorus.server.cli import batch
from chorus.server.cli.adapters import CommandError
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
def ask(tmp_path, tokenizer, monkeypatch):
    """`ask(*lines)`: answers them, the output's old lines staying there, and returns the exit code."""
    monkeypatch.setattr(batch, "WAIT_SECONDS", 0.0)

    class Asking:
        given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        engine = FakeEngine(["alice"])
        settings = Settings(model="/models/base")

        def __call__(self, *lines):
            self.given.write_text("\n".join(lines))
            worker = EngineWorker(lambda: self.engine)

            def opened(_):
                worker.start()
                return worker, tokenizer

            return batch.run(self.settings, self.given, self.output, opened)

        def answers(self):
            lines = [json.loads(text) for text in self.output.read_text().splitlines()]
            by_id = {each["custom_id"]: each["response"] for each in lines}
            assert len(by_id) == len(lines)
            return by_id

        def texts(self):
            return {name: response["body"]["choices"][0]["text"] for name, response in self.answers().items()}

    return Asking()


def test_every_request_has_an_answer(ask, capsys):
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
    assert ask(*many, *others) == 1
    assert "3 of 518 requests failed" in " ".join(capsys.readouterr().err.split())
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
    assert asked == 3, "what the server failed to give is asked for once more"
    with ask.output.open("a") as out:
        out.write('{"custom_id": "c", "resp')
    ask.engine = FakeEngine([])
    assert ask(line("a"), line("b\0", prompt="b"), line("c")) == 0
    assert ask.texts() == {"a": "a", "b\0": "b", "c": "c"} and len(ask.engine.asked) == 2
    assert ask(line("a"), line("c")) == 0 and len(ask.engine.asked) == 2


def test_a_failure_of_an_earlier_run_is_still_one(ask):
    """A request that is wrong is not asked for again, and the command does not say that all is well."""
    assert ask(line("a"), line("wrong", prompt="a", temperature=-1)) == 1
    asked = len(ask.engine.asked)
    assert ask(line("a"), line("wrong", prompt="a", temperature=-1)) == 1 and len(ask.engine.asked) == asked
    assert ask(line("a")) == 0, "only the input's own lines count"


def test_a_full_queue_is_waited_for_as_long_as_it_says_and_not_for_ever(ask, monkeypatch):
    """429 has Retry-After; the number of attempts is bounded, and the last answer is the result."""
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(batch, "asyncio", SimpleNamespace(sleep=sleep))
    statuses = iter([429, 429, 503, 200, *[503] * 20])

    class Busy:
        async def post(self, url, content, headers):
            status = next(statuses)
            told = {"x-request-id": "r", **({"retry-after": "7"} if status == 429 else {})}
            return httpx.Response(status, headers=told, json={"error": {"code": "busy", "message": "full"}})

    monkeypatch.setattr(batch, "WAIT_SECONDS", 1.0)
    found = asyncio.run(batch._ask(Busy(), batch.BatchLine("a", COMPLETIONS, {})))  # noqa: SLF001
    assert found["response"]["status_code"] == 200 and waits == [7, 7, 4]
    waits.clear()
    found = asyncio.run(batch._ask(Busy(), batch.BatchLine("a", COMPLETIONS, {})))  # noqa: SLF001
    assert found["response"]["status_code"] == 503 and len(waits) == 19
    assert waits[:4] == [1, 2, 4, 8] and max(waits) == batch.MAX_WAIT_SECONDS


def test_a_full_disk_is_told_with_the_output_and_what_is_free(ask, monkeypatch):
    """Writing to a file that may not grow fails as on a full disk: with an error that names no file."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    ask.output.write_bytes(b"")
    monkeypatch.setattr(ask, "settings", Settings(model="/models/base"))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, most[1]))
        with pytest.raises(
            CommandError, match=f"{ask.output} can't be written: the file is larger than ulimit -f, 100"
        ):
            ask(line("a"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)


def test_results_need_a_file(ask, monkeypatch):
    monkeypatch.setattr(ask, "output", Path("/dev/null"))
    with pytest.raises(UsageError, match="/dev/null is no file"):
        ask(line("a"))


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
