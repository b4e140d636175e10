"""The end of a server: running requests may end, cut ones are reported, and nothing that hangs keeps the process."""

import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

import chorus

from . import slow_server

pytestmark = pytest.mark.wide

ROOT = Path(chorus.__file__).resolve().parent
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BUSY = 60
"""Seconds that a busy machine may add to anything."""


class Server:
    """A server in a process of its own."""

    def __init__(self, process, url, lines):
        self.process, self.url, self.lines = process, url, lines

    def signal(self, number):
        os.kill(self.process.pid, number)
        return time.monotonic()

    def post(self, **body):
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=2 * BUSY)

    def ended(self):
        self.process.join(2 * BUSY)
        self.reader.join(BUSY)
        assert not any("Traceback" in line for line in self.lines), "".join(self.lines)
        return self.process.exitcode

    def wait_for(self, text):
        deadline = time.monotonic() + BUSY
        while not any(text in line for line in self.lines):
            assert time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.02)


@pytest.fixture(scope="module")
def server():
    """Starts servers, each a fork of a process that has imported their modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([slow_server.__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

        @contextmanager
        def begin(mode, *flags):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=slow_server.run, args=(mode, list(flags), theirs))
            process.start()
            theirs.close()
            with os.fdopen(os.dup(ours.fileno()), encoding="utf-8") as said, ours:
                lines: list[str] = []
                try:
                    for line in said:
                        lines.append(line)
                        if found := re.search(r"listening on (\S+)", line):
                            break
                    else:
                        pytest.fail("".join(lines))
                    made = Server(process, found[1], lines)
                    made.reader = threading.Thread(target=lambda: lines.extend(said), daemon=True)
                    made.reader.start()
                    httpx.get(f"{made.url}/health", timeout=BUSY)
                    yield made
                finally:
                    process.kill()
                    process.join()

        yield begin


def in_background(function):
    found = []

    def run():
        with suppress(httpx.HTTPError):  # a server that ends at once answers nobody
            found.append(function())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(2 * BUSY)
        return found[0]

    return result


def wait_until_running(made, count=1):
    deadline = time.monotonic() + BUSY
    while httpx.get(f"{made.url}/health", timeout=BUSY).json()["stats"]["num_running"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_runs_may_end_and_new_work_is_refused(server, number):
    with server("well", "--grace-seconds", "50") as made:
        long = in_background(lambda: made.post(model="base", prompt="abc", max_tokens=300, ignore_eos=True))
        wait_until_running(made)
        made.signal(number)
        made.wait_for("shutting down")
        refused = made.post(model="base", prompt="abc")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
        health = httpx.get(f"{made.url}/health", timeout=BUSY)
        assert health.status_code == 503 and health.json()["status"] == "draining"
        assert long().json()["usage"]["completion_tokens"] == 300
        assert made.ended() == 0


@pytest.mark.wide
def test_what_is_cut_is_told(server):
    with server("well", "--grace-seconds", "0.5") as made:
        endless = {"model": "base", "prompt": "abc", "max_tokens": 10**6, "ignore_eos": True}
        plain = in_background(lambda: made.post(**endless))
        stream = in_background(lambda: made.post(**endless, stream=True))
        wait_until_running(made, 2)
        made.signal(signal.SIGTERM)
        assert plain().status_code == 503 and plain().json()["error"]["code"] == "engine_unavailable"
        assert stream().status_code == 200 and stream().text.endswith("data: [DONE]\n\n")
        last = json.loads(stream().text.split("\n\n")[-3].removeprefix("data: "))
        assert last["error"]["code"] == "engine_unavailable"
        assert made.ended() == 0


def test_a_second_ctrl_c_ends_at_once(server):
    with server("well", "--grace-seconds", "500") as made:
        in_background(lambda: made.post(model="base", prompt="abc", max_tokens=10**6, ignore_eos=True))
        wait_until_running(made)
        made.signal(signal.SIGINT)
        made.wait_for("shutting down")
        made.signal(signal.SIGINT)
        assert made.ended() == 130


@pytest.mark.wide
def test_slow_clients_do_not_delay_it(server):
    with server("well", "--grace-seconds", "1", "--send-seconds", "500", "--body-seconds", "500") as made:
        host, port = made.url.removeprefix("http://").split(":")
        body = (
            b'{"model": "base", "prompt": "abc", "max_tokens": 1000000, "ignore_eos": true, "stream": true,'
            b'"skip_special_tokens": false}'
        )
        clients = []
        for sent in (
            HEAD + b"content-length: 1000\r\n\r\n{",
            HEAD + b"content-length: %d\r\n\r\n" % len(body) + body,
            b"GET",
        ):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((host, int(port)))
            client.sendall(sent)
            clients.append(client)
        wait_until_running(made)
        began = made.signal(signal.SIGTERM)
        assert made.ended() == 0
        assert time.monotonic() - began < 1 + 5 + BUSY


@pytest.mark.parametrize("mode", ["engine", "pools", "loop"])
def test_nothing_that_hangs_keeps_the_process(server, mode):
    """The engine's thread, every pool's threads, or the event loop itself: the deadline counts from the signal."""
    with server(mode, "--grace-seconds", "1") as made:
        if mode == "engine":
            in_background(lambda: made.post(model="base", prompt="abc"))
            time.sleep(0.5)
        elif mode == "loop":
            made.signal(signal.SIGUSR1)
            made.wait_for("the loop hangs")
        began = made.signal(signal.SIGTERM)
        assert made.ended() == 0
        assert time.monotonic() - began < 1 + 5 + BUSY


@pytest.mark.wide
def test_a_violated_accounting_invariant_ends_the_process_with_an_error(server):
    with server("invariant") as made:
        answer = made.post(model="base", prompt="abc")
        assert answer.json()["choices"][0]["text"] == "abc", "nobody's answer is lost"
        deadline = time.monotonic() + BUSY
        while (health := httpx.get(f"{made.url}/health", timeout=BUSY)).status_code == 200:
            assert time.monotonic() < deadline
        assert "invariant" in health.json()["reason"]
        assert made.post(model="base", prompt="abc").status_code == 503
        assert made.ended() == 1
