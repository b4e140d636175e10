"""Ambiguous grammars next to a neighbour: `python -m tests.attacks.ambiguous`.

A server with the built-in model. A neighbour sends short requests without a grammar, one after another: alone, then
with others that use a plain grammar, then with as many whose recursive grammars are ambiguous. The bar: in the last
case, the neighbour's median is at most `--most` times its median alone.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import median

import httpx

from chorus.perf.report.command import judge, parser
from chorus.perf.report.table import Goal
from chorus.perf.serving.server_process import launched

from .attacked_server import Address, ask

AMBIGUOUS = (
    's: s s s | s s | "a" | ""',
    's: s s | "a"',
    's: s s s | s s | "a" | "aa" | "aaa"',
    's: s s | s s s | s s s s | /[a-z]+/ | /[a-z0-9]+/ | "a" |',
)
"""Rules of less than 60 bytes, of grammars whose `start` is `s`."""
PLAIN = ("s: /[a-z]*/",)


@contextmanager
def company(address: Address, number: int, rules: Sequence[str]) -> Iterator[None]:
    """So many requests with grammars of these rules at any time."""
    over = threading.Event()

    def ask_on(index: int) -> None:
        for turn in itertools.count(index):
            body = {
                "prompt": f"a{turn}",
                "max_tokens": 400,
                "ignore_eos": True,
                "temperature": 1.0,
                "grammar": f"start: s\n{rules[turn % len(rules)]}",
            }
            with suppress(OSError), ask(address, "/v1/completions", json.dumps(body).encode()) as connection:
                while not over.is_set() and connection.recv(1 << 16):
                    pass
            if over.is_set():
                return

    threads = [threading.Thread(target=ask_on, args=(index,), daemon=True) for index in range(number)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)  # until their texts are long
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def latencies(url: str, requests: int, tokens: int) -> list[float]:
    """Seconds of a neighbour's requests, one after another."""
    body = {"prompt": "neighbour", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    taken = []
    with httpx.Client(base_url=url, timeout=120.0, trust_env=False) as http:
        for _ in range(requests):
            began = time.perf_counter()
            http.post("/v1/completions", json=body).raise_for_status()
            taken.append(time.perf_counter() - began)
    return taken


def main() -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--others", type=int, default=16, help="requests with grammars")
    command.add_argument("--requests", type=int, default=40, help="of the neighbour, alone and beside them")
    command.add_argument("--tokens", type=int, default=8, help="of each of the neighbour's answers")
    command.add_argument("--most", type=float, default=8.0, help="times as long as alone")
    args = command.parse_args()
    with launched(["--threads", "1"]) as server:
        latencies(server.url, 5, args.tokens)
        alone = latencies(server.url, args.requests, args.tokens)
        with company(server.address, args.others, PLAIN):
            plain = latencies(server.url, args.requests, args.tokens)
        with company(server.address, args.others, AMBIGUOUS):
            beside = latencies(server.url, args.requests, args.tokens)
    times = median(beside) / median(alone)
    result = {
        "alone_ms": 1e3 * median(alone),
        "plain_ms": 1e3 * median(plain),
        "beside_ms": 1e3 * median(beside),
        "worst_ms": 1e3 * max(beside),
    }
    return judge(result, [Goal("neighbour's median, times that alone", times, args.most, at_most=True)])


if __name__ == "__main__":
    sys.exit(main())
