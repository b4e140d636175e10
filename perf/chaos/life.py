"""Random life of the real engine on the CPU: `python -m chorus.perf.chaos.life --answers 30000 --seed 1`.

The built-in model and its adapters, one engine after another under options drawn from all there are, with a small
arena, tenants and salts, all that a request may ask, aborts, reloads, removals, pins, preemption, moves of requests,
steps that fail and reads that come late, in pieces, fail or hang. The books are checked after every step. Every answer
must be the one that a request gets alone in a calm engine, with its log-probabilities.

    python -m chorus.perf.chaos.life --answers 30000 --seed 1 --log life.log
    python -m chorus.perf.chaos.life --answers 20000 --seed 1 --first 31
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.requests.request import Request
from ...core.requests.sampling_params import InvalidRequest, SamplingParams
from ...core.requests.types import FinishReason, RequestOutput, StepPlan, StepResult, TokenLogprobs
from ...core.scheduling.overload import Overloaded
from ...memory.files.format import AdapterFormatError
from ...server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from ...server.demo.skills import BASE, SKILLS, prompt, sample_inputs

MAX_TOKENS = 24
TEXTS = 8
ANSWERS_PER_ENGINE = {"auto": 400, "torch": 120}
FAULT = "an injected fault"
NEAR = 1e-3
"""Log-probabilities may differ by so much between kernels."""
WAYS: list[dict[str, Any]] = [
    {}, {}, {}, {}, {"max_tokens": None}, {"max_tokens": 3}, {"stop_token_ids": (97, 101, 105)}, {"logprobs": 2},
    {"prompt_logprobs": 1}, {"logprobs": 0, "prompt_logprobs": 0}, {"logit_bias": {101: 2.0, 97: -100.0}},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5}, {"min_tokens": 9},
    {"bad_words": ((101,), (97, 98))}, {"allowed_token_ids": tuple(range(90, 125))}, {"top_k": 5}, {"top_p": 0.9},
    {"min_p": 0.05}, {"ignore_eos": True},
]  # fmt: skip
"""Options that requests may ask for beside a temperature and a seed."""


@dataclass(eq=False)
class Told:
    """All that is told of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, output: RequestOutput) -> None:
        self.tokens += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs or ()

    def differs(self, other: Told) -> bool:
        return self.tokens != other.tokens or not (
            _near(self.logprobs, other.logprobs) and _near(self.prompt_logprobs, other.prompt_logprobs)
        )


def _near(some: list[TokenLogprobs], others: list[TokenLogprobs]) -> bool:
    return len(some) == len(others) and all(
        one.token_id == other.token_id and abs(one.logprob - other.logprob) < NEAR
        and len(one.top) == len(other.top)
        and all(abs(x[1] - y[1]) < NEAR for x, y in zip(one.top, other.top, strict=True))
        for one, other in zip(some, others, strict=True)
    )  # fmt: skip


class Calm:
    """Answers that requests get when they are alone: of an engine that nothing else happens to, computed once."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(BUILTIN_MODEL / "tokenizer.json"))
        self._engine = Engine.from_config(_calm_config(adapters=BUILTIN_ADAPTERS))
        self._known: dict[tuple[str | None, tuple[int, ...], str], Told] = {}
        self.prompts = {
            name: [tokenizer.encode(prompt(text)).ids for text in sample_inputs(skill, TEXTS, 0)]
            for name, skill in {None: BASE, **SKILLS}.items()
            if name is None or (BUILTIN_ADAPTERS / name).is_dir()
        }

    def answer(self, skill: str | None, tokens: list[int], params: SamplingParams) -> Told:
        key = (skill, tuple(tokens), repr(params))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Told()
            self._engine.add_request(Request("calm", list(tokens), params, skill))
            while self._engine.has_work():
                for output in self._engine.step():
                    found.take(output)
        return found


class Faulty:
    """An executor that fails when told to, as a whole or for one request."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.fail_once = False
        self.guilty: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, plan: StepPlan) -> StepResult:
        if self.fail_once:
            self.fail_once = False
            raise RuntimeError(FAULT)
        if any(row.request_id in self.guilty for row in plan.rows):
            raise RuntimeError(FAULT)
        return self._inner.execute(plan)


