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


class _Operator(threading.Thread):
    """Changes one name, again and again."""

    def __init__(self, url: str, name: str, root: Path, history: History, stop: threading.Event, seed: int) -> None:
        super().__init__(name=f"operator-{name}", daemon=True)
        self._http = httpx.Client(base_url=url, timeout=60, trust_env=False)
        self._name, self._root, self._history, self._stopped = name, root, history, stop
        self._rng = random.Random(seed)
        self._directory = root / f"{name}-live"
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stopped.is_set():
                self.change()
                time.sleep(self._rng.uniform(0, 0.02))
        except BaseException as error:
            self.error = error

    def change(self) -> None:
        skill = self._rng.choice([*SKILLS, *SKILLS, None])
        begin = time.monotonic()
        if skill is None:
            response = self._http.delete(f"/v1/adapters/{self._name}")
            accepted = response.status_code in (200, 404)
        else:
            path = self._root / skill if self._rng.random() < 0.5 else self._overwrite(skill)
            response = self._http.post("/v1/adapters", json={"name": self._name, "path": str(path)})
            accepted = response.status_code in (200, 201)
        if not accepted:
            raise RuntimeError(f"{self._name} to {skill}: {response.status_code} {response.text}")
        self._history.changes[self._name].append(Change(begin, time.monotonic(), skill))

    def _overwrite(self, skill: str) -> Path:
        """Put another skill's files where this name's are now, each by a rename."""
        self._directory.mkdir(exist_ok=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            new = self._directory / f".{file}.new"
            shutil.copyfile(self._root / skill / file, new)
            os.replace(new, self._directory / file)
        return self._directory


class _Client(threading.Thread):
    """Asks one question after another."""

    def __init__(self, url: str, texts: list[str], history: History, questions: int, seed: int) -> None:
        super().__init__(name=f"client-{seed}", daemon=True)
        self._http = httpx.Client(base_url=url, timeout=120, trust_env=False)
        self._texts, self._history, self._questions = texts, history, questions
        self._rng = random.Random(seed)
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for _ in range(self._questions):
                name, text = self._rng.choice([*self._history.changes]), self._rng.choice(self._texts)
                self._history.asked.append(ask(self._http, name, text))
        except BaseException as error:
            self.error = error


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
            operators = [_Operator(url, name, root, history, stop, seed + i) for i, name in enumerate(history.changes)]
            askers = [_Client(url, texts, history, questions, seed + 1000 + i) for i in range(clients)]
            for thread in (*operators, *askers):
                thread.start()
            for asker in askers:
                asker.join()
            stop.set()
            for operator in operators:
                operator.join()
    for thread in (*operators, *askers):
        if thread.error is not None:
            raise thread.error
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
