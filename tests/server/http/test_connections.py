"""Connections that are too many, too slow, or not read, and their effect on others."""

import errno
import json
import logging
import os
import re
import signal
import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from chorus.server.http.connections import Connections
from chorus.server.http.protocol import MAX_HEADERS, MAX_IGNORED_BYTES, MAX_PIPELINED, HttpConnection
from chorus.server.start.launch import RESERVED_DESCRIPTORS, max_connections

pytestmark = pytest.mark.wide

HURRIED = {"head_seconds": 0.3, "body_seconds": 0.3, "whole_body_seconds": 0.6, "send_seconds": 0.3, "idle_seconds": 1}
PATIENT = {
    "head_seconds": 300,
    "body_seconds": 300,
    "whole_body_seconds": 300,
    "send_seconds": 300,
    "idle_seconds": 300,
}
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
    """Reads until the server closes; returns the bytes."""
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
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    head, _, body = received.partition(b"\r\n\r\n")
    (length,) = re.findall(rb"content-length: (\d+)", head.lower())
    while len(body) < int(length):
        body += connection.recv(1 << 16)
    assert b"200 OK" in head


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: localhost\r\n"],
)
def test_what_does_not_come_in_time_is_cut(start, fake_engine, sent):
    live = start(fake_engine, settings=HURRIED)
    assert ends(connect(live, sent)) == b""


@pytest.mark.wide
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


@pytest.mark.wide
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


@pytest.mark.wide
def test_who_reads_slowly_is_not_cut(start, make_engine):
    engine = make_engine(["alice"], max_model_len=1 << 20)
    live = start(engine, settings={**HURRIED, "send_seconds": 60})
    body = (
        b'{"model": "base", "prompt": "a", "max_tokens": 8000, "ignore_eos": true, "stream": true,'
        b'"skip_special_tokens": false}'
    )
    head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    connection = connect(live, head + body, receive_buffer=4096)
    time.sleep(1)
    received = ends(connection)
    assert received.rstrip().endswith(b"0") and b"data: [DONE]" in received


def test_this_machine_may_hold_any_number_unless_told_otherwise(start, fake_engine):
    live = start(fake_engine, settings={**PATIENT, "max_connections": 32, "max_connections_per_address": 2})
    held = [connect(live) for _ in range(20)]
    for connection in held:
        asks_and_stays(connection)
    live.wait_until(lambda: open_ones(live) >= 20, 30)
    for connection in held:
        connection.close()


def test_the_limit_leaves_descriptors_for_all_else(monkeypatch):
    import resource

    in_use = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    assert 1024 - RESERVED_DESCRIPTORS - in_use - 4 <= max_connections() <= 1024 - RESERVED_DESCRIPTORS
    assert max_connections(50) == 50 and max_connections(5000) == max_connections()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    assert max_connections() == 16


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


def body_of(**fields):
    body = json.dumps({"model": "base", **fields}).encode()
    return HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def open_ones(live):
    return len(live.server.connections)


def test_a_body_may_pause_but_not_for_long(start, fake_engine):
    """Each part of a body has its time, however many bytes came before; a steady one is served."""
    live = start(fake_engine, settings={**PATIENT, "body_seconds": 5})
    asks = body_of(prompt="abc")
    connection = connect(live)
    for at in range(0, len(asks), 40):
        connection.sendall(asks[at : at + 40])
        time.sleep(0.02)
    assert b'"text":"abc"' in ends(connection)
    hurried = start(fake_engine, settings={**PATIENT, "body_seconds": 0.3})
    late = ends(connect(hurried, HEAD + b"content-length: 900000\r\n\r\n" + b" " * 500_000))
    assert late.startswith(b"HTTP/1.1 408 ") and b'"code":"body_timed_out"' in late
    assert b"raise these settings" in late


