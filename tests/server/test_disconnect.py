"""A client that leaves takes its engine requests with it."""

import socket
import threading
from concurrent.futures import Future

import httpx
import pytest

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def raw_request(url: str, body: bytes) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
    return connection


def test_leaving_a_stream(start, fake_engine):
    fake_engine.step_seconds = 0.05  # they would run for 20 s: a thread that gets no processor for 2 s still sees both
    live = start(fake_engine)
    body = {"model": "base", "prompt": ["x" * 100, "y" * 100], "max_tokens": 400, "stream": True}
    with live.client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_bytes())
        live.wait_until(lambda: live.worker.stats.num_running == 2)  # both may be prompts of different steps
    live.wait_until(lambda: live.worker.stats.num_running == 0)
    assert live.worker.stats.num_free_pages == 100
    assert live.worker.stats.num_generated_tokens < 400
    assert live.post(model="base", prompt="ok").json()["choices"][0]["text"] == "ok"
    metrics = live.client.get("/metrics").text
    assert 'chorus_requests_total{finish_reason="abort",model="base"} 2.0' in metrics


@pytest.mark.parametrize("stream", [b"false", b"true"])
def test_leaving_while_waiting(start, fake_engine, calls_of, stream):
    """No output comes at all here: the lost connection itself must be noticed."""
    live = start(fake_engine)
    fake_engine.gate.clear()
    connection = raw_request(live.url, b'{"model": "base", "prompt": "abc", "stream": ' + stream + b"}")
    live.wait_until(lambda: len(fake_engine.running) == 1)
    aborted = calls_of(live.worker, "abort")
    connection.close()
    live.wait_until(lambda: len(aborted) == 1)
    fake_engine.gate.set()
    live.wait_until(lambda: bool(fake_engine.aborted))
    assert not fake_engine.running
    assert fake_engine.steps <= 1


def test_leaving_before_the_request_is_taken(start, fake_engine, calls_of):
    live = start(fake_engine)
    fake_engine.gate.clear()
    blocker = raw_request(live.url, b'{"model": "base", "prompt": "abc"}')
    live.wait_until(lambda: len(fake_engine.running) == 1)
    submitted = calls_of(live.worker, "submit")
    connection = raw_request(live.url, b'{"model": "alice", "prompt": "abc"}')
    live.wait_until(lambda: len(submitted) == 1)
    connection.close()
    blocker.close()
    fake_engine.gate.set()
    live.wait_until(lambda: not fake_engine.running)


@pytest.mark.parametrize("stream", [b"false", b"true"])
def test_leaving_while_no_replica_takes_the_request(start, fake_engine, calls_of, monkeypatch, stream):
    """A replica that is started again takes a while; what the client held until then is free for others at once."""
    live = start(fake_engine)
    aborted, asked = calls_of(live.worker, "abort"), []
    monkeypatch.setattr(live.worker, "submit", lambda *_: asked.append(Future()) or asked[-1])
    connection = raw_request(live.url, b'{"model": "base", "prompt": "abc", "n": 2, "stream": ' + stream + b"}")
    live.wait_until(lambda: len(asked) == 2)
    assert not aborted
    connection.close()
    live.wait_until(lambda: len(aborted) == 2)
    assert all(one.cancelled() for one in asked)
    live.wait_until(lambda: live.app.state.gate.requests.total == 0)


def test_a_client_that_never_sends_its_body(start, fake_engine):
    live = start(fake_engine)
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(HEAD + b"content-length: 100\r\n\r\n{")
    assert live.post(model="base", prompt="ok").status_code == 200


def test_many_clients_at_once(start, fake_engine):
    fake_engine.step_seconds = 0.001
    live = start(fake_engine)
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        model = ("base", "alice", "bob")[number % 3]
        with httpx.Client(base_url=live.url, timeout=20) as client:
            body = {"model": model, "prompt": f"number {number}", "max_tokens": 50}
            answers[number] = client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    expected = {n: f"number {n}" if n % 3 == 0 else f"number {n}"[::-1] for n in range(24)}
    assert answers == expected