class Life:
    """One engine from its start to its end."""

    def __init__(self, seed: int, calm: Calm, where: Path, reached: Counter[str]) -> None:
        self.rng = random.Random(seed)
        self.calm = calm
        self.where = where
        self.reached = reached
        self.wrong: list[str] = []
        self.asked: dict[str, tuple[Request, str | None, Told]] = {}
        self.count = self.num_answers = self.num_directories = 0
        self.broken: set[Path] = set()
        self.has_hung = False
        self.current: dict[str, Path] = {}
        self.over = threading.Event()
        self.engine = Engine.from_config(self._draw_config())
        self.executor = self.engine.executor = Faulty(self.engine.executor)  # type: ignore[assignment]
        self._inject_reads()
        for name in self.calm.prompts:
            if name is not None:
                self._load(name)

    def run(self) -> None:
        try:
            acts = [self._ask] * 8 + [self._step] * 24 + [self._disturb]
            most = ANSWERS_PER_ENGINE[self.engine.config.cpu_kernels]
            while self.num_answers < most and self.count < 3 * most:
                self.rng.choice(acts)()
            for _ in range(100_000):
                if not self.engine.has_work():
                    break
                self._step()
            if self.asked:
                self.wrong.append(f"requests never end: {sorted(self.asked)[:5]}")
            self.engine.reclaim_idle()
            self.engine.check_integrity()
        finally:
            self.over.set()
            self.engine.close()

    def _draw_config(self) -> EngineConfig:
        rng = self.rng
        seats = rng.choice([1, 2, 4, 8, 16])
        return _calm_config(
            num_pages=rng.choice([40, 60, 90, 400]), block_tokens=rng.choice([4, 8, 16]), max_num_seqs=seats,
            max_num_batched_tokens=max(seats, rng.choice([16, 32, 256])), chunked_prefill=rng.random() < 0.8,
            adapter_read_seconds=rng.choice([0.02, 0.2, 30.0]), host_cache_bytes=rng.choice([0, 100_000, 1 << 30]),
            eviction=rng.choice(["cost", "lru"]), prefix_cache=rng.random() < 0.7,
            share_prefix_cache=rng.random() < 0.3, lookahead=rng.choice([1, 2, 8]), prefetch=rng.choice([0, 1, 3]),
            max_adapters_per_step=rng.choice([None, None, 1, 3]), max_overtake_seconds=rng.choice([0.0, 0.01, 1.0]),
            max_load_stall_seconds=rng.choice([0.0, 0.002, 0.02]), max_waiting=rng.choice([None, 8, 64]),
            cpu_kernels=rng.choice(["auto", "auto", "auto", "torch"]), seed=rng.randrange(1 << 30),
        )  # fmt: skip

    def _inject_reads(self) -> None:
        """Reads that come late, layer by layer, fail, or hang: for good, or until they were given up or nearly so."""
        backend: Any = self.engine.executor.adapters
        inner, rng = backend.read, random.Random(self.rng.random())
        patience = self.engine.config.adapter_read_seconds

        def read(manifest: Any, layout: Any, image: Any) -> None:
            fate, seconds, publish = rng.random(), rng.uniform(0, 0.05), image.publish

            def publish_slowly(num_ready: int) -> None:
                self.over.wait(seconds)
                publish(num_ready)

            if fate < 0.05 and patience < 1:
                self.has_hung = True
                self.broken.add(manifest.path)
                self.over.wait(None if fate < 0.02 else rng.uniform(0, 3 * patience))
            elif fate < 0.15:
                self.over.wait(seconds)
            elif fate < 0.25:
                image.publish = publish_slowly
            elif fate < 0.26 or manifest.path in self.broken:
                self.broken.add(manifest.path)
                raise AdapterFormatError(FAULT)
            if seconds > patience:
                self.broken.add(manifest.path)
            inner(manifest, layout, image)

        backend.read = read

    def _load(self, name: str) -> None:
        """A new version of an adapter, equal to the one before it."""
        self.num_directories += 1
        path = Path(shutil.copytree(BUILTIN_ADAPTERS / name, self.where / f"{name}-{self.num_directories}"))
        try:
            self.engine.store.register(name, path)
        except AdapterFormatError:
            self.reached["an adapter too large for the arena"] += 1
        else:
            self.current[name] = path

    def _ask(self) -> None:
        rng = self.rng
        if len(self.asked) > 4 * self.engine.config.max_num_seqs + 8:
            return
        skill = rng.choice([None, *self.current, *self.current])
        tokens = rng.choice(self.calm.prompts[skill])
        way = {"max_tokens": MAX_TOKENS, **rng.choice(WAYS)}
        temperature = rng.choice([0.0, 0.0, 1.0])
        for _ in range(rng.choice([1, 1, 1, 4])):
            params = SamplingParams(**way, temperature=temperature, seed=rng.randrange(3) if temperature else 0)
            request = Request(
                f"r{self.count}", list(tokens), params, skill,
                tenant=rng.choice(["", "a", "b"]), cache_salt=rng.choice(["", "", "x"]),
            )  # fmt: skip
            self.count += 1
            try:
                self.engine.add_request(request)
            except (InvalidRequest, Overloaded) as error:
                self.reached[f"refused: {type(error).__name__}"] += 1
            else:
                self.asked[request.id] = request, skill, Told()

    def _disturb(self) -> None:
        rng, engine = self.rng, self.engine
        what = rng.choice(
            ["abort", "load", "load", "unload", "pin", "unpin", "glitch", "guilty", "preempt", "reclaim", "move"]
        )
        self.reached[what] += 1
        name = rng.choice(list(self.current)) if self.current else None
        if what == "abort" and self.asked:
            engine.abort(request_id := rng.choice(list(self.asked)))
            del self.asked[request_id]
        elif what == "load":
            self._load(rng.choice([name for name in self.calm.prompts if name is not None]))
        elif what == "unload" and name and rng.random() < 0.3:
            engine.store.unregister(name)
            del self.current[name]
        elif what == "pin" and name:
            try:
                engine.pin_adapter(name)
            except (InvalidRequest, AdapterFormatError):
                self.reached["not pinned"] += 1
        elif what == "unpin" and name:
            engine.unpin_adapter(name)
        elif what == "glitch":
            self.executor.fail_once = True
        elif what == "guilty" and self.asked:
            self.executor.guilty.add(rng.choice(list(self.asked)))
        elif what == "preempt" and engine.scheduler.running:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        elif what == "reclaim":
            engine.reclaim_idle()
        elif what == "move" and self.asked:
            self._move(rng.choice(list(self.asked)))

    def _move(self, request_id: str) -> None:
        """Take a request out as plain data and let it come back, as if from another engine."""
        _, skill, told = self.asked[request_id]
        if request_id not in self.engine.scheduler or (skill is not None and skill not in self.current):
            return
        record = self.engine.export_request(request_id)
        self.engine.abort(request_id)
        try:
            self.asked[request_id] = self.engine.import_request(record), skill, told
        except (InvalidRequest, Overloaded):
            del self.asked[request_id]

    def _step(self) -> None:
        outputs = self.engine.step()
        self.engine.check_integrity()
        self.reached["steps"] += 1
        for output in outputs:
            request, skill, told = self.asked[output.request_id]
            told.take(output)
            if output.finish_reason is None:
                continue
            del self.asked[output.request_id]
            want = self.calm.answer(skill, request.token_ids[: request.num_prompt_tokens], request.params)
            if output.finish_reason is FinishReason.ERROR:
                self.reached["ended with an error"] += 1
                if told.tokens != want.tokens[: len(told.tokens)] or not self._is_excused(request, output.error or ""):
                    self.wrong.append(f"{request.id} ({skill}): {output.error}")
                continue
            self.num_answers += 1
            if told.differs(want):
                self.wrong.append(f"{request.id} ({skill}, {request.params}): {told} instead of {want}")

    def _is_excused(self, request: Request, error: str) -> bool:
        adapter = request.adapter
        return (
            (adapter is not None and adapter.manifest.path in self.broken)
            or request.id in self.executor.guilty
            or "pinned adapters" in error
            or (self.has_hung and "could not begin, because all others hang" in error)
        )