@pytest.mark.wide
def test_a_large_body_has_time_by_its_size(start, fake_engine):
    """As long as it comes at the least rate; one that is slower is told so."""
    least = {"whole_body_seconds": 0.5, "body_bytes_per_second": 1000}
    live = start(fake_engine, settings={**PATIENT, **least})
    asks = body_of(prompt="abc", user="x" * 20_000)
    connection = connect(live)
    for at in range(0, len(asks), 1000):
        connection.sendall(asks[at : at + 1000])
        time.sleep(0.1)  # 2 s, which its 20 KB may take
    assert b'"text":"abc"' in ends(connection)
    connection = connect(live, HEAD + b"content-length: 900000\r\n\r\n")
    began, received = time.monotonic(), b""
    connection.settimeout(0.05)
    while not received and time.monotonic() - began < 60:
        connection.sendall(b" ")
        with suppress(TimeoutError):
            received = connection.recv(1 << 16)
    assert received.startswith(b"HTTP/1.1 408 ")
    live.wait_until(lambda: live.app.state.gate.bodies.total == 0)


def test_a_new_client_takes_the_place_of_the_one_waited_for_longest(start, fake_engine):
    live = start(fake_engine, settings={**PATIENT, "max_connections": 16})
    waiting = [b"GET /hea", HEAD + b"content-length: 99\r\n\r\n{", b""]  # a silent connection is accepted later
    silent = [connect(live, waiting[number % 3]) for number in range(60)]
    assert live.client.get("/health").status_code == 200
    assert open_ones(live) <= 16
    assert ends(silent[0]) == b""
    for connection in silent[1:]:
        connection.close()


def test_a_connection_with_a_request_in_progress_is_never_closed_for_another(start, fake_engine, calls_of):
    live = start(fake_engine, settings={**PATIENT, "max_connections": 16, "stall_seconds": 300})
    fake_engine.gate.clear()
    submitted = calls_of(live.worker, "submit")
    asking = [connect(live, body_of(prompt="abc")) for _ in range(6)]
    live.wait_until(lambda: len(submitted) == 6, 30)
    silent = [connect(live) for _ in range(40)]
    assert live.client.get("/health").status_code == 200
    fake_engine.gate.set()
    for connection in asking:
        assert b'"text":"abc"' in ends(connection)
    for connection in silent:
        connection.close()


def test_one_address_cannot_hold_all_connections(start, fake_engine, calls_of):
    limits = {"max_connections": 32, "max_connections_per_address": 4, "trusted_proxies": ["127.0.0.9"]}
    live = start(fake_engine, settings={**PATIENT, **limits, "stall_seconds": 300})
    live.client.close()
    idle = connect(live, address="127.0.0.2")
    asks_and_stays(idle)
    silent = [connect(live) for _ in range(10)]
    assert b"200 OK" in ends(connect(live, ASKS)), "the one waited for longest gives way"
    fake_engine.gate.clear()
    submitted = calls_of(live.worker, "submit")
    busy = []
    for _ in range(4):
        busy.append(connect(live, body_of(prompt="abc")))
        live.wait_until(lambda: len(submitted) == len(busy), 30)
    assert ends(connect(live, ASKS)) == b"", "its address has all that it may"
    assert b"200 OK" in ends(connect(live, ASKS, address="127.0.0.2"))
    proxied = [connect(live, address="127.0.0.9") for _ in range(6)]
    assert b"200 OK" in ends(connect(live, ASKS, address="127.0.0.9"))
    fake_engine.gate.set()
    for connection in busy:
        assert b'"text":"abc"' in ends(connection)
    live.wait_until(lambda: not live.server.connections.limiter.is_over("at-127.0.0.1"), 30)
    assert b"200 OK" in ends(connect(live, ASKS))
    idle.sendall(ASKS)
    assert b"200 OK" in ends(idle), "other addresses lost nothing"
    for connection in (*silent, *proxied):
        connection.close()
    live.wait_until(lambda: not open_ones(live), 30)
    assert not live.server.connections.limiter


