"""A server's answers to bytes: read whole, and its faults are seen."""

import json
import socket
import threading

import pytest

from .exchange import Answer, NoAnswer, exchange
from .mutants import Call, framed

REFUSAL = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}


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


def test_a_stream_in_which_the_server_failed_is_a_fault():
    for code, is_fault in (("internal_error", True), ("generation_failed", False)):
        body = b'data: {"error":{"message":"m","type":"server_error","param":null,"code":"%s"}}\n\n' % code.encode()
        assert (Answer(200, "text/event-stream; charset=utf-8", body).fault() is not None) is is_fault


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
        return listener.getsockname()

    yield serve
    listener.close()


def test_an_answer_is_read_whole(scripted):
    address = scripted(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
    assert exchange(address, Call("GET", "/health").raw()) == Answer(200, "", b"{}")


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n{}", b"nonsense\r\n\r\n"])
def test_half_an_answer_is_none(scripted, said):
    with pytest.raises(NoAnswer):
        exchange(scripted(said), framed("GET", "/health", b""))
