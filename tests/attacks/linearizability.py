"""Linearizability test of adapter versions: `python -m tests.attacks.linearizability`.

A real server on the built-in model, with adapters of one skill each. Operators load, reload in place and delete
adapters under a few names while clients send requests to them. Every change and every answer is recorded with the
times between which it happened. Afterwards each answer must be, character by character, the one of a version that could
be served at some moment between the request and its first token: after a 200 on a load or a delete, no request gets the
old version.
"""

from __future__ import annotations

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

from chorus.perf.report.command import conclude, parser
from chorus.perf.serving.server_process import launched
from chorus.server.demo.builtin import BUILTIN_ADAPTERS
from chorus.server.demo.skills import SKILLS, sample_inputs

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
    """All changes and answers, by name."""

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


def change_until(stop: threading.Event, http: httpx.Client, name: str, root: Path, history: History, seed: int) -> None:
    """Load, reload in place and delete one name, again and again."""
    rng = random.Random(seed)
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


def ask(http: httpx.Client, name: str, text: str) -> Asked:
    """Stream one answer; the version is chosen before the first token comes."""
    body = {"model": name, "prompt": text + "\n", "temperature": 0, "max_tokens": MAX_TOKENS, "stream": True}
    asked, begun, parts, cut = time.monotonic(), None, [], "the stream ended before the answer did"
    with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            return Asked(name, text, asked, time.monotonic(), response.status_code, "", None)
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                cut = str(chunk["error"])
                break
            for choice in chunk["choices"]:
                begun = begun or time.monotonic()
                parts.append(choice["text"])
                cut = None if choice["finish_reason"] else cut
    return Asked(name, text, asked, begun or time.monotonic(), 200, "".join(parts), cut)


def run(names: int, clients: int, questions: int, seed: int, memory_bytes: int) -> tuple[History, list[str]]:
    """Run it; return the history, and each violation in it."""
    rng = random.Random(seed)
    texts = [sample_inputs("reverse", 1, rng.randrange(1 << 30))[0] for _ in range(6)]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for skill in SKILLS:
            shutil.copytree(BUILTIN_ADAPTERS / skill, root / skill)
        flags = ["--adapters", str(root), "--memory-bytes", str(memory_bytes), "--host-cache-bytes", "64MiB"]
        with (
            launched([*flags, "--threads", "1"]) as server,
            httpx.Client(base_url=server.url, timeout=120, trust_env=False) as http,
        ):
            expected = {(skill, text): ask(http, skill, text).answer for skill in SKILLS for text in texts}
            history = History({f"voice-{i}": [Change(0.0, 0.0, None)] for i in range(names)})
            stop = threading.Event()
            with ThreadPoolExecutor(names + clients) as pool:
                operators = [
                    pool.submit(change_until, stop, http, name, root, history, seed + i)
                    for i, name in enumerate(history.changes)
                ]
                asked = [
                    pool.submit(ask, http, rng.choice([*history.changes]), rng.choice(texts))
                    for _ in range(clients * questions)
                ]
                wait(asked)
                stop.set()
    for each in operators:
        each.result()
    history.asked += [each.result() for each in asked]
    return history, history.wrong(expected)


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--names", type=int, default=3, help="adapter names that change")
    command.add_argument("--clients", type=int, default=8, help="clients at once")
    command.add_argument("--questions", type=int, default=200, help="of each client")
    command.add_argument("--memory-bytes", type=int, default=4 << 20, help="of the arena")
    command.add_argument("--seed", type=int, default=0)
    args = command.parse_args(argv)
    history, wrong = run(args.names, args.clients, args.questions, args.seed, args.memory_bytes)
    print(*wrong[:20], sep="\n")
    answered = sum(asked.status == 200 for asked in history.asked)
    changes = sum(len(changes) - 1 for changes in history.changes.values())
    counts = {"requests": len(history.asked), "answered": answered, "changes": changes, "wrong": len(wrong)}
    return conclude(counts, not wrong)


if __name__ == "__main__":
    sys.exit(main())
