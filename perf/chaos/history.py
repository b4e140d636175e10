"""A check that answers never mix adapter versions: `python -m chorus.perf.chaos.history`.

A real server on the built-in model, whose adapters each have one skill. Operators load, reload in place and delete
adapters under a few names while clients ask them. Every change and every answer is written down with the times between
which it happened; afterwards each answer must be, character by character, the one of a version that could be served at
some moment between the request and its first token: after a 200 on a load or a delete nobody gets the old version.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from ...server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_NAME
from ...server.demo.skills import SKILLS, sample_inputs
from ...server.launch import build_app, serving
from ...server.settings import Settings

MAX_TOKENS = 40


@dataclass(frozen=True)
class Change:
    """A name's new content: a skill, or None once it is deleted. It took effect between the two times."""

    begin: float
    end: float
    skill: str | None


@dataclass(frozen=True)
class Asked:
    """An answer, or the status it was refused with; accepted at some moment between the two times."""

    name: str
    text: str
    begin: float
    end: float
    status: int
    answer: str
    cut: str | None


@dataclass
class History:
    """All that happened, by name."""

    changes: dict[str, list[Change]]
    asked: list[Asked] = field(default_factory=list)

    def skills_at(self, name: str, begin: float, end: float) -> set[str | None]:
        """Skills that could be served under `name` at some moment between the two times."""
        changes = self.changes[name]
        replaced = [*(change.end for change in changes[1:]), float("inf")]
        return {c.skill for c, gone in zip(changes, replaced, strict=True) if c.begin <= end and gone >= begin}

    def wrong(self, expected: dict[tuple[str, str], str]) -> list[str]:
        """Answers that no version gives that could be served; expected: by skill and text."""
        found = []
        for asked in self.asked:
            skills = self.skills_at(asked.name, asked.begin, asked.end)
            if asked.status == 404:
                right = None in skills
            elif asked.cut is not None:
                right = False
            else:
                right = asked.status == 200 and any(
                    expected[skill, asked.text] == asked.answer for skill in skills if skill is not None
                )
            if not right:
                found.append(f"{asked} while it was one of {sorted(map(str, skills))}")
        return found


def change_until(stop: threading.Event, url: str, name: str, root: Path, history: History, seed: int) -> None:
    """Load, reload in place and delete one name, again and again."""
    rng = random.Random(seed)
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        while not stop.is_set():
            skill = rng.choice([*SKILLS, *SKILLS, None])
            begin = time.monotonic()
            if skill is None:
                response, accepted = http.delete(f"/v1/adapters/{name}"), (200, 404)
            else:
                path = root / skill if rng.random() < 0.5 else _overwrite(root / f"{name}-live", root / skill)
                response, accepted = http.post("/v1/adapters", json={"name": name, "path": str(path)}), (200, 201)
            if response.status_code not in accepted:
                raise RuntimeError(f"{name} to {skill}: {response.status_code} {response.text}")
            history.changes[name].append(Change(begin, time.monotonic(), skill))
            time.sleep(rng.uniform(0, 0.02))


def _overwrite(directory: Path, source: Path) -> Path:
    """Put another skill's files where a name's are now, each by a rename."""
    directory.mkdir(exist_ok=True)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        new = directory / f".{file}.new"
        shutil.copyfile(source / file, new)
        os.replace(new, directory / file)
    return directory


def ask_many(url: str, texts: list[str], history: History, questions: int, seed: int) -> None:
    """Ask one question after another."""
    rng = random.Random(seed)
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
        for _ in range(questions):
            history.asked.append(ask(http, rng.choice([*history.changes]), rng.choice(texts)))


def ask(http: httpx.Client, name: str, text: str) -> Asked:
    """Stream one answer; the version is chosen before the first token comes."""
    body = {"model": name, "prompt": text + "\n", "temperature": 0, "max_tokens": MAX_TOKENS, "stream": True}
    begin, end, answer, cut = time.monotonic(), None, "", None
    with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            return Asked(name, text, begin, time.monotonic(), response.status_code, "", None)
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            end = end or time.monotonic()
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                cut = event["error"]["message"]
            for choice in event.get("choices", ()):
                answer += choice["text"]
    return Asked(name, text, begin, end or time.monotonic(), 200, answer, cut)


def run(names: int, clients: int, questions: int, seed: int, memory_bytes: int) -> tuple[History, list[str]]:
    """Let it happen; the history, and what in it is wrong."""
    rng = random.Random(seed)
    texts = [sample_inputs("reverse", 1, rng.randrange(1 << 30))[0] for _ in range(6)]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for skill in SKILLS:
            shutil.copytree(BUILTIN_ADAPTERS / skill, root / skill)
        settings = Settings(
            adapters=root, memory_bytes=memory_bytes, host_cache_bytes=64 << 20, threads=1, log_level="warning"
        )
        with serving(build_app(settings), settings) as url, httpx.Client(base_url=url, trust_env=False) as http:
            expected = {(skill, text): ask(http, skill, text).answer for skill in SKILLS for text in texts}
            history = History({f"voice-{i}": [Change(0.0, 0.0, None)] for i in range(names)})
            stop = threading.Event()
            with ThreadPoolExecutor(names + clients) as pool:
                operators = [
                    pool.submit(change_until, stop, url, name, root, history, seed + i)
                    for i, name in enumerate(history.changes)
                ]
                askers = [
                    pool.submit(ask_many, url, texts, history, questions, seed + 1000 + i) for i in range(clients)
                ]
                wait(askers)
                stop.set()
    for each in (*operators, *askers):
        each.result()
    return history, history.wrong(expected)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chorus.perf.chaos.history", description=__doc__.split("\n")[0])
    parser.add_argument("--names", type=int, default=3, help="adapter names that change (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=8, help="clients at once (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=200, help="of each client (default: %(default)s)")
    parser.add_argument("--memory-bytes", type=int, default=4 << 20, help="of the arena (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    history, wrong = run(args.names, args.clients, args.questions, args.seed, args.memory_bytes)
    for line in wrong[:20]:
        print(line)
    answered = sum(asked.status == 200 for asked in history.asked)
    changes = sum(len(changes) - 1 for changes in history.changes.values())
    print(f"model {BUILTIN_NAME}: {len(history.asked)} requests, {answered} answered, {changes} changes")
    print(json.dumps({"requests": len(history.asked), "answered": answered, "changes": changes, "wrong": len(wrong)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
