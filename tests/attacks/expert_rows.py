"""Base rows of a mixture keep their bits beside adapters on its experts: `python -m tests.attacks.expert_rows`.

A case is a request for the base model in two runs of the same steps: among others for the base model, and among the
same prompts for adapters on routers, shared experts and experts. The log-probability of each of its tokens, of the
prompt and of the answer, and those of the most likely ones must have the same bits; each depends on all logits of its
row. Prompts are cut into chunks, and other rows go to other experts.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.choice import open_executor
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.perf.inline_reads import InlineReads
from chorus.perf.report.command import conclude, parser
from chorus.perf.report.table import Table

from ..core.conftest import ticking
from ..core.tiny_families import EXPERTS
from ..core.tiny_mixtures import ADAPTERS, Mixture, make_mixture

FAMILIES = tuple(EXPERTS)
LIMITS = {"max_num_seqs": 8, "max_model_len": 128, "memory_bytes": 16 << 20, "device": "cpu", "prefix_cache": False}


@dataclass
class Tally:
    """Counts of compared rows and of those that differ."""

    rows: int = 0
    cases: int = 0
    seconds: float = 0.0
    differing: list[str] = field(default_factory=list)


class Server:
    """An engine with a mixture's adapters, which answers some requests at once."""

    def __init__(self, mixture: Mixture, **config: Any) -> None:
        settings = EngineConfig(model=mixture.model, **LIMITS, **config)
        self._engine = Engine(settings, open_executor(settings), ticking(), InlineReads())
        for name, path in mixture.adapters.items():
            self._engine.store.register(name, path)

    def scores(self, asked: list[tuple[str | None, list[int]]], max_tokens: int) -> list[Any]:
        """Log-probabilities of the first request's rows: those of its prompt, then those of its answer."""
        params = RequestParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        scored = replace(params, logprobs=4, prompt_logprobs=4)
        for index, (adapter, prompt) in enumerate(asked):
            self._engine.add_request(Request(str(index), prompt, params if index else scored, adapter))
        found: list[Any] = []
        while self._engine.has_work():
            for output in self._engine.step():
                assert output.error is None, output.error
                if output.request_id == "0":
                    found += [*(output.prompt_logprobs or ()), *output.logprobs]
        return found

    def close(self) -> None:
        self._engine.close()


def compare(family: str, dtype: str, threads: int, seed: int, cases: int, tally: Tally) -> None:
    """Compute `cases` random requests of the family's base model, beside base rows and beside adapters."""
    rng, mixture = random.Random(seed), cache(make_mixture)(family)
    server = Server(mixture, dtype=dtype, threads=threads, max_num_batched_tokens=rng.randint(9, 64))
    for name in ADAPTERS:
        server.scores([(name, [5, 6, 7])], 1)  # it is in memory from now on
    for case in range(cases):
        prompts = [[rng.randrange(3, 150) for _ in range(rng.randint(5, 60))] for _ in range(rng.randint(2, 8))]
        names = [None, *(rng.choice(list(ADAPTERS)) for _ in prompts[1:])]
        max_tokens = rng.randint(4, 40)
        want = server.scores([(None, prompt) for prompt in prompts], max_tokens)
        got = server.scores(list(zip(names, prompts, strict=True)), max_tokens)
        assert len(want) == len(got) == len(prompts[0]) - 1 + max_tokens, "a row for each token but the first"
        tally.rows += len(want)
        tally.cases += 1
        if different := sum(one != other for one, other in zip(want, got, strict=True)):
            tally.differing.append(f"{family}, {dtype}, seed {seed}, case {case}: {different} rows beside {names[1:]}")
    server.close()


def attack(rows: int, dtype: str, seed: int) -> Tally:
    """At least `rows` rows, of all families."""
    tally, began = Tally(), time.perf_counter()
    while tally.rows < rows:
        for family in FAMILIES:
            compare(family, dtype, seed % 2 + 1, seed, 4, tally)
        seed += 1
    tally.seconds = round(time.perf_counter() - began, 1)
    return tally


def main() -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--rows", type=int, default=10_000, help="how many rows to compare, of each data type")
    command.add_argument("--seed", type=int, default=0, help="of the first case")
    args = command.parse_args()
    result: dict[str, dict[str, float]] = {}
    for dtype in ("bfloat16", "float32"):
        tally = attack(args.rows, dtype, args.seed)
        print(*tally.differing[:10], sep="\n")
        result[dtype] = {**vars(tally), "differing": len(tally.differing)}
    table = Table("base rows beside adapters on experts", ["dtype", *result["float32"]])
    for name, row in result.items():
        table.add(name, *row.values())
    table.show()
    met = not any(row["differing"] for row in result.values())
    return conclude({"expert_rows": result, "met": met}, met)


if __name__ == "__main__":
    sys.exit(main())
