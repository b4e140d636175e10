r"""Speculation by n-grams: steps per token and accepted proposals, on texts that are copied and on free answers.

Requests of mixed adapters, `--rows` at once, run without and with speculation, in one process whose steps alternate
between both, so that noise takes time from both alike. Both must give the same tokens. The counts say what speculation
saves; the ratio of times is what that is worth on this machine.

With `--free`, proposals are as long as if verified tokens cost nothing: then the counts don't depend on the machine.

The load `copying` is a prompt with its text twice, the second time cut: a model that copies goes on with the rest. The
load `free` has the text once, and `chats` are the prompts of `--chats`. With the built-in model, which repeats its
input, each text is one of its inputs.

    python -m chorus.perf.bench.speculation
    python -m chorus.perf.bench.speculation --model DIR --adapters DIR --prompts dolly.jsonl gsm8k.jsonl \
        --chats sharegpt.jsonl --dtype float32 bfloat16

Tests: tests/perf/bench/test_speculation.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count, cycle, islice, product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.requests.request import Request
from ...core.requests.request_params import RequestParams
from ...core.speculation.token_cost import TokenCost
from ...server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from ...server.demo.skills import BASE, SKILLS, prompt, sample_inputs
from ..inline_reads import InlineReads
from ..report.command import judge, parser
from ..report.table import Goal, rows_table
from .timer import ratio

FIELDS = ("context", "question", "prompt", "instruction")
"""Fields of a line of `--prompts` whose text is used, the first that is there."""

Prompt = tuple[str | None, list[int]]
"""An adapter, None for the base model, and tokens."""


class FreeTokens(TokenCost):
    """Says that a token more costs a step nothing."""

    def share(self, num_sequences: int) -> float:
        return 0.0


class Runner:
    """Answers prompts on an engine of its own."""

    def __init__(self, config: EngineConfig, max_tokens: int, *, is_free: bool) -> None:
        """is_free: propose as if verified tokens cost nothing."""
        self.engine = Engine.from_config(config, InlineReads())
        if is_free and self.engine.speculation is not None:
            self.engine.speculation.cost = FreeTokens()
        self.answers: dict[int, list[int]] = {}
        """The tokens of each prompt's answer, the same in each round."""
        self._max_tokens, self._ids = max_tokens, count()

        self.num_tokens, self.spent = 0, 0.0
        """Tokens generated, and seconds of the steps, since `begin`."""
        self._generated: dict[str, list[int]] = {}

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """Add requests of all prompts."""
        params = RequestParams(max_tokens=self._max_tokens, temperature=0.0)
        first, self._generated = next(self._ids), {}
        self.num_tokens, self.spent = 0, 0.0
        for index, (adapter, tokens) in enumerate(prompts):
            name = f"{first}-{index}"
            self._generated[name] = []
            self.engine.add_request(Request(name, list(tokens), params, adapter))

    def counts(self) -> list[int]:
        """Steps, and generated, proposed and accepted tokens so far."""
        stats = self.engine.stats()
        return [stats.num_steps, stats.num_generated_tokens, stats.num_proposed_tokens, stats.num_accepted_tokens]

    def has_work(self) -> bool:
        return self.engine.has_work()

    def step(self) -> None:
        began = time.perf_counter()
        outputs = self.engine.step()
        self.spent += time.perf_counter() - began
        for output in outputs:
            self._generated[output.request_id] += output.token_ids
            self.num_tokens += len(output.token_ids)
        self.answers = dict(enumerate(self._generated.values()))


def run_together(runners: Mapping[str, Runner], prompts: Sequence[Prompt]) -> dict[str, float]:
    """Seconds that each runner's steps take for all answers.

    Their steps alternate: the next one is of a runner with the fewest tokens, of several the first. So whatever else
    the machine does takes time from all of them alike.
    """
    for runner in runners.values():
        runner.begin(prompts)
    while working := [runner for runner in runners.values() if runner.has_work()]:
        min(working, key=lambda runner: runner.num_tokens).step()
    return {name: runner.spent for name, runner in runners.items()}


