"""Damaged requests against a real server while adapters come and go: `python -m tests.attacks.fuzz`.

Clients send mutants of requests to every route, one after another, and a valid greedy question after each. A mutant
must be answered with success, a 4xx or a 503, and an error must have OpenAI's shape. A question's answer must be the
one that it gets alone. At the end the answers of greedy mutants are compared with the same requests sent alone. The
accounting invariants must hold (the engine checks them whenever it idles), and no thread, descriptor, page or memory
may leak.

    python -m tests.attacks.fuzz --requests 25000 --first 0
    python -m tests.attacks.fuzz --requests 1 --first 4711 --show     # one mutant again
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from chorus.perf.report.command import conclude, parser
from chorus.perf.serving.server_process import LaunchedServer, launched
from chorus.server.demo.builtin import BUILTIN_ADAPTERS
from chorus.server.demo.skills import BASE, SKILLS, prompt, sample_inputs
from tests.processes import descriptors, num_threads, rss

from .exchange import NoAnswer, exchange
from .mutants import Call, Mutant, mutant, other_calls, questions, structured_calls

MAX_MORE = {"descriptors": 0, "threads": 32, "bytes": 64 << 20}
"""Growth that a run may cause; the server's pools may start threads when they are needed first."""
PATIENCE = "--head-seconds", "--body-seconds", "--send-seconds", "--stall-seconds", "--give-up-seconds"
"""Timeouts, made long: the machine may stop server and clients for a while, which is no fault of the server."""
MAX_SHOWN = 20


@dataclass
class Found:
    """Observations of a run. again: greedy mutants that were answered, with the answer."""

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    again: dict[bytes, tuple[Mutant, Any]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str) -> None:
        with self.lock:
            self.counts[name] += 1

    def violation(self, text: str) -> None:
        with self.lock:
            self.violations.append(text)
            if len(self.violations) <= MAX_SHOWN:
                print(text, flush=True)


