"""Tokens a second of the built-in model while neighbours keep the processors busy.

    python -m chorus.perf.chaos.busy

One engine per number of threads, eight requests at once; neighbours are processes that do nothing but count. The bar:
any number of threads is, beside any number of neighbours, at least `--floor` of what one thread is beside as many.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.requests.request import Request
from ...core.requests.sampling_params import SamplingParams
from ...server.demo.builtin import BUILTIN_MODEL

ROWS, PROMPT, ANSWER = 8, 16, 256


@contextmanager
def neighbours(number: int) -> Iterator[None]:
    """So many processes that take all the processor time that they get."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()


class Load:
    """An engine with `ROWS` requests at any time."""

    def __init__(self, model: Path, threads: int) -> None:
        self._engine = Engine.from_config(EngineConfig(model=model, threads=threads, max_num_seqs=ROWS))
        self._names = count()

    def tokens_per_second(self, seconds: float) -> float:
        """Of whole rounds of requests, over at least so many seconds."""
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            for _ in range(ROWS):
                name = next(self._names)
                prompt = [(31 * name + 7 * i) % 200 for i in range(PROMPT)]
                params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
                self._engine.add_request(Request(str(name), prompt, params))
            while self._engine.has_work():
                self._engine.step()
            done += ROWS * ANSWER
        return done / (time.perf_counter() - began)

    def close(self) -> None:
        self._engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m chorus.perf.chaos.busy", description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 16])
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each, of which the median counts")
    parser.add_argument("--floor", type=float, default=0.7, help="the least share of one thread's rate")
    parser.add_argument("--model", type=Path, default=BUILTIN_MODEL)
    args = parser.parse_args()
    loads = {threads: Load(args.model, threads) for threads in args.threads}
    seen: dict[tuple[int, int], list[float]] = {}
    for _ in range(args.rounds):
        for number in args.neighbours:
            with neighbours(number):
                for threads, load in loads.items():
                    seen.setdefault((threads, number), []).append(load.tokens_per_second(args.seconds))
    for load in loads.values():
        load.close()
    rates = {key: median(values) for key, values in seen.items()}
    print("tokens/s, " + ", ".join(f"{number} busy neighbours" for number in args.neighbours))
    for threads in args.threads:
        print(f"{threads:3} threads" + "".join(f"{rates[threads, number]:12.0f}" for number in args.neighbours))
    least = 1.0
    if 1 in args.threads:
        least = min(rates[threads, number] / rates[1, number] for threads, number in rates)
    table = [{"threads": key[0], "neighbours": key[1], "tokens_per_second": rate} for key, rate in rates.items()]
    met = least >= args.floor
    print(json.dumps({"busy": table, "least_of_one_thread": round(least, 3), "floor": args.floor, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