def built_in_prompts(count: int, encode: Callable[[str], list[int]]) -> list[Prompt]:
    """Inputs of the built-in model's skills, in turns; the base model's are of any letters."""
    names = [None, *(name for name in SKILLS if (BUILTIN_ADAPTERS / name).is_dir())]
    skills = [BASE if name is None else SKILLS[name] for name in names]
    texts = [sample_inputs(skill, -(-count // len(names)), 0) for skill in skills]
    return [
        (names[index % len(names)], encode(prompt(texts[index % len(names)][index // len(names)])))
        for index in range(count)
    ]


def read_prompts(
    paths: Sequence[Path], count: int, adapters: Sequence[str | None], most: int, encode: Callable[[str], list[int]]
) -> dict[str, list[Prompt]]:
    """The loads from the first texts of files that are long enough, cut at `most` tokens, an equal part of each file.

    Raises ValueError.
    """
    parts = [count * (index + 1) // len(paths) - count * index // len(paths) for index in range(len(paths))]
    texts = [each for path, part in zip(paths, parts, strict=True) for each in _long_enough(path, part, most, encode)]
    free = list(zip(cycle(adapters), texts, strict=False))
    return {"copying": [(name, tokens + tokens[: len(tokens) // 3]) for name, tokens in free], "free": free}


def read_chats(
    path: Path, count: int, adapters: Sequence[str | None], most: int, encode: Callable[[str], list[int]]
) -> list[Prompt]:
    """Prompts from a file of JSON lines whose `requests` have a `prompt` each, cut as in `read_prompts`."""
    return list(zip(cycle(adapters), _long_enough(path, count, most, encode), strict=False))


def _long_enough(path: Path, count: int, most: int, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The tokens of the first `count` texts of at least 24 tokens, cut at `most`."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    fields = (each for row in rows for each in row.get("requests", [row]))
    encoded = (encode(next((each[name] for name in FIELDS if each.get(name)), ""))[:most] for each in fields)
    found = list(islice((tokens for tokens in encoded if len(tokens) >= 24), count))
    if len(found) < count:
        raise ValueError(f"{path}: has fewer than {count} texts of 24 tokens in the fields {', '.join(FIELDS)}")
    return found


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--model", type=Path, default=BUILTIN_MODEL, help="default: the built-in model")
    add("--adapters", type=Path, help="a directory of adapters; default: the built-in model's")
    add("--prompts", type=Path, nargs="+", help="files of JSON lines; needed with --model")
    add("--chats", type=Path, help="a file of JSON lines with requests, for the load chats")
    add("--rows", type=int, nargs="+", default=[1, 8], help="requests at once")
    add("--requests", type=int, default=32, help="requests of a load")
    add("--max-tokens", type=int, default=96)
    add("--prompt-tokens", type=int, default=192, help="most tokens of a text")
    add("--dtype", nargs="+", default=["float32"])
    add("--rounds", type=int, default=4, help="pairs of runs, after one that is not timed")
    add("--free", action="store_true", help="don't weigh what a verified token costs here")
    add("--threads", type=int, default=torch.get_num_threads())
    arguments = command.parse_args(argv)
    if arguments.prompts is None and arguments.model != BUILTIN_MODEL:
        command.error("--model needs --prompts: texts that its requests are made of")
    return _run(arguments)


def _run(arguments: Any) -> int:
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text).ids

    adapters = arguments.adapters or (BUILTIN_ADAPTERS if arguments.model == BUILTIN_MODEL else None)
    if arguments.prompts is None:
        loads = {"copying": built_in_prompts(arguments.requests, encode)}
    else:
        found = sorted(path.name for path in adapters.iterdir() if path.is_dir()) if adapters else []
        of_each = arguments.requests, [None, *found], arguments.prompt_tokens, encode
        loads = read_prompts(arguments.prompts, *of_each)
        if arguments.chats is not None:
            loads["chats"] = read_chats(arguments.chats, *of_each)
    results, same = [], True
    for dtype, (load, prompts), rows in product(arguments.dtype, loads.items(), arguments.rows):
        runners = {
            speculation: Runner(
                _config(arguments, adapters, rows, dtype, speculation), arguments.max_tokens, is_free=arguments.free
            )
            for speculation in ("off", "ngram")
        }
        try:
            result = _compare(runners, prompts, arguments.rounds)
        finally:
            for runner in runners.values():
                runner.engine.close()
        same = result.pop("same") and same
        results.append({"dtype": dtype, "load": load, "rows": rows, **result})
    columns = (
        "dtype | load | rows | tokens per step, off: off | on | proposed | accepted | share | "
        "time, off over on, in pairs: time"
    )
    rows_table(f"speculation, {arguments.model.name}", columns, results).show()
    goal = Goal("answers that are the same", float(same), 1.0)
    return judge({"model": arguments.model.name, "results": results}, [goal])


def _compare(runners: dict[str, Runner], prompts: Sequence[Prompt], rounds: int) -> dict[str, Any]:
    run_together(runners, prompts)  # loads the adapters
    before = {name: runner.counts() for name, runner in runners.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for index in range(rounds):
        order = [*runners][:: -1 if index % 2 else 1]
        for name, spent in run_together({name: runners[name] for name in order}, prompts).items():
            seconds[name].append(spent)
    off, on = ([now - then for now, then in zip(runners[each].counts(), before[each], strict=True)] for each in runners)
    _, _, proposed, accepted = on
    return {
        "off": off[1] / off[0],
        "on": on[1] / on[0],
        "proposed": proposed // rounds,
        "accepted": accepted // rounds,
        "share": accepted / proposed if proposed else None,
        "time": ratio(seconds, "off", "ngram"),
        "same": runners["off"].answers == runners["ngram"].answers,
    }


def _config(arguments: Any, adapters: Path | None, rows: int, dtype: Any, speculation: Any) -> EngineConfig:
    own = {"model": arguments.model, "adapters": adapters, "device": "cpu", "dtype": dtype, "max_num_seqs": rows}
    own |= {"threads": arguments.threads, "speculation": speculation, "memory_bytes": 1 << 28}
    return EngineConfig.model_validate({**own, "prefix_cache": False})  # each round computes its prompts


if __name__ == "__main__":
    raise SystemExit(main())