def _calm_config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"model": BUILTIN_MODEL, "device": "cpu", "dtype": "float32", "threads": 1, **options})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chorus.perf.chaos.life", description=__doc__.split("\n")[0])
    parser.add_argument("--answers", type=int, default=3000, help="answers to check (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first engine, to go on or to see one again")
    parser.add_argument("--log", type=Path, help="file to which progress is appended")
    args = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    calm, reached = Calm(), Counter[str]()
    answers, engines, wrong = 0, args.first, []
    while answers < args.answers:
        seed = args.seed * 1_000_000 + engines
        with tempfile.TemporaryDirectory(prefix="chorus-life-") as where:
            life = Life(seed, calm, Path(where), reached)
            try:
                life.run()
            except Exception as error:
                wrong.append(f"engine of seed {seed}: {type(error).__name__}: {error}")
            answers += life.num_answers
            wrong += [f"engine of seed {seed}: {each}" for each in life.wrong]
        engines += 1
        if args.log is not None:
            with args.log.open("a") as log:
                where = f"{time.strftime('%H:%M:%S')} seed {args.seed}, engines {args.first} to {engines - 1}"
                log.write(f"{where}: {answers} answers, {len(wrong)} wrong {life.wrong[:1]}\n")
        if len(wrong) > 20:
            break
    for name, count in sorted(reached.items()):
        print(f"{name:40} {count:8}")
    for each in wrong[:20]:
        print(each)
    result = {
        "ok": not wrong,
        "answers": answers,
        "engines": engines - args.first,
        "wrong": len(wrong),
        "seed": args.seed,
    }
    print(json.dumps(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
