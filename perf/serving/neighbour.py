"""Answers of one tenant beside a flood of another's prompts: `python -m chorus.perf.serving.neighbour`.

A server of the built-in model is started twice, without and with a target of step time. A tenant asks for answers of
twelve tokens, one after another: alone, and then while clients of another tenant send prompts without a pause. The
table has the median time of an answer, also as a multiple of one alone, and the rate of the flood's prompt tokens. The
goals compare that rate with the one without a target.

Tests: tests/perf/serving/test_neighbour.py
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx

from ..bench.machine import processor
from ..report.command import judge, parser, say
from ..report.table import Goal, Table
from .errors import LoadError
from .server_process import launched

NEIGHBOUR, FLOOD = "key-of-the-neighbour", "key-of-the-flood"
ANSWER_TOKENS = 12
SHORT = 20
"""Tokens of a text, where a request has thousands of them."""

MOST_TIMES, LEAST_RATE = 6.0, 0.85
"""The goals: an answer's time in multiples of one alone, and the flood's rate as a share of that without a target."""

_TEXT = "the quick brown fox jumps over the lazy dog and runs away "
_TIMEOUT = 120.0
RETRY_SECONDS = 0.2


def _text(words: Iterator[str], tokens: int) -> str:
    """A prompt that no other one begins like, so that nothing of it is cached."""
    return f"{next(words)} {_TEXT * (tokens // len(_TEXT) + 1)}"[:tokens]


class Kind(NamedTuple):
    """Requests of a flood. The built-in model has a token for each character."""

    path: str
    field: str
    """Of the body, for the texts."""
    texts: int = 1
    share: float = 1.0
    """Tokens of a text, of those that are asked for; 0: `SHORT`."""
    more: dict[str, Any] = {}

    def make(self, model: str, words: Iterator[str], tokens: int) -> tuple[str, dict[str, Any], int]:
        """Path, body and number of prompt tokens."""
        each = int(tokens * self.share) or SHORT
        texts = [_text(words, each) for _ in range(self.texts)]
        query = {"query": _text(words, SHORT)} if self.path == "/rerank" else {}
        body = {"model": model, **query, self.field: texts if self.texts > 1 else texts[0], **self.more}
        return self.path, body, (self.texts + len(query)) * each


_COMPLETIONS = "/v1/completions", "prompt"

FLOODS = {
    "embeddings": Kind("/v1/embeddings", "input", 16),
    "echo": Kind(*_COMPLETIONS, more={"max_tokens": 1, "echo": True, "logprobs": 1}),
    "prompts": Kind(*_COMPLETIONS, 24, 1 / 2, {"max_tokens": 1}),
    "2048 texts": Kind("/v1/embeddings", "input", 2048, 0.0),
    "rerank": Kind("/rerank", "documents", 2047, 0.0),
    "128 prompts": Kind(*_COMPLETIONS, 128, 1 / 4, {"max_tokens": 1}),
    "n 128": Kind(*_COMPLETIONS, more={"max_tokens": 1, "n": 128}),
}


@dataclass
class Flood:
    """Clients that send requests without a pause."""

    url: str
    make: Callable[[Iterator[str]], tuple[str, dict[str, Any], int]]
    num_tokens: int = 0
    """Prompt tokens of answered requests."""

    error: str = ""
    _words: Iterator[str] = field(default_factory=lambda: map(str, count(10_000)))
    _over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def running(self, clients: int) -> Iterator[None]:
        threads = [threading.Thread(target=self._send) for _ in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _send(self) -> None:
        with client(self.url, FLOOD) as sender:
            is_first = True  # however short the flood is, each client sends a request
            while is_first or not (self._over.is_set() or self.error):
                is_first = False
                with self._lock:
                    path, body, num_tokens = self.make(self._words)
                answer = sender.post(path, json=body)
                if answer.status_code == 429:
                    time.sleep(RETRY_SECONDS)
                with self._lock:
                    if answer.status_code == 200:
                        self.num_tokens += num_tokens
                    elif answer.status_code != 429:  # a queue has room for the texts of two of these clients
                        self.error = answer.text


def client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=_TIMEOUT, headers={"Authorization": f"Bearer {key}"}, trust_env=False)


def answer_seconds(asker: httpx.Client, model: str) -> float:
    """Seconds of one answer. Raises LoadError."""
    body = {
        "model": model,
        "prompt": "hello world\n",
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    began = time.perf_counter()
    answer = asker.post("/v1/completions", json=body)
    if answer.status_code != 200:
        raise LoadError(f"the neighbour's request failed: {answer.text}")
    return time.perf_counter() - began


def measured(url: str, kind: str, seconds: float, clients: int, tokens: int) -> dict[str, float]:
    """Median seconds of an answer alone and beside a flood, and the flood's prompt tokens per second."""
    with client(url, NEIGHBOUR) as asker:
        model = asker.get("/v1/models").json()["data"][0]["id"]
        answer_seconds(asker, model)
        alone = median(answer_seconds(asker, model) for _ in range(30))
        flood, taken = Flood(url, lambda words: FLOODS[kind].make(model, words, tokens)), []
        with flood.running(clients):
            answer_seconds(asker, model)  # by then the flood is there
            began, before = time.perf_counter(), flood.num_tokens
            while time.perf_counter() - began < seconds and not flood.error:
                taken.append(answer_seconds(asker, model))
                time.sleep(0.05)
            rate = (flood.num_tokens - before) / (time.perf_counter() - began)
        if flood.error:
            raise LoadError(f"a request of the flood failed: {flood.error}")
    return {"alone": alone, "beside": median(taken), "rate": rate}


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--kinds", nargs="+", choices=FLOODS, default=list(FLOODS), metavar="NAME")
    command.add_argument("--target-step-ms", default="auto", help="the target that is measured")
    command.add_argument("--seconds", type=float, default=12.0, help="of each flood")
    command.add_argument("--clients", type=int, default=4, help="of a flood")
    command.add_argument("--tokens", type=int, default=400, help="of a prompt of a flood")
    args = command.parse_args(argv)
    found: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in args.kinds}
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"{NEIGHBOUR} neighbour\n{FLOOD} flood\n", encoding="utf-8")
        keys.chmod(0o600)
        try:
            for target in ("0", args.target_step_ms):
                with launched(["--api-key-file", str(keys), "--target-step-ms", target]) as server:
                    for kind in args.kinds:
                        say(f"{kind}, target {target}")
                        found[kind][target] = measured(server.url, kind, args.seconds, args.clients, args.tokens)
        except LoadError as error:
            print(f"neighbour: {error}", file=sys.stderr)
            return 2
    table = Table("answers beside a flood", ["flood", "target", "alone, ms", "beside, ms", "times", "flood's tokens/s"])
    goals = []
    for kind, values in found.items():
        for target, each in values.items():
            times = each["beside"] / each["alone"]
            table.add(kind, target, 1e3 * each["alone"], 1e3 * each["beside"], times, each["rate"])
        last = values[args.target_step_ms]
        goals.append(Goal(f"{kind}: times alone", last["beside"] / last["alone"], MOST_TIMES, at_most=True))
        goals.append(Goal(f"{kind}: rate of the flood", last["rate"] / max(1.0, values["0"]["rate"]), LEAST_RATE))
    table.show()
    return judge({"device": processor(), "floods": found}, goals)


if __name__ == "__main__":
    sys.exit(main())
