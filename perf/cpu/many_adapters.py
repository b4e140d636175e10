"""Thousands of registered adapters under skewed traffic: right answers, memory over time, hits of the cache.

    python -m chorus.perf.cpu.many_adapters [--adapters 2000] [--requests 6000] [--alpha 1.5] [--memory-mb 4]

Registers copies of the built-in model's skill adapters under many names (each a directory of its own), then keeps the
engine busy with requests for adapters drawn from a Zipf law: the i-th most popular with a weight of i^-alpha. Every
answer is compared with the skill's own. Arena and host cache are small on purpose, so that adapters come and go.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.requests.request import Request
from ...core.requests.sampling_params import SamplingParams
from ...server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from ...server.demo.skills import SKILLS, Skill, prompt, sample_inputs
from ..report.command import conclude, parser

MAX_ANSWER_TOKENS = 48


def rss_mib() -> float:
    """Resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def copies(directory: Path, count: int) -> dict[str, Skill]:
    """`count` adapter directories in `directory`, round-robin over the skills; name → skill."""
    made = {}
    for index, skill in zip(range(count), itertools.cycle(SKILLS.values()), strict=False):
        made[name := f"{skill.name}-{index:05d}"] = skill
        shutil.copytree(BUILTIN_ADAPTERS / skill.name, directory / name)
    return made


def run(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Serve the requests; what was found of the answers, the adapters and the memory."""
    skills, rng = copies(directory, arguments.adapters), random.Random(arguments.seed)
    tokenizer = Tokenizer.from_file(str(BUILTIN_MODEL / "tokenizer.json"))
    config = EngineConfig(
        model=BUILTIN_MODEL, memory_bytes=arguments.memory_mb << 20, host_cache_bytes=arguments.host_cache_mb << 20,
        max_num_seqs=arguments.concurrency, threads=arguments.threads,
    )  # fmt: skip
    engine = Engine.from_config(config)
    start = time.perf_counter()
    for name in skills:
        engine.store.register(name, directory / name)
    register_seconds = time.perf_counter() - start
    names = rng.sample(list(skills), len(skills))
    weights = [rank**-arguments.alpha for rank in range(1, len(names) + 1)]
    drawn = rng.choices(names, weights, k=arguments.requests)
    inputs = {name: itertools.cycle(sample_inputs(skill, 200, arguments.seed)) for name, skill in SKILLS.items()}
    coming, running, rss, wrong = iter(enumerate(drawn)), {}, [], 0
    params = SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0)
    start = time.perf_counter()
    for step in itertools.count():
        for number, name in itertools.islice(coming, arguments.concurrency - len(running)):
            text = next(inputs[skills[name].name])
            request = Request(f"r{number}", tokenizer.encode(prompt(text)).ids, params, name)
            engine.add_request(request)
            running[request.id] = request, skills[name].apply(text)
        if step % 200 == 0 or not running:
            rss.append(rss_mib())
        if not running:
            break
        for output in engine.step():
            if output.finish_reason is not None:
                request, right = running.pop(output.request_id)
                answer = tokenizer.decode(request.token_ids[request.num_prompt_tokens :], skip_special_tokens=True)
                wrong += answer != right
    stats, half = engine.stats(), rss[len(rss) // 2 :]
    found = {
        "adapters": arguments.adapters, "requests": len(drawn), "wrong": wrong, "seconds": time.perf_counter() - start,
        "register_seconds": register_seconds, "distinct_adapters": len(set(drawn)),
        "hit_rate": stats.num_adapter_hits / (stats.num_adapter_hits + stats.num_adapter_loads),
        "loads": stats.num_adapter_loads, "evictions": stats.num_adapter_evictions, "rss_mib_last": rss[-1],
        "rss_growth_second_half": half[-1] / half[0] - 1,
    }  # fmt: skip
    engine.check_integrity()
    engine.close()
    return found


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--adapters", type=int, default=2000, help="registered adapters")
    add("--requests", type=int, default=6000, help="requests in all")
    add("--alpha", type=float, default=1.5, help="skew of popularity")
    add("--concurrency", type=int, default=32, help="requests at a time")
    add("--memory-mb", type=int, default=4, help="arena in MiB")
    add("--host-cache-mb", type=int, default=8, help="host cache for adapters in MiB")
    add("--threads", type=int, help="CPU threads; default: all")
    add("--seed", type=int, default=0)
    arguments = command.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="chorus-adapters-") as directory:
        found = run(Path(directory), arguments)
    for name, value in found.items():
        print(f"{name:24s} {value:.4f}" if isinstance(value, float) else f"{name:24s} {value}")
    return conclude(found, not found["wrong"])


if __name__ == "__main__":
    raise SystemExit(main())
