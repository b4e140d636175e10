"""Tokens a second of the built-in model while neighbours keep the processors busy.

    python -m tests.attacks.busy

One engine per number of threads, eight requests at once. Neighbours are processes that only count. The bar: with any
number of neighbours, any number of threads reaches at least `--floor` of the speed of one thread.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from statistics import median

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.perf.report.command import judge, parser
from chorus.perf.report.table import Goal, Table
from chorus.server.demo.builtin import BUILTIN_MODEL

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

    def __init__(self, threads: int) -> None:
        self.engine = Engine.from_config(EngineConfig(model=BUILTIN_MODEL, threads=threads, max_num_seqs=ROWS))
        self._names = count()

    def tokens_per_second(self, seconds: float) -> float:
        """Of whole rounds of requests, over at least so many seconds."""
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            for _ in range(ROWS):
                name = next(self._names)
                prompt = [(31 * name + 7 * i) % 200 for i in range(PROMPT)]
                params = RequestParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
                self.engine.add_request(Request(str(name), prompt, params))
            while self.engine.has_work():
                self.engine.step()
            done += ROWS * ANSWER
        return done / (time.perf_counter() - began)


def main() -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--threads", type=int, nargs="+", default=[1, 2, 16], help="beside one thread")
    command.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    command.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    command.add_argument("--rounds", type=int, default=3, help="measurements of each, of which the median counts")
    command.add_argument("--floor", type=float, default=0.7, help="the least share of one thread's rate")
    args = command.parse_args()
    loads = {threads: Load(threads) for threads in sorted({1, *args.threads})}
    seen: dict[tuple[int, int], list[float]] = {}
    for _ in range(args.rounds):
        for number in args.neighbours:
            with neighbours(number):
                for threads, load in loads.items():
                    seen.setdefault((threads, number), []).append(load.tokens_per_second(args.seconds))
    for load in loads.values():
        load.engine.close()
    rates = {key: median(values) for key, values in seen.items()}
    table = Table("tokens/s", ["threads", *(f"{number} busy neighbours" for number in args.neighbours)])
    for threads in loads:
        table.add(threads, *(rates[threads, number] for number in args.neighbours))
    table.show()
    least = min(rate / rates[1, number] for (_, number), rate in rates.items())
    rows = [{"threads": key[0], "neighbours": key[1], "tokens_per_second": rate} for key, rate in rates.items()]
    result = {"busy": rows, "least_of_one_thread": round(least, 3), "floor": args.floor}
    return judge(result, [Goal("least share of one thread's rate", least, args.floor)])


if __name__ == "__main__":
    sys.exit(main())