class Fuzz:
    """One server, its adapters and its clients."""

    def __init__(self, server: LaunchedServer, root: Path, spare: Path, seed: int, num_questions: int) -> None:
        self.server, self.root, self.spare = server, root, spare
        self.found = Found()
        self.seed = seed
        self._stop = threading.Event()
        names = [None, *sorted(path.name for path in root.iterdir())]
        texts = sample_inputs(BASE, 3, seed) + sample_inputs(SKILLS["reverse"], 3, seed)
        texts += [" ".join(texts[index:]) for index in range(2)]
        prompts = [prompt(text) for text in texts]  # the same for all, so that they meet in the prefix cache
        self._questions = list(questions(dict.fromkeys(names, prompts), seed, num_questions))
        self.calls = [*self._questions[:80], *2 * other_calls("spare", str(spare / "good")), *2 * structured_calls()]
        self.calls += [
            call for directory in sorted(spare.iterdir()) for call in other_calls("odd", str(directory))[-4:]
        ]
        self._right: list[Any] = []

    def prepare(self) -> None:
        """Ask everything alone, and each from an empty cache: nothing of another's can be in its answer."""
        for index, call in enumerate(self._questions):
            body = {**(call.body or {}), "cache_salt": f"alone {index}"}
            self._right.append(self._alone(Call(call.method, call.path, body).raw()))

    def _alone(self, raw: bytes) -> Any:
        answer = exchange(self.server.address, raw)
        return answer.essence() if answer.status == 200 else answer.status

    def run(self, first: int, count: int, clients: int) -> dict[str, int]:
        """Send the mutants, then return the descriptors, threads and bytes that the server has in addition."""
        before, more = self._held(), {}
        try:
            self._attack_all(range(first, first + count), clients)
            self._ask_again()
            self._check_books()
            for _ in range(100):
                time.sleep(0.1 if self._held()["descriptors"] > before["descriptors"] else 0)
            more = {name: now - before[name] for name, now in self._held().items()}
        except (NoAnswer, OSError) as error:
            self.found.violation(f"the server is gone: {error}")
        if any(more.get(name, 0) > most for name, most in MAX_MORE.items()):
            self.found.violation(f"more than before: {more}")
        return more

    def _held(self) -> dict[str, int]:
        server = self.server
        return {
            "descriptors": len(descriptors(server.pid)),
            "threads": num_threads(server.pid),
            "bytes": rss(server.pid),
        }

    def _attack_all(self, numbers: range, clients: int) -> None:
        """Send the mutants, a question after each, while adapters change."""
        changes = threading.Thread(target=self._guarded, args=(self._change_adapters,), daemon=True)
        changes.start()
        with ThreadPoolExecutor(clients) as pool:
            for number in numbers:
                pool.submit(self._guarded, self._call, number)
        self._stop.set()
        changes.join()

    def _guarded(self, job: Callable[..., None], *args: Any) -> None:
        try:
            job(*args)
        except Exception as error:
            self.found.violation(f"a client broke: {type(error).__name__}: {error}")

    def _call(self, number: int) -> None:
        if len(self.found.violations) <= MAX_SHOWN:
            self._attack(mutant(number, self.calls))
            self._ask(random.Random(f"{self.seed} {number}"))

    def _attack(self, one: Mutant) -> None:
        again = f"again: python -m tests.attacks.fuzz --requests 1 --seed {self.seed} --first {one.number} --show"
        try:
            answer = exchange(self.server.address, one.raw, one.may_wait)
        except NoAnswer as error:
            if not one.may_wait or "hangs" in str(error):
                self.found.violation(f"mutant {one.number}, {one.path}: {error}; {again}")
            self.found.count("closed without an answer")
            return
        self.found.count(f"mutants answered with {answer.status}")
        if fault := answer.fault():
            self.found.violation(f"mutant {one.number}, {one.path}: {fault}; {again}")
        elif answer.status == 200 and one.is_greedy and not one.may_wait:
            try:
                essence = answer.essence()
            except (ValueError, KeyError, TypeError) as error:
                self.found.violation(f"mutant {one.number}, {one.path}: {error!r} in {answer.body[:300]!r}; {again}")
            else:
                with self.found.lock:
                    self.found.again[one.raw] = one, essence

    def _ask(self, draw: random.Random) -> None:
        """Ask until there is an answer; a refusal says that the adapter is away, or that too many wait."""
        for _ in range(50):
            index = draw.randrange(len(self._questions))
            call = self._questions[index]
            try:
                answer = exchange(self.server.address, call.raw())
            except NoAnswer as error:
                self.found.violation(f"question {index}, {call.body}: {error}")
                return
            if answer.status == 200:
                self.found.count("answers")
                if (said := answer.essence()) != self._right[index]:
                    self.found.violation(f"question {index}, {call.body}: {said} instead of {self._right[index]}")
                return
            self.found.count(f"questions refused with {answer.status}")
            away = answer.status == 404 and "model" in (call.body or {})
            if not away and answer.status not in (429, 503):
                self.found.violation(f"question {index}, {call.body}: {answer.status} {answer.body[:300]!r}")
            time.sleep(0.01)

    def _change_adapters(self) -> None:
        """Replace and remove adapters, so that each name means the same skill whenever it is there."""
        draw = random.Random(self.seed)
        names = sorted(path.name for path in self.root.iterdir())
        while not self._stop.wait(draw.uniform(0, 0.1)):
            name = draw.choice(names)
            path = str(draw.choice([self.root, self.spare]) / (name if draw.random() < 0.9 else "nowhere"))
            loads = [
                Call("POST", "/v1/adapters", {"name": name, "path": path}),
                Call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, "load_inplace": True}),
            ]
            call = draw.choice([*4 * loads, Call("DELETE", f"/v1/adapters/{name}")])
            answer = exchange(self.server.address, call.raw())
            self.found.count(f"adapter changes with {answer.status}")
            if fault := answer.fault():
                self.found.violation(f"{call}: {fault}")

    def _ask_again(self) -> None:
        """Send the answered greedy mutants again, alone, and each question once more, with all adapters loaded."""
        self._remove_adapters()  # mutants loaded different adapters under the same names
        for path in sorted(self.root.iterdir()):
            call = Call("POST", "/v1/adapters", {"name": path.name, "path": str(path)})
            if (answer := exchange(self.server.address, call.raw())).status != 201:
                self.found.violation(f"{path.name} can't be loaded any more: {answer.status} {answer.body[:300]!r}")
        for raw, (one, said) in self.found.again.items():
            if (alone := self._alone(raw)) == said:
                self.found.count("answers of mutants")
            elif alone == 404:
                self.found.count("answers of adapters that mutants loaded")
            elif alone == self._alone(raw):
                self.found.violation(f"mutant {one.number}, {one.raw!r:.600}: {said}, but alone {alone}")
            else:
                self.found.count("mutants without one answer")
        for call, right in zip(self._questions, self._right, strict=True):
            if (said := self._alone(call.raw())) != right:
                self.found.violation(f"afterwards {call.body} is answered with {said} instead of {right}")

    def _remove_adapters(self) -> None:
        for one in json.loads(exchange(self.server.address, Call("GET", "/v1/adapters").raw()).body)["data"]:
            answer = exchange(self.server.address, Call("DELETE", f"/v1/adapters/{quote(one['name'])}").raw())
            if answer.status != 200:
                self.found.violation(f"{one['name']} can't be removed: {answer.status} {answer.body[:300]!r}")

    def _check_books(self) -> None:
        """Nothing is used any more: the engine is well, and all pages come back once the adapters are gone."""
        self._remove_adapters()
        time.sleep(1.1)  # the engine checks itself once a second, when it is called and has nothing else to do
        exchange(self.server.address, Call("GET", "/v1/models").raw())
        answer = exchange(self.server.address, Call("GET", "/health").raw())
        stats = json.loads(answer.body)["stats"]
        used = {name: stats[name] for name in ("num_running", "num_waiting", "num_kv_pages", "num_adapter_pages")}
        if answer.status != 200 or any(used.values()):
            self.found.violation(f"afterwards /health says {answer.body!r}")
        if stats["num_free_pages"] + stats["num_cached_pages"] != stats["num_pages"]:
            self.found.violation(f"pages were lost: {stats}")


