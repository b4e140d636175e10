"""Damaged requests: mutants are those of their number, faults of a server are seen, and a short run finds none."""

import json
import socket
import threading

import pytest

from chorus.perf.chaos.fuzz import Answer, NoAnswer, exchange, main
from chorus.perf.chaos.mutants import Call, Mutant, framed, mutant, other_calls, questions

CALLS = [*questions({None: ["a\n", "b\n"], "upper": ["c\n", "d\n"]}, 0, 20), *other_calls("spare", "/tmp/spare")]
REFUSAL = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}


def test_a_number_gives_the_same_mutant():
    first, again = ([mutant(number, CALLS) for number in range(3000)] for _ in range(2))
    assert first == again
    assert len({one.raw for one in first}) > 2000


def test_the_damage_is_of_every_kind():
    drawn = [mutant(number, CALLS) for number in range(2000)]
    intact = {call.raw() for call in CALLS}
    assert sum(one.raw in intact for one in drawn) < 100
    valid = [one for one in drawn if one.is_greedy and not one.may_wait]
    assert len(valid) > 200 and {one.path for one in valid} == {"/v1/completions", "/v1/chat/completions"}
    bodies = b"".join(one.raw for one in drawn)
    assert all(mark in bodies for mark in (b"\\ud800", b"[" * 80, b"9" * 5000, b"chunked", b"NaN", b"\xef\xbb\xbf"))


@pytest.mark.parametrize(
    ("body", "greedy"),
    [
        (b'{"temperature": 0}', True),
        (b'{"temperature": 0.0}', True),
        (b'{"temperature": 1}', False),
        (b"{}", False),
        (b"[]", False),
        (b"{", False),
    ],
)
def test_greedy_is_what_says_so(body, greedy):
    assert Mutant(0, "/v1/completions", b"", body=body).is_greedy is greedy
    assert not Mutant(0, "/tokenize", b"", body=body).is_greedy


@pytest.mark.parametrize(
    ("status", "error", "is_fault"),
    [
        (200, None, False),
        (307, None, False),
        (400, REFUSAL, False),
        (503, REFUSAL, False),
        (500, REFUSAL, True),
        (502, REFUSAL, True),
        (302, REFUSAL, True),
        (400, {**REFUSAL, "message": ""}, True),
        (400, {**REFUSAL, "message": "x" * 2000}, True),
        (400, {"message": "no"}, True),
        (400, "no", True),
    ],
)
def test_what_no_client_should_get(status, error, is_fault):
    assert (Answer(status, "application/json", json.dumps({"error": error}).encode()).fault() is not None) is is_fault


def test_a_refusal_that_is_no_json_is_a_fault():
    assert Answer(400, "text/plain", b"Bad Request").fault() is not None
    assert Answer(400, "text/plain", b"", has_body=False).fault() is None


def event(index, text, ends=None):
    return b"data: " + json.dumps({"choices": [{"index": index, "text": text, "finish_reason": ends}]}).encode()


def test_a_stream_says_what_its_parts_say():
    parts = [event(0, "a"), event(1, "x"), event(0, "b", "stop"), event(1, "", "length"), b"data: [DONE]"]
    stream = Answer(200, "text/event-stream; charset=utf-8", b"\n\n".join(parts))
    assert stream.essence() == [(0, "ab", "stop"), (1, "x", "length")]
    cut = Answer(200, "text/event-stream", b"\n\n".join(parts[:-1]))
    assert cut.essence() == "a stream without an end"


@pytest.fixture
def scripted():
    """A socket that answers each connection with the next of `answers` once anything came."""
    listener = socket.create_server(("127.0.0.1", 0))
    answers = []

    def run():
        while answers:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answers.pop(0))

    def serve(*given):
        answers.extend(given)
        threading.Thread(target=run, daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield serve
    listener.close()


def test_an_answer_is_read_whole(scripted):
    address = scripted(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    assert exchange(address, Call("GET", "/health").raw()) == Answer(200, "", b"{}")


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n{}", b"nonsense\r\n\r\n"])
def test_half_an_answer_is_none(scripted, said):
    with pytest.raises(NoAnswer):
        exchange(scripted(said), framed("GET", "/health", b""))


def test_a_server_stands_a_few(capsys):
    assert main(["--requests", "60", "--questions", "12", "--clients", "4"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ok"] and result["answers"] >= 60
