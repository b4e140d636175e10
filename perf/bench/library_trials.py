"""Libraries in the place of code of ours, on the same inputs: `python -m chorus.perf.bench.library_trials`.

`patterns`: google-re2 for the matcher of module names; `pip install google-re2` first. `text`: the stream of tokenizers
for the detokenizer. `http`: uvicorn's own protocol for ours, with the same app. Each trial measures both on ordinary
inputs, and then shows which hostile or difficult inputs each of them handles. docs/decisions/ has what was decided.

Tests: tests/perf/bench/test_library_trials.py
"""

from __future__ import annotations

import math
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import import_module
from typing import Any

import uvicorn
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from ...memory.files.names.module_names import ModuleNames
from ...memory.files.names.name_pattern import NamePattern, Steps
from ...server.demo.builtin import BUILTIN_MODEL
from ...server.settings import Settings
from ...server.start.launch import build_app, serving
from ...server.text.tokenizer import Tokenizer
from ..report.command import conclude, parser, say
from ..report.table import Table
from .machine import processor

NAMES = [
    f"model.layers.{layer}.{part}"
    for layer in range(64)
    for part in (*(f"self_attn.{one}_proj" for one in "qkvo"), *(f"mlp.{one}_proj" for one in ("gate", "up", "down")))
]

PATTERNS = {
    "names": r".*\.(q_proj|v_proj)",
    "layers": r"model\.layers\.([0-9]|1[0-5])\.self_attn\.[qkvo]_proj",
    "ms-swift's look-ahead": r"^(?=.*\.self_attn)(?!.*\.k_proj).*_proj$",
    "nested repeats": r"(.*a){20}(.*b){20}(.*c){20}",
    "repeats of repeats": r"((((a{0,30}){0,30}){0,30}.?){0,30}.*)*x",
    "many alternatives": "|".join(f".*{number}.*{number + 1}.*x" for number in range(100)),
}
"""Patterns of adapter files: three of trainers, three hostile ones."""


def patterns() -> dict[str, dict[str, dict[str, Any]]]:
    """For each pattern and matcher: milliseconds and the number of matching names, or why it was refused."""
    _names()
    matchers: dict[str, Callable[[str], int]] = {"ours": _ours, "re": _with(re)}
    with suppress(ImportError):
        matchers["re2"] = _with(import_module("re2"))
    return {
        kind: {name: _tried(match, pattern) for name, match in matchers.items() if name != "re" or number < 3}
        for number, (kind, pattern) in enumerate(PATTERNS.items())
    }


def _ours(pattern: str) -> int:
    return NamePattern(pattern, ValueError, Steps()).whole(_names()).bit_count()


@lru_cache(1)
def _names() -> ModuleNames:
    """Made once for a model."""
    return ModuleNames(NAMES)


def _with(module: Any) -> Callable[[str], int]:
    def match(pattern: str) -> int:
        compiled = module.compile(pattern)
        return sum(compiled.fullmatch(name) is not None for name in NAMES)

    return match


def _tried(match: Callable[[str], int], pattern: str) -> dict[str, Any]:
    least, found = math.inf, None
    for _ in range(3):
        began = time.perf_counter()
        try:
            found = match(pattern)
        except Exception as error:
            found = f"refused: {str(error).split(':')[-1].strip()[:60] or type(error).__name__}"
        least = min(least, time.perf_counter() - began)
    return {"ms": 1e3 * least, "found": found}


