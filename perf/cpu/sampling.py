"""Cost of drawing tokens: decode rates of one engine with each way of sampling, over its rate with greedy.

    python -m chorus.perf.cpu.sampling [--vocab 32000 152000] [--requests 8] [--threads 2] [--rounds 60]

A random model of SmolLM2-135M's shapes but for the vocabulary. Steps of each way alternate with greedy ones (A B B A)
of the same requests, and its ratio is the median over rounds. `mixed`: the others of the requests are greedy; what is
compared is the rate at which they go on. `--grammar` measures one way alone: every request's answer matches a JSON
schema, and its steps alternate with steps of a second engine, which samples alike without one. Exits with 1 when a
ratio is below its bar. Needs a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.requests.grammar import Grammar
from ...core.requests.request import Request
from ...core.requests.sampling_params import SamplingParams
from ..report.command import conclude, parser
from .random_model import checkpoint
from .workload import Geometry, Workload

GREEDY: dict[str, Any] = {"temperature": 0.0}

#: An answer that goes on as long as it is measured, and the least share of the rate without a grammar.
SCHEMA = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "kind": {"enum": ["one", "two"]}},
        "required": ["name", "size", "kind"],
        "additionalProperties": False,
    },
}
GRAMMAR_BAR = 1 / 1.1

#: Of each way its parameters, how many of the requests use it (0: all), and the least share of greedy's rate.
WAYS: dict[str, tuple[dict[str, Any], int, float]] = {
    "temperature 1": ({"temperature": 1.0}, 0, 0.95),
    "top_p 0.9": ({"temperature": 1.0, "top_p": 0.9}, 0, 0.85),
    "top_k 50": ({"temperature": 1.0, "top_k": 50}, 0, 0.85),
    "min_p 0.05": ({"temperature": 1.0, "min_p": 0.05}, 0, 0.85),
    "hot top_p 0.9": ({"temperature": 2.0, "top_p": 0.9}, 0, 0.0),
    "penalties": (
        {"temperature": 1.0, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}, 0, 0.8,
    ),
    "20 logprobs": ({"temperature": 0.0, "logprobs": 20}, 0, 0.8),
    "1,024 bad words": (
        {"temperature": 0.0, "bad_words": tuple((token, token + 1) for token in range(300, 1324))}, 0, 0.0,
    ),
    "mixed: 1 of temperature 1": ({"temperature": 1.0}, 1, 0.95),
    "mixed: 1 of top_p 0.9": ({"temperature": 1.0, "top_p": 0.9}, 1, 0.9),
}  # fmt: skip


class Bench:
    """One engine over one model."""

    def __init__(self, vocab: int, arguments: argparse.Namespace, work_dir: Path) -> None:
        shape = Geometry(hidden=576, ffn=1536, layers=30, heads=9, kv_heads=3, vocab=vocab, positions=1024)
        self._workload = Workload(
            shape,
            requests=arguments.requests,
            prompt_tokens=arguments.prompt_tokens,
            threads=arguments.threads,
            ranks=(),
        )
        config = EngineConfig(
            model=checkpoint(self._workload, work_dir),
            max_num_seqs=arguments.requests,
            memory_bytes=256 << 20,
            prefix_cache=False,
            threads=arguments.threads,
        )
        self._engine = Engine.from_config(config)
        self._serial = 0

    def ratio(self, params: dict[str, Any], count: int, rounds: int) -> tuple[float, float]:
        """Greedy's time over that of a way, and the way's seconds per step; medians over rounds.

        A round is four decode steps of the same requests, greedy, so, so, greedy: what disturbs the machine for longer
        than some steps disturbs both alike. count: how many of the requests sample so; the others stay greedy.
        """
        engine, length = self._engine, 4 * (rounds + 2) + 8
        greedy, wanted = (SamplingParams(max_tokens=length, ignore_eos=True, **way) for way in (GREEDY, params))
        requests = self.begin(greedy)
        ratios, seconds = [], []
        for index in range(rounds + 2):
            times: dict[str, list[float]] = {"greedy": [], "way": []}
            for name in ("greedy", "way", "way", "greedy"):
                for request in requests[:count]:
                    request.params = request.row.params = wanted if name == "way" else greedy
                began = time.perf_counter()
                engine.step()
                times[name].append(time.perf_counter() - began)
            if index >= 2:  # the first ones make what later ones use again
                ratios.append(sum(times["greedy"]) / sum(times["way"]))
                seconds.append(sum(times["way"]) / 2)
        while engine.has_work():
            engine.step()
        return median(ratios), median(seconds)

    def grammar_ratio(self, plain: Bench, rounds: int) -> tuple[float, float]:
        """The time of a step of `plain`, without grammars, over that of a step in which every request has one, and the
        latter's seconds; medians over rounds.
        """
        params = SamplingParams(max_tokens=2 * (rounds + 2) + 8, ignore_eos=True)
        plain.begin(params)
        self.begin(replace(params, grammar=Grammar("json_schema", json.dumps(SCHEMA))))
        ratios, seconds = [], []
        for index in range(rounds + 2):
            times: dict[Bench, float] = {self: 0.0, plain: 0.0}
            for bench in (plain, self, self, plain):
                began = time.perf_counter()
                bench.step()
                times[bench] += time.perf_counter() - began
            if index >= 2:
                ratios.append(times[plain] / times[self])
                seconds.append(times[self] / 2)
        return median(ratios), median(seconds)

    def step(self) -> None:
        self._engine.step()

    def begin(self, params: SamplingParams) -> list[Request]:
        """Requests that decode, with seeds of their own."""
        engine, requests = self._engine, []
        for index, prompt in enumerate(self._workload.prompts()):
            self._serial += 1
            requests.append(Request(f"r{self._serial}", prompt, replace(params, seed=index)))
            engine.add_request(requests[-1])
        while any(request.row is None for request in requests):
            engine.step()
        return requests

    def close(self) -> None:
        self._engine.close()


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--vocab", type=int, nargs="+", default=[32000, 152000], help="sizes of the vocabulary")
    add("--requests", type=int, default=8, help="at a time")
    add("--prompt-tokens", type=int, default=32, help="of each request")
    add("--threads", type=int, default=2, help="of the engine")
    add("--rounds", type=int, default=60, help="of four steps: greedy, way, way, greedy")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="which to run; default: all")
    add("--grammar", action="store_true", help="measure grammars alone")
    add("--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "chorus-sampling",
                        help="where models are kept")  # fmt: skip
    arguments = command.parse_args(argv)
    results, beside = [], "none" if arguments.grammar else "greedy"
    for vocab in arguments.vocab:
        bench = Bench(vocab, arguments, arguments.work_dir)
        for name in ["grammar"] if arguments.grammar else arguments.ways:
            if arguments.grammar:
                plain, bar = Bench(vocab, arguments, arguments.work_dir), GRAMMAR_BAR
                ratio, seconds = bench.grammar_ratio(plain, arguments.rounds)
                plain.close()
            else:
                params, count, bar = WAYS[name]
                ratio, seconds = bench.ratio(params, count or arguments.requests, arguments.rounds)
            rate = arguments.requests / seconds
            results.append({"vocab": vocab, "way": name, "tokens_per_s": rate, "ratio": ratio, "bar": bar})
            verdict = "" if ratio >= bar else "  MISSED"
            print(
                f"{vocab:8d}  {name:26s} {rate:8.0f} tokens/s  {ratio:6.3f} of {beside}  bar {bar:.2f}{verdict}",
                flush=True,
            )
        bench.close()
    missed = [it for it in results if it["ratio"] < it["bar"]]
    return conclude({"results": results, "missed": len(missed)}, not missed)


if __name__ == "__main__":
    raise SystemExit(main())