def test_a_tenant_leaves_room_for_requests_of_others(start, fake_engine, calls_of):
    """One address took all places of the server; now as many stay free as it has."""
    live = start(fake_engine, settings={**PATIENT, "max_connections": 64, "stall_seconds": 300})
    fake_engine.gate.clear()
    submitted = calls_of(live.worker, "submit")
    busy = [connect(live, body_of(prompt="abc")) for _ in range(24)]  # half of the 48 requests it takes
    live.wait_until(lambda: len(submitted) == 24, 30)
    refused = live.post(model="base", prompt="abc")
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "overloaded"
    assert "retry-after" in refused.headers
    others = [connect(live, body_of(prompt="abc"), address="127.0.0.2") for _ in range(8)]
    live.wait_until(lambda: len(submitted) == 32, 30)
    fake_engine.gate.set()
    for connection in (*busy, *others):
        assert b'"text":"abc"' in ends(connection)


def test_a_tenant_leaves_room_for_the_bodies_of_others(start, fake_engine):
    bounds = {"max_connections": 64, "max_held_body_bytes": 800_000}
    live = start(fake_engine, max_body_bytes=400_000, settings={**PATIENT, **bounds})
    part = HEAD + b"content-length: 300000\r\n\r\n" + b" " * 200_000
    held = [connect(live, part) for _ in range(2)]
    bodies = live.server.gate.bodies
    live.wait_until(lambda: bodies.total == 400_000, 30)
    refused = ends(connect(live, part + b" " * 100_000 + b"x"))
    assert b" 429 " in refused and b'"overloaded"' in refused
    other = connect(live, part, address="127.0.0.2")
    live.wait_until(lambda: bodies.total == 600_000, 30)
    for connection in (*held, other):
        connection.close()
    live.wait_until(lambda: not bodies.total, 30)