def text(count: int = 20_000, seed: int = 0) -> dict[str, dict[str, Any]]:
    """For each detokenizer: µs per token of text, and for random tokens whether its pieces make up the whole text."""
    tokenizer = Tokenizer.load(BUILTIN_MODEL)
    backend = Backend.from_file(str(BUILTIN_MODEL / "tokenizer.json"))
    words = "the quick brown fox jumps over the lazy dog; naïve café, 你好, 😀 and so on. "
    ids = tokenizer.encode_now([words * (count // len(words) + 1)], add_special_tokens=False)[0][:count]

    def ours(tokens: Sequence[int]) -> str:
        stream = tokenizer.text_stream([])
        return "".join([*map(stream.push, tokens), stream.finish()])

    def theirs(tokens: Sequence[int]) -> str:
        stream = DecodeStream(skip_special_tokens=True)
        return "".join(stream.step(backend, token) or "" for token in tokens)

    chance = random.Random(seed)
    size = backend.get_vocab_size()
    mixed = [[chance.randrange(size) for _ in range(30)] for _ in range(300)]
    found = {}
    for name, decode in (("ours", ours), ("DecodeStream", theirs)):
        began = time.perf_counter()
        decode(ids)
        seconds = time.perf_counter() - began
        wrong = cut = 0
        for tokens in mixed:
            whole, made = tokenizer.decode(tokens, skip_special_tokens=True), decode(tokens)
            wrong += not whole.startswith(made)
            cut += made != whole and whole.startswith(made)
        found[name] = {"us_per_token": 1e6 * seconds / count, "wrong": wrong, "cut": cut, "of": len(mixed)}
    return found


_HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"

ATTACKS = {
    "a head that never ends": (_HEAD, b""),
    "a head of 1 MB": (_HEAD + b"X: " + b"a" * (1 << 20) + b"\r\n\r\n", b" 431 "),
    "a thousand headers": (_HEAD + b"".join(b"X%d: a\r\n" % number for number in range(1000)) + b"\r\n", b" 431 "),
    "two hosts": (_HEAD + b"Host: other\r\n\r\n", b" 400 "),
    "a body that never comes": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{",
        b" 408 ",
    ),
}
"""What is sent, and the status of the answer after which the connection must close; none: it must just close."""

PATIENCE = 4.0
"""Seconds after which a connection counts as held."""


def http(requests: int = 2000) -> dict[str, dict[str, Any]]:
    """For each protocol: requests per second of one connection, and what it did with each attack."""
    limits = Settings(head_seconds=1.0, body_seconds=1.0, whole_body_seconds=2.0)
    found = {}
    for name, server in (("ours", _ours_served), ("uvicorn", _plainly_served)):
        with server(limits) as port:
            _rate(port, 100)
            found[name] = {
                "requests_per_second": _rate(port, requests),
                "attacks": {attack: _attacked(port, *sent) for attack, sent in ATTACKS.items()},
            }
    return found


@contextmanager
def _ours_served(settings: Settings) -> Iterator[int]:
    with serving(build_app(settings), settings) as url:
        yield int(url.rpartition(":")[2])


@contextmanager
def _plainly_served(settings: Settings) -> Iterator[int]:
    config = uvicorn.Config(
        build_app(settings),
        port=0,
        http="httptools",
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        timeout_keep_alive=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)


def _rate(port: int, count: int) -> float:
    with socket.create_connection(("127.0.0.1", port)) as client:
        began = time.perf_counter()
        for _ in range(count):
            client.sendall(_HEAD + b"\r\n")
            received = client.recv(1 << 16)
            while b"\r\n\r\n" not in received:
                received += client.recv(1 << 16)
        return count / (time.perf_counter() - began)


def _attacked(port: int, sent: bytes, status: bytes) -> str:
    """What the server did: `closed`, `refused` with the status, `answered` otherwise, or `held` the connection."""
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(PATIENCE)
        received = b""
        try:
            client.sendall(sent)
            while part := client.recv(1 << 16):
                received += part
        except TimeoutError:
            return "answered" if received else "held"
        except ConnectionError:
            pass
    line = received.partition(b"\r\n")[0]
    if not line:
        return "closed"
    return "refused" if status and status in line + b" " else "answered"


TRIALS: dict[str, Callable[[], dict[str, Any]]] = {"patterns": patterns, "text": text, "http": http}


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--trials", nargs="+", choices=TRIALS, default=list(TRIALS), metavar="NAME")
    args = command.parse_args(argv)
    found: dict[str, Any] = {}
    for name in args.trials:
        say(f"{name} …")
        found[name] = TRIALS[name]()
        _table(name, found[name]).show()
    return conclude({"device": processor(), **found}, True)


def _table(name: str, found: dict[str, Any]) -> Table:
    if name == "patterns":
        table = Table("module names", ["pattern", "matcher", "ms", "names that match"])
        for kind, each in found.items():
            for matcher, one in each.items():
                table.add(kind, matcher, one["ms"], str(one["found"]))
        return table
    if name == "text":
        table = Table("text of tokens", ["detokenizer", "us per token", "wrong", "cut short", "random streams"])
        for kind, one in found.items():
            table.add(kind, one["us_per_token"], one["wrong"], one["cut"], one["of"])
        return table
    table = Table("HTTP", ["protocol", "requests per second", *ATTACKS])
    for kind, one in found.items():
        table.add(kind, one["requests_per_second"], *one["attacks"].values())
    return table


if __name__ == "__main__":
    sys.exit(main())
