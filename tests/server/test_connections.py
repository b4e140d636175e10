"""Connections that are too many, too slow, or not read, and what they leave to others."""

import os
import socket
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest

from chorus.server import acceptor, connections
from chorus.server.connections import FRESH_SECONDS, RESERVED_DESCRIPTORS, UNREAD_SECONDS, max_connections

HURRIED = {"head_seconds": 0.3, "body_seconds": 0.3, "send_seconds": 0.3, "idle_seconds": 1}
PATIENT = {"head_seconds": 300, "body_seconds": 300, "send_seconds": 300, "idle_seconds": 300}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


ASKS = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def connect(live, sent=b"", receive_buffer=None, address="127.0.0.1"):
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.bind((address, 0))
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


def asks_and_stays(connection):
    """Has a request answered, and keeps the connection."""
    connection.sendall(ASKS.replace(b"close", b"keep-alive"))
    received = b""
    while not received.endswith(b"}}"):
        received += connection.recv(1 << 16)
    assert b"200 OK" in received


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
    assert len(live.server.connections) <= 17
    assert ends(silent[0]) == b""
    for connection in silent[1:]:
        connection.close()


def test_a_new_client_is_not_closed_while_an_older_one_can_be(start, fake_engine):
    """Idle connections are worth more than silent ones, but not more than those that had no time to speak yet."""
    live = start(fake_engine, settings={**PATIENT, "max_connections": 16})
    live.client.close()
    idle = [connect(live, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n") for _ in range(16)]
    open_ones = live.server.connections

    def all_are_idle():
        now = time.monotonic()
        return len(open_ones) == 16 and all(one.look(now).name == "IDLE" for one in open_ones)

    live.wait_until(all_are_idle, 30)
    for one in open_ones:
        one.since -= FRESH_SECONDS  # they have been so for a while
    fresh = [connect(live)]
    live.wait_until(lambda: sum(one.cycle is None for one in list(open_ones)) == 1, 30)
    fresh.append(connect(live))
    live.wait_until(lambda: sum(one.cycle is None for one in list(open_ones)) == 2, 30)
    for connection in fresh:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert b"200 OK" in ends(connection)
    for connection in idle:
        connection.close()


@contextmanager
def standing_still(live):
    """The server's event loop does nothing inside."""
    stands, goes_on = threading.Event(), threading.Event()

    def stand():
        stands.set()
        goes_on.wait(60)

    live.loop.call_soon_threadsafe(stand)
    stands.wait(60)
    try:
        yield
    finally:
        goes_on.set()


def test_no_client_that_asked_is_closed_however_many_ask_at_once(start, fake_engine):
    live = start(fake_engine, settings={**PATIENT, "max_connections": 16})
    live.client.close()
    with standing_still(live):
        asking = [connect(live, ASKS) for _ in range(60)]
        others = [connect(live, sent) for sent in (b"", b"GET /hea", HEAD + b"content-length: 99\r\n\r\n{") * 20]
    for connection in asking:
        assert b"200 OK" in ends(connection)
    for connection in others:
        connection.close()


def test_time_in_the_system_s_queue_is_time_to_ask(start, fake_engine, monkeypatch):
    """Else a flood of silent connections makes way only as fast as each has had its time after it was accepted."""
    monkeypatch.setattr(acceptor, "FULL_SECONDS", 10**6)  # whoever is not accepted at once is not served at all
    live = start(fake_engine, settings={**PATIENT, "max_connections": 16})
    live.client.close()
    with standing_still(live):
        silent = [connect(live, sent) for sent in (b"", b"GET /hea", HEAD + b"content-length: 99\r\n\r\n{") * 20]
        asking = connect(live, ASKS)
        time.sleep(2 * connections.RESPITE_SECONDS)
    asking.settimeout(10)
    assert b"200 OK" in ends(asking)
    for connection in silent:
        connection.close()


def test_a_request_that_was_not_read_yet_counts_when_places_are_taken(start, fake_engine):
    live = start(fake_engine, settings={**PATIENT, "max_connections": 16})
    live.client.close()
    old = [connect(live) for _ in range(16)]
    for connection in old:
        asks_and_stays(connection)
    for one in live.server.connections:
        one.since -= FRESH_SECONDS
    with standing_still(live):
        new = [connect(live, ASKS) for _ in range(16)]
        for connection in old:
            connection.sendall(ASKS)
    for connection in (*new, *old):
        assert b"200 OK" in ends(connection)


def test_one_address_cannot_hold_all_connections(start, fake_engine):
    limits = {"max_connections": 16, "max_connections_per_address": 4, "trusted_proxies": ["127.0.0.9"]}
    live = start(fake_engine, settings={**PATIENT, **limits, "stall_seconds": 300})
    live.client.close()
    idle = connect(live, address="127.0.0.2")
    asks_and_stays(idle)
    silent = [connect(live) for _ in range(10)]
    time.sleep(2 * connections.RESPITE_SECONDS)
    assert b"200 OK" in ends(connect(live, ASKS)), "what asks for nothing gives way"
    fake_engine.gate.clear()
    body = b'{"model": "base", "prompt": "abc"}'
    asks = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    busy = [connect(live, asks) for _ in range(4)]
    live.wait_until(lambda: sum(one.look(time.monotonic()).name == "ANSWER" for one in open_ones(live)) == 4, 30)
    assert ends(connect(live, ASKS)) == b"", "its address has all that it may"
    assert b"200 OK" in ends(connect(live, ASKS, address="127.0.0.2"))
    proxied = [connect(live, address="127.0.0.9") for _ in range(6)]
    assert b"200 OK" in ends(connect(live, ASKS, address="127.0.0.9"))
    fake_engine.gate.set()
    for connection in busy:
        assert b'"text":"abc"' in ends(connection)
    live.wait_until(lambda: not live.server.connections.places.is_over("at-127.0.0.1"), 30)
    assert b"200 OK" in ends(connect(live, ASKS))
    idle.sendall(ASKS)
    assert b"200 OK" in ends(idle), "other addresses lost nothing"
    for connection in (*silent, *proxied):
        connection.close()
    live.wait_until(lambda: not open_ones(live), 30)
    assert not live.server.connections.places


def open_ones(live):
    return list(live.server.connections)


def test_this_machine_may_hold_any_number_unless_told_otherwise(start, fake_engine):
    live = start(fake_engine, settings={**PATIENT, "max_connections": 32, "max_connections_per_address": 2})
    held = [connect(live) for _ in range(20)]
    for connection in held:
        asks_and_stays(connection)
    live.wait_until(lambda: len(open_ones(live)) >= 20, 30)
    for connection in held:
        connection.close()


def test_who_takes_something_now_and_then_reads(start, fake_engine, monkeypatch):
    monkeypatch.setattr(connections, "SWEEP_SECONDS", 1e6)  # only this test looks
    live = start(fake_engine, settings=PATIENT)
    live.client.get("/health")
    (one,) = open_ones(live)
    limits = live.server.connections.limits
    transport, one.transport = one.transport, SimpleNamespace(unread=9, taken=0)
    now = time.monotonic()
    for _ in range(10):
        now += UNREAD_SECONDS / 2
        one.transport.taken += 1
        assert one.overdue(now, limits) is None and not one.unread_seconds(now)
    assert one.unread_seconds(now + UNREAD_SECONDS) == UNREAD_SECONDS and one.is_unread
    assert one.overdue(now + limits.send, limits) == "the answer was not read", "a byte now and then is too slow"
    one.transport = transport


def test_answers_in_progress_are_not_given_up_for_new_clients(start, fake_engine, calls_of):
    live = start(fake_engine, settings={**PATIENT, "max_connections": 16, "stall_seconds": 300})
    fake_engine.gate.clear()
    body = b'{"model": "base", "prompt": "abc"}'
    head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    submitted = calls_of(live.worker, "submit")
    asking = [connect(live, head + body) for _ in range(12)]
    live.wait_until(lambda: len(submitted) == 12, 30)
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
    (door,) = live.server.acceptors
    for _ in range(1000):
        live.loop.call_soon_threadsafe(door.on_lack, OSError(24, "Too many open files"))
    assert live.client.get("/health").status_code == 200
    assert len([record for record in caplog.records if "accepted" in record.message]) <= 1


def test_requests_behind_an_answer_that_is_not_read_wait(start, make_engine):
    engine = make_engine([f"adapter-{number}" for number in range(300)])  # a page of models is larger than what is read
    live = start(engine, settings=PATIENT)
    asked = []
    call = live.worker.call

    def counted(function):
        if function.__module__ == "chorus.server.api":  # others look after adapters meanwhile
            asked.append(function)
        return call(function)

    live.worker.call = counted
    connection = connect(live, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20, receive_buffer=4096)
    live.wait_until(lambda: asked, 30)
    for _ in range(20):
        assert live.client.get("/health").status_code == 200
        time.sleep(0.01)
    assert len(asked) == 1
    received = b""
    while received.count(b"HTTP/1.1 200 OK") < 20:
        received += connection.recv(1 << 16)
    assert len(asked) == 20
    connection.close()


def test_an_answer_that_lies_in_the_system_counts_as_unread(start, make_engine):
    live = start(make_engine([f"adapter-{number}" for number in range(300)]), settings={**PATIENT, "send_seconds": 0.3})
    connection = connect(live, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", receive_buffer=4096)
    live.wait_until(lambda: len(live.server.connections) == 1, 30)
    live.wait_until(lambda: not len(live.server.connections), 60)
    connection.close()


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