def directories(where: Path) -> tuple[Path, Path]:
    """The adapters that are served, and others that may be loaded, among them some that can't be served."""
    root, spare = where / "served", where / "spare"
    for path in sorted(BUILTIN_ADAPTERS.iterdir()):
        if path.is_dir():
            shutil.copytree(path, root / path.name)
            shutil.copytree(path, spare / path.name)
    some = next(root.iterdir())
    shutil.copytree(some, spare / "good")
    shutil.copytree(some, spare / "cut")
    weights = spare / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (spare / "empty").mkdir()
    shutil.copytree(some, spare / "no-config").joinpath("adapter_config.json").write_text('{"r": "many"}')
    return root, spare


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--requests", type=int, default=25_000, help="mutants")
    command.add_argument("--first", type=int, default=0, help="the first mutant's number")
    command.add_argument("--seed", type=int, default=0, help="what questions and changes of adapters are drawn from")
    command.add_argument("--clients", type=int, default=8, help="clients at once")
    command.add_argument("--questions", type=int, default=240, help="that differ")
    command.add_argument("--show", action="store_true", help="print each mutant's bytes and its answer")
    args = command.parse_args(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chorus-fuzz-") as where:
        root, spare = directories(Path(where))
        flags = [
            "--adapters",
            str(root),
            "--adapter-roots",
            f"{root}:{spare}",
            "--memory-bytes",
            "4MiB",
            "--threads",
            "1",
            "--block-tokens",
            "4",
            "--host-cache-bytes",
            "1MiB",
            "--max-waiting",
            "64",
            *(word for name in PATIENCE for word in (name, "900")),
        ]
        with launched(flags) as server:
            fuzz = Fuzz(server, root, spare, args.seed, args.questions)
            fuzz.prepare()
            for number in range(args.first, args.first + args.requests if args.show else 0):
                one = mutant(number, fuzz.calls)
                print(number, one.raw, exchange(server.address, one.raw, one.may_wait), sep="\n", flush=True)
            more = fuzz.run(args.first, args.requests, args.clients)
    found = fuzz.found
    answers = found.counts["answers"] + found.counts["answers of mutants"]
    result = {
        "ok": not found.violations,
        "requests": args.requests,
        "answers": answers,
        "first": args.first,
        "violations": len(found.violations),
        **more,
        "seconds": round(time.monotonic() - began, 1),
        "counts": dict(sorted(found.counts.items())),
    }
    return conclude(result, result["ok"])


if __name__ == "__main__":
    sys.exit(main())