def test_a_body_in_bytewise_chunks_is_handed_on_in_large_parts(start, fake_engine, monkeypatch):
    """A call into Python for each chunk made a megabyte of them cost seconds."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    parts = []
    plain = HttpToolsProtocol.on_body
    monkeypatch.setattr(
        HttpToolsProtocol, "on_body", lambda self, body: (parts.append(len(body)), plain(self, body))[1]
    )
    live = start(fake_engine)
    body = json.dumps({"model": "base", "prompt": "abc", "user": "u" * 20_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    received = ends(connect(live, HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + chunks))
    assert b'"text":"abc"' in received
    assert sum(parts) == len(body) and len(parts) < 500


GET = b"GET /ping HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"content-length: 2\r\n\r\n{}",
        b"content-length: 00000000000002\r\n\r\n{}",
        b"content-length: %d\r\n\r\n%s" % (MAX_IGNORED_BYTES, b"x" * MAX_IGNORED_BYTES),
        b"transfer-encoding: chunked\r\n\r\n" + b"2\r\n{}\r\n" * 99 + b"0\r\n\r\n",
    ],
    ids=["short", "zeros", "longest", "chunked"],
)
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_the_body_of_a_get_is_read_and_ignored(start, fake_engine, method, sent):
    """The request after it is found, even if the body looks like one."""
    live = start(fake_engine, settings=HURRIED)
    request = GET.replace(b"GET", method) + sent.replace(b"{}", b"{}" if method == b"HEAD" else b"GE")
    received = ends(connect(live, request + ASKS))
    assert received.count(b"HTTP/1.1 200 ") == 2, received[:500]
    assert b"HTTP/1.1 4" not in received


def test_a_get_is_answered_before_its_body_has_come(start, fake_engine):
    live = start(fake_engine, settings=PATIENT)
    connection = connect(live, GET + b"content-length: 5\r\n\r\n{}")
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    connection.sendall(b"   " + ASKS)
    assert b"HTTP/1.1 200 " in ends(connection)


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (b"content-length: %d\r\n\r\n" % (MAX_IGNORED_BYTES + 1), [413]),
        (b"content-length: 99999999999999999999999999\r\n\r\n", [400]),
        # the response may be complete before the body is found to be too long
        (b"transfer-encoding: chunked\r\n\r\n" + b"1000\r\n%s\r\n" % (b"x" * 4096) * 40, [200, 413]),
    ],
    ids=["sized", "beyond numbers", "chunked"],
)
def test_a_large_body_of_a_get_is_refused(start, fake_engine, sent, statuses):
    live = start(fake_engine, settings=HURRIED)
    received = ends(connect(live, GET + sent + ASKS))
    (status,) = re.findall(rb"HTTP/1.1 (\d+) ", received)
    assert int(status) in statuses


def test_a_slow_body_of_a_get_is_cut(start, fake_engine):
    live = start(fake_engine, settings=HURRIED)
    began = time.monotonic()
    ends(connect(live, GET + b"content-length: 5\r\n\r\n{"))
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /ping HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * MAX_HEADERS + b"\r\n", 431),
        (b"GET /ping HTTP/1.1\r\nhost: localhost\r\nhost: other\r\n\r\n", 400),
        (b"GET /ping HTTP/1.1\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 300_000, 431),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx: " + b"x" * 300_000, 431),
        (HEAD + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n", 400),
    ],
    ids=["many headers", "two hosts", "no host", "endless extension", "endless trailer", "two lengths"],
)
def test_what_the_parser_lets_through_is_bounded(start, fake_engine, sent, status):
    answer = ends(connect(start(fake_engine, settings=HURRIED), sent))
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:300]


def test_a_reset_behind_invalid_http_is_no_error_of_the_server(start, fake_engine, monkeypatch, caplog):
    """Closing the connection then raises: asyncio logged 45 lines for each."""
    answered, gone = threading.Event(), threading.Event()
    close = HttpConnection._read_no_more  # noqa: SLF001

    def close_late(connection):
        answered.set()
        assert gone.wait(60)
        close(connection)

    monkeypatch.setattr(HttpConnection, "_read_no_more", close_late)
    live = start(fake_engine)
    connection = connect(live, b"no HTTP\r\n\r\n")
    assert answered.wait(60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    gone.set()
    assert ends(connect(live, ASKS)).startswith(b"HTTP/1.1 200")
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


def test_a_trailer_is_no_header(start, fake_engine):
    live = start(fake_engine, settings={"api_key": ["sk-a-long-key"]})
    head = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    assert b" 401 " in ends(connect(live, head + b"2\r\n{}\r\n0\r\nauthorization: Bearer sk-a-long-key\r\n\r\n"))


def test_requests_sent_at_once_are_answered_in_order(start, fake_engine):
    live = start(fake_engine)
    paths = [b"/version", b"/health"] * (MAX_PIPELINED // 2)
    asks = b"".join(b"GET %s HTTP/1.1\r\nhost: localhost\r\n\r\n" % path for path in paths)
    received = ends(connect(live, asks + b"GET /ping HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"))
    found = [b"version" in answer for answer in received.split(b"HTTP/1.1 200 OK")[1:]]
    assert found == [True, False] * (MAX_PIPELINED // 2) + [False], "the last one waits to be read"


@pytest.mark.parametrize("pieces", [1, 3])
def test_more_requests_than_wait_at_once_are_read_as_places_become_free(start, fake_engine, pieces):
    live = start(fake_engine)
    body = json.dumps({"prompt": "a", "model": "base", "max_tokens": 2}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    post += b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    get = b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    last = get.replace(b"Host", b"Connection: close\r\nHost")
    sent = (post + get) * (5 * MAX_PIPELINED) + last
    with connect(live) as connection:
        size = -(-len(sent) // pieces)
        for begin in range(0, len(sent), size):
            connection.sendall(sent[begin : begin + size])
        found = b"".join(iter(lambda: connection.recv(65536), b""))
    assert found.count(b"HTTP/1.1 200 OK") == 10 * MAX_PIPELINED + 1, found[-500:]
    kinds = [b"text_completion" in one for one in found.split(b"HTTP/1.1 200 OK")[1:]]
    assert kinds == [True, False] * (5 * MAX_PIPELINED) + [False], "in their order"


def test_all_requests_of_a_client_that_leaves_end(start, fake_engine):
    live = start(fake_engine, settings={"stall_seconds": 300})
    fake_engine.gate.clear()
    connection = connect(live, body_of(prompt="abc").replace(b"connection: close\r\n", b""))
    live.wait_until(lambda: fake_engine.running or fake_engine.asked, 30)
    connection.close()
    fake_engine.gate.set()
    live.wait_until(lambda: not live.server.gate.active, 30)


def test_an_answer_that_lies_in_the_system_is_unread(start, make_engine):
    live = start(make_engine([f"adapter-{number}" for number in range(300)]), settings={**PATIENT, "send_seconds": 0.3})
    connection = connect(live, b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", receive_buffer=4096)
    live.wait_until(lambda: open_ones(live) == 1, 30)
    live.wait_until(lambda: not open_ones(live), 60)
    connection.close()


def test_a_lack_of_descriptors_closes_the_one_waited_for_longest(start, fake_engine, caplog, monkeypatch):
    live = start(fake_engine, settings=PATIENT)
    old = connect(live, b"GET /hea")
    live.wait_until(lambda: open_ones(live) == 1, 30)
    new = connect(live)
    asks_and_stays(new)
    accept, lacks = socket.socket.accept, [True]

    def lacking(listener):
        if lacks:
            raise OSError(lacks.pop() and errno.EMFILE, "too many")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", lacking)
    assert b" 200 OK" in ends(connect(live, ASKS))
    assert not lacks and ends(old) == b""
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    new.close()


def test_a_new_client_is_served_before_a_flood_that_waits_to_be_begun(start, fake_engine, monkeypatch):
    """Whole requests come first, the shortest and newest of them; parts of one come after them."""
    live = start(fake_engine, settings=PATIENT)
    live.client.close()
    order = []
    begin = Connections.begin

    def begun(connections, accepted, connection):
        order.append(bytes(accepted.data))
        begin(connections, accepted, connection)

    monkeypatch.setattr(Connections, "begin", begun)
    part, long = HEAD + b"content-length: 9\r\n\r\n{", body_of(prompt="abc" * 50)
    with standing_still(live):
        flood = [connect(live, sent) for sent in [part, b"", long, b"GET /health HTTP/1.1\r\nhost", ASKS * 3] * 20]
        asking = connect(live, ASKS)
    assert b" 200 OK" in ends(asking)
    live.wait_until(lambda: len(order) == 61, 30)  # a connection without a head is not begun
    assert order[0] == ASKS and order[1:21] == [long] * 20
    assert order.count(part) == order.count(ASKS * 3) == 20
    for connection in flood:
        connection.close()


def test_the_rest_of_a_body_that_has_its_answer_may_take_as_long_as_a_head(start, fake_engine):
    live = start(fake_engine, settings={**PATIENT, "head_seconds": 0.3})
    connection = connect(live, HEAD.replace(b"/v1/completions", b"/nowhere") + b"content-length: 100\r\n\r\n{")
    assert b" 404 " in ends(connection)


def test_what_was_accepted_before_a_signal_is_answered(start, fake_engine):
    """Each of many requests that lie unread when the server is told to end is read, and told that it drains."""
    live = start(fake_engine)
    live.client.close()
    with standing_still(live):
        asking = [connect(live, body_of(prompt="abc")) for _ in range(100)]
        live.server.handle_exit(signal.SIGTERM, None)
    for connection in asking:
        answer = ends(connection)
        assert b" 503 " in answer and b'"code":"draining"' in answer
