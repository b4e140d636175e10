"""Thousands of registered adapters under skewed traffic: right answers, memory over time, hits of the cache.

    python -m chorus.perf.cpu.many_adapters [--adapters 2000] [--requests 6000] [--alpha 1.5] [--memory-mb 4]

Registers copies of the built-in model's skill adapters under many names (each a directory of its own), then keeps the
engine busy with requests whose adapter is drawn from a Zipf law: the i-th most popular with a weight of i^-alpha. Every
answer is compared with the skill's own. Arena and host cache are small on purpose, so that adapters come and go.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.requests.request import Request
from ...core.requests.sampling_params import SamplingParams
from ...server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from ...server.demo.skills import SKILLS, Skill, prompt, sample_inputs

MAX_ANSWER_TOKENS = 48


@dataclass
class Outcome:
    """Observations of a run."""

    adapters: int
    requests: int = 0
    wrong: int = 0
    seconds: float = 0.0
    register_seconds: float = 0.0
    distinct_adapters: int = 0
    hit_rate: float = 0.0
    loads: int = 0
    evictions: int = 0
    rss_mib: list[float] = field(default_factory=list)

    @property
    def rss_growth(self) -> float:
        """Growth of resident memory over the second half of the run, as a share."""
        half = self.rss_mib[len(self.rss_mib) // 2 :]
        return half[-1] / half[0] - 1


def rss_mib() -> float:
    """Resident memory of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise OSError("the system does not tell a process's resident memory")


def copies(directory: Path, count: int) -> dict[str, Skill]:
    """`count` adapter directories in `directory`, round-robin over the skills; name → skill."""
    skills = itertools.cycle(SKILLS.values())
    made = {}
    for index, skill in zip(range(count), skills, strict=False):
        name = f"{skill.name}-{index:05d}"
        shutil.copytree(BUILTIN_ADAPTERS / skill.name, directory / name)
        made[name] = skill
    return made


def run(directory: Path, arguments: argparse.Namespace) -> Outcome:
    from tokenizers import Tokenizer

    skills = copies(directory, arguments.adapters)
    outcome = Outcome(arguments.adapters)
    tokenizer = Tokenizer.from_file(str(BUILTIN_MODEL / "tokenizer.json"))
    config = EngineConfig(
        model=BUILTIN_MODEL,
        memory_bytes=arguments.memory_mb << 20,
        host_cache_bytes=arguments.host_cache_mb << 20,
        max_num_seqs=arguments.concurrency,
        threads=arguments.threads,
    )
    engine = Engine.from_config(config)
    start = time.perf_counter()
    for name in skills:
        engine.store.register(name, directory / name)
    outcome.register_seconds = time.perf_counter() - start
    rng = random.Random(arguments.seed)
    names = list(skills)
    rng.shuffle(names)
    weights = [rank**-arguments.alpha for rank in range(1, len(names) + 1)]
    traffic = iter(rng.choices(names, weights, k=arguments.requests))
    inputs = {name: itertools.cycle(sample_inputs(skill, 200, arguments.seed)) for name, skill in SKILLS.items()}
    running: dict[str, tuple[Request, str, str]] = {}
    used = set()
    start = time.perf_counter()
    for number in itertools.count():
        while len(running) < arguments.concurrency and (name := next(traffic, None)) is not None:
            text = next(inputs[skills[name].name])
            params = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0)
            request = Request(f"r{outcome.requests}", tokenizer.encode(prompt(text)).ids, params, name)
            engine.add_request(request)
            running[request.id] = request, text, name
            outcome.requests += 1
            used.add(name)
        if not running:
            break
        for output in engine.step():
            if output.finish_reason is not None:
                request, text, name = running.pop(output.request_id)
                answer = tokenizer.decode(request.token_ids[request.num_prompt_tokens :], skip_special_tokens=True)
                outcome.wrong += answer != skills[name].apply(text)
        if number % 200 == 0:
            outcome.rss_mib.append(rss_mib())
    outcome.seconds = time.perf_counter() - start
    outcome.rss_mib.append(rss_mib())
    stats = engine.stats()
    outcome.distinct_adapters = len(used)
    outcome.loads, outcome.evictions = stats.num_adapter_loads, stats.num_adapter_evictions
    outcome.hit_rate = stats.num_adapter_hits / (stats.num_adapter_hits + stats.num_adapter_loads)
    engine.check_integrity()
    engine.close()
    return outcome


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chorus.perf.cpu.many_adapters", description=__doc__.split("\n")[0])
    parser.add_argument("--adapters", type=int, default=2000, help="registered adapters (default: 2000)")
    parser.add_argument("--requests", type=int, default=6000, help="requests in all (default: 6000)")
    parser.add_argument("--alpha", type=float, default=1.5, help="skew of popularity (default: 1.5)")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at a time (default: 32)")
    parser.add_argument("--memory-mb", type=int, default=4, help="arena in MiB (default: 4)")
    parser.add_argument("--host-cache-mb", type=int, default=8, help="host cache for adapters in MiB (default: 8)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="chorus-adapters-") as directory:
        outcome = run(Path(directory), arguments)
    result = {name: value for name, value in vars(outcome).items() if name != "rss_mib"}
    result |= {"rss_mib_last": outcome.rss_mib[-1], "rss_growth_second_half": outcome.rss_growth}
    for name, value in result.items():
        print(f"{name:24s} {value:.4f}" if isinstance(value, float) else f"{name:24s} {value}")
    print(json.dumps(result))
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
