"""The real thing: `chorus cluster up` with two replicas of the built-in model, asked over HTTP, and one is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

NAMES = (None, "reverse", "upper", "count")
TOKENS = 300


def body(index: int) -> dict[str, object]:
    """A long answer, greedy or drawn, of the base model or of an adapter."""
    model = NAMES[index % len(NAMES)] or "chorus-builtin"
    rest = {"temperature": 0.9, "seed": index} if index % 2 else {"temperature": 0, "logprobs": 1}
    return {
        "model": model, "prompt": f"hello world {index}\n", "max_tokens": TOKENS, "stream": True, "ignore_eos": True,
        "return_token_ids": True, **rest,
    }  # fmt: skip


def read(client: httpx.Client, index: int, began: threading.Semaphore | None = None) -> tuple[list[int], str, str]:
    """Token ids, text and finish reason of a streamed answer; `began` is released at its first token."""
    tokens: list[int] = []
    text, finish = "", ""
    with client.stream("POST", "/v1/completions", json=body(index)) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            (choice,) = event["choices"]
            if not tokens and began is not None:
                began.release()
            tokens += choice["token_ids"]
            text += choice["text"]
            finish = choice["finish_reason"] or finish
    return tokens, text, finish


def test_answers_go_on_as_if_no_replica_had_been_killed(up):
    count = 8
    with ThreadPoolExecutor(count) as threads:
        unbroken = list(threads.map(lambda index: read(up.client, index), range(count)))
        assert all(len(tokens) == TOKENS and finish == "length" for tokens, _, finish in unbroken)
        while up.metric("chorus_requests_moved_total") == 0:  # an answer may end before the signal comes
            up.wait_until(lambda: up.metric("chorus_replicas_up") == 2)
            began = threading.Semaphore(0)
            answers = [threads.submit(read, up.client, index, began) for index in range(count)]
            for _ in range(count // 2):
                began.acquire()
            killed = up.replicas[0]
            os.kill(killed, signal.SIGKILL)
            assert [answer.result() for answer in answers] == unbroken
    assert up.client.get("/health").status_code == 200
    up.wait_until(lambda: up.metric("chorus_replicas_up") == 2)


def test_replicas_are_processes_that_say_what_they_are_in_a_private_directory(up):
    up.wait_until(lambda: len(up.replicas) == 2)
    for pid in up.replicas:
        arguments = (Path("/proc") / str(pid) / "cmdline").read_bytes().decode().split("\0")
        socket = Path(arguments[arguments.index("--socket") + 1])
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        assert not any("secret" in argument and len(argument) == 64 for argument in arguments)
