"""Connections that are too many, too slow, or not read, and what they leave to others."""

import os
import socket
import time

import httpx
import pytest

from chorus.server.connections import RESERVED_DESCRIPTORS, max_connections

HURRIED = {"head_seconds": 0.3, "body_seconds": 0.3, "send_seconds": 0.3, "idle_seconds": 1}
PATIENT = {"head_seconds": 300, "body_seconds": 300, "send_seconds": 300, "idle_seconds": 300}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def connect(live, sent=b"", receive_buffer=None):
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    connection.sendall(sent)
    return connection


def ends(connection):
    """Reads until the server closes; what came."""
    received = b""
    try:
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionResetError:
        pass
    connection.close()
    return received


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: localhost\r\n", HEAD + b"content-length: 100\r\n\r\n{"],
)
def test_what_does_not_come_in_time_is_cut(start, fake_engine, sent):
    live = start(fake_engine, settings=HURRIED)
    assert ends(connect(live, sent)) == b""


def test_a_byte_now_and_then_does_not_count_as_getting_on(start, fake_engine):
    live = start(fake_engine, settings=HURRIED)
    for sent in (b"GET /health HTTP/1.1\r\nx: ", HEAD + b"content-length: 10000\r\n\r\n"):
        connection = connect(live, sent)
        deadline = time.monotonic() + 60
        with pytest.raises(OSError):
            while time.monotonic() < deadline:
                connection.sendall(b"y")
                time.sleep(0.05)
        connection.close()


def test_an_idle_connection_is_closed(start, fake_engine):
    live = start(fake_engine, settings=HURRIED)
    assert b"200 OK" in ends(connect(live, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"))


def test_who_does_not_read_is_cut_and_the_pages_are_freed(start, make_engine):
    engine = make_engine(["alice"], max_model_len=1 << 20)
    engine.step_seconds = 0.0005
    live = start(engine, settings=HURRIED)
    body = (
        b'{"model": "base", "prompt": "a", "max_tokens": 1000000, "ignore_eos": true, "stream": true,'
        b'"skip_special_tokens": false}'
    )
    connection = connect(live, HEAD + b"content-length: %d\r\n\r\n" % len(body) + body, receive_buffer=4096)
    live.wait_until(lambda: live.worker.stats.num_running == 1, 30)
    live.wait_until(lambda: live.worker.stats.num_running == 0, 60)
    assert engine.aborted and engine.stats().num_free_pages == 100
    assert live.worker.stats.num_generated_tokens < 1000000
    connection.close()


def test_who_reads_slowly_is_not_cut(start, make_engine):
    engine = make_engine(["alice"], max_model_len=1 << 20)
    live = start(engine, settings={**HURRIED, "send_seconds": 60})
    body = (
        b'{"model": "base", "prompt": "a", "max_tokens": 20000, "ignore_eos": true, "stream": true,'
        b'"skip_special_tokens": false}'
    )
    head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    connection = connect(live, head + body, receive_buffer=4096)
    time.sleep(1)
    received = ends(connection)
    assert received.rstrip().endswith(b"0") and b"data: [DONE]" in received


def test_a_new_client_takes_the_place_of_the_oldest_that_ask_for_nothing(start, fake_engine):
    live = start(fake_engine, settings={**PATIENT, "max_connections": 16})
    silent = [connect(live, b"GET /hea" if number % 2 else b"") for number in range(60)]
    assert live.client.get("/health").status_code == 200
    assert len(live.server._connections) <= 17
    assert ends(silent[0]) == b""
    for connection in silent[1:]:
        connection.close()


def test_answers_in_progress_are_not_given_up_for_new_clients(start, fake_engine):
    live = start(fake_engine, settings={**PATIENT, "max_connections": 16})
    fake_engine.gate.clear()
    body = b'{"model": "base", "prompt": "abc"}'
    head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    asking = [connect(live, head + body) for _ in range(12)]
    live.wait_until(lambda: len(fake_engine._running) == 12 or len(live.worker._inbox) >= 11, 30)
    silent = [connect(live) for _ in range(40)]
    refused = live.client.post("/v1/completions", json={"model": "base", "prompt": "abc"})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
    assert "retry-after" in refused.headers
    assert live.client.get("/health").status_code == 200
    fake_engine.gate.set()
    for connection in asking:
        assert b'"text":"abc"' in ends(connection)
    for connection in silent:
        connection.close()


def test_the_limit_leaves_descriptors_for_all_else(monkeypatch):
    import resource

    in_use = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    assert 1024 - RESERVED_DESCRIPTORS - in_use - 4 <= max_connections() <= 1024 - RESERVED_DESCRIPTORS
    assert max_connections(50) == 50 and max_connections(5000) == max_connections()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    assert max_connections() == 16


def test_a_lack_of_descriptors_does_not_fill_the_log(start, fake_engine, caplog):
    live = start(fake_engine, settings=PATIENT)
    loop = live.server.servers[0].get_loop()
    for _ in range(1000):
        loop.call_soon_threadsafe(
            loop.call_exception_handler,
            {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")},
        )
    assert live.client.get("/health").status_code == 200
    assert len([record for record in caplog.records if "accepted" in record.message]) <= 1


def test_unread_answers_give_way_to_new_clients(start, fake_engine):
    live = start(fake_engine, settings={**PATIENT, "max_connections": 16})
    live.client.close()
    unread = [
        connect(live, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 200, receive_buffer=4096) for _ in range(16)
    ]

    def served():
        try:
            return httpx.get(f"{live.url}/v1/models", timeout=20).status_code == 200
        except httpx.TransportError:  # as long as all of them may still begin to read
            return False

    live.wait_until(served, 60)
    for connection in unread:
        connection.close()
