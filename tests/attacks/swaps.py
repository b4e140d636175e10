"""Swaps one adapter under load: every answer is of one version whole, and of the one that its header names.

    python -m tests.attacks.swaps --swaps 1000
    python -m tests.attacks.swaps --swaps 200 --cluster 2

Versions come as bytes, in forms and in JSON, and from one directory that is overwritten, while clients ask for the
newest version and for kept ones, with and without streams; with `--mode-policy fastest`, too. Then the server is killed
in the middle of swaps and restarted: the name and its kept versions must mean the content of the last answer, or of the
swap in progress. Prints a line for each part and one line of JSON; exits with 1 unless all of it held.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from chorus.perf.report.command import conclude, parser, say
from chorus.perf.serving.server_process import LaunchedServer, launched
from chorus.server.demo.builtin import BUILTIN_ADAPTERS
from tests.processes import rss

FILES = ("adapter_config.json", "adapter_model.safetensors")
NAME = "policy"
KEEP = 3
MAX_TOKENS = 12
HEADER = "x-chorus-adapter"
FLAGS = ["--threads", "1", "--memory-bytes", str(64 << 20)]
TIMEOUT = 120.0


@dataclass
class Swaps:
    """Versions of one adapter on a live server, with the expected answers.

    contents: directories, each another content. prompts: token ids. most_pages: of any content. told: content by label,
    of each load that was answered; a load under way has its own in `coming`.
    """

    url: str
    contents: Sequence[Path]
    prompts: Sequence[list[int]]
    root: Path
    more: dict[str, Any] = field(default_factory=dict)
    answers: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    hashes: list[str] = field(default_factory=list)
    told: dict[str, str] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    coming: str | None = None
    most_pages: int = 0
    wrong: list[str] = field(default_factory=list)
    num_answers: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)

    def learn(self) -> None:
        """Ask for every content's answers while nothing else happens."""
        with self.client() as client:
            for content, path in enumerate(self.contents):
                response = _form(client, f"calm-{content}", path)
                self.hashes.append(response.headers[HEADER].partition("sha256=")[2])
                for number, prompt in enumerate(self.prompts):
                    asked = {**self._body(prompt), "model": f"calm-{content}"}
                    answer = client.post("/v1/completions", json=asked).raise_for_status().json()
                    self.answers[self.hashes[content], number] = answer["choices"][0]["token_ids"]
                pages = client.get(f"/v1/adapters/calm-{content}").raise_for_status().json()["pages"]
                self.most_pages = max(self.most_pages, pages)
                client.delete(f"/v1/adapters/calm-{content}").raise_for_status()

    def load(self, client: httpx.Client, number: int) -> None:
        """Make the next content the newest version, in one of three ways."""
        content = number % len(self.contents)
        path, self.coming = self.contents[content], self.hashes[content]
        if number % 3 == 0:
            response = _form(client, NAME, path)
        elif number % 3 == 1:
            config, weights = ((path / file).read_bytes() for file in FILES)
            sent = {"adapter_config": json.loads(config), "adapter_model": base64.b64encode(weights).decode()}
            sent |= {"lora_name": f"{NAME}@step-{number}", "keep_versions": KEEP}
            response = client.post("/v1/load_lora_adapter", json=sent)
        else:
            shutil.copytree(path, self.root / "pushed", dirs_exist_ok=True)
            sent = {"name": NAME, "path": str(self.root / "pushed"), "keep_versions": KEEP}
            response = client.post("/v1/adapters", json=sent)
        response.raise_for_status()
        label, content_hash = _told(response.headers[HEADER])
        self.told[label], self.coming = content_hash, None
        self.order.append(label)
        if content_hash != self.hashes[content]:
            self.wrong.append(f"load {number} told {content_hash}")

    def run(self, swaps: int, clients: int) -> None:
        """Swap under load."""
        with self.client() as client:
            self.load(client, 0)
            threads = [threading.Thread(target=self._ask_on, args=(seed,), daemon=True) for seed in range(clients)]
            for thread in threads:
                thread.start()
            try:
                for number in range(1, swaps):
                    self.load(client, number)
            finally:
                self.stopped.set()
                for thread in threads:
                    thread.join(TIMEOUT)

    def check(self, label: str, content_hash: str, prompt: int, tokens: list[int]) -> None:
        """Compare an answer with the content that its header names, and the header with the response to the load."""
        self.num_answers += 1
        if self.told.get(label, self.coming or content_hash) not in (content_hash, self.coming):
            self.wrong.append(f"{label} is {self.told[label]} and answered as {content_hash}")
        if self.answers.get((content_hash, prompt)) != tokens:
            self.wrong.append(f"{label} of content {content_hash} answered {tokens} to prompt {prompt}")

    def _ask_on(self, seed: int) -> None:
        draw = random.Random(seed)
        with self.client() as client:
            while not self.stopped.is_set():
                prompt = draw.randrange(len(self.prompts))
                by_label = [one for one in self.order[-KEEP:] if one.startswith("step-")] if draw.random() < 0.3 else []
                model = f"{NAME}@{draw.choice(by_label)}" if by_label else NAME
                with suppress(httpx.TransportError):
                    self.ask(client, model, prompt, stream=draw.random() < 0.5)

    def ask(self, client: httpx.Client, model: str, prompt: int, *, stream: bool) -> None:
        asked = {**self._body(self.prompts[prompt]), "model": model, "stream": stream}
        response = client.post("/v1/completions", json=asked)
        if response.status_code == 404 and model != NAME:
            return  # it was retired meanwhile
        if response.status_code != 200:
            self.wrong.append(f"{model}: {response.status_code} {response.text[:200]}")
            return
        if stream:
            tokens = [token for one in _events(response) for token in one["choices"][0]["token_ids"]]
        else:
            tokens = response.json()["choices"][0]["token_ids"]
        self.check(*_told(response.headers[HEADER]), prompt, tokens)

    def _body(self, prompt: list[int]) -> dict[str, Any]:
        asked = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return {"prompt": prompt, **asked, **self.more}

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=TIMEOUT, trust_env=False)


def _form(client: httpx.Client, name: str, path: Path) -> httpx.Response:
    files = {file: (file, (path / file).read_bytes()) for file in FILES}
    data = {"lora_name": name, "keep_versions": str(KEEP)}
    return client.post("/v1/load_lora_adapter", data=data, files=files).raise_for_status()


def _told(header: str) -> tuple[str, str]:
    """The version's label and its content hash."""
    version, _, content_hash = header.partition("; sha256=")
    return version.rpartition("@")[2], content_hash


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.text.split("\n\n"):
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def held(url: str) -> dict[str, int]:
    """The versions and pages of the adapter that a server holds while no request runs."""
    listed = httpx.get(f"{url}/v1/adapters", timeout=TIMEOUT, trust_env=False).raise_for_status().json()["data"]
    listed = [one for one in listed if one["name"].startswith(NAME)]
    return {"versions": len(listed), "pages": sum(one["pages"] for one in listed)}


def _flags(root: Path, cluster: int) -> list[str]:
    more = ["--adapter-uploads", str(root / "uploads"), "--adapter-roots", str(root)]
    return [*FLAGS, *more, *(["--replicas", str(cluster)] if cluster else [])]


def _prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(97, 123) for _ in range(length)] for length in (5, 9, 17, 40)]


def under_load(root: Path, swaps: int, clients: int, cluster: int, flags: Sequence[str]) -> dict[str, Any]:
    """One server, to its end; it then holds no more than `KEEP` versions, of the pages of the largest."""
    contents = sorted(BUILTIN_ADAPTERS.iterdir())[:4]
    with launched([*_flags(root, cluster), *flags], command=_command(cluster)) as server:
        life = Swaps(server.url, contents, _prompts(), root)
        life.learn()
        life.run(max(12, swaps // 10), clients)
        before, resident = held(server.url), rss(server.pid)
        life.stopped.clear()
        began = time.monotonic()
        life.run(swaps, clients)
        seconds = time.monotonic() - began
        time.sleep(3)  # the next upload cleanup removes versions of the last requests
        after = held(server.url)
        directories = [path for path in (root / "uploads").iterdir() if path.is_dir()]
        return {
            "swaps": swaps,
            "seconds": seconds,
            "answers": life.num_answers,
            "wrong": life.wrong[:5],
            "held": [before, after],
            "directories": len(directories),
            "mib_more": (rss(server.pid) - resident) / 2**20,
            "ok": not life.wrong
            and after["versions"] <= KEEP
            and len(directories) <= KEEP + 1
            and after["pages"] <= KEEP * life.most_pages,
        }


def killed(root: Path, times: int, cluster: int) -> dict[str, Any]:
    """Kill a server in the middle of swaps, restart it and check the meaning of its names."""
    contents = sorted(BUILTIN_ADAPTERS.iterdir())[:4]
    draw, told, wrong = random.Random(1), [], []
    life: Swaps | None = None
    for turn in range(times):
        with launched(_flags(root, cluster), command=_command(cluster)) as server:
            if life is None:
                life = Swaps(server.url, contents, _prompts(), root)
                life.learn()
            else:
                wrong += _after_a_kill(server, life)
            life.url, life.stopped = server.url, threading.Event()
            thread = threading.Thread(target=_swap_on, args=(life, turn), daemon=True)
            count = len(life.order)
            thread.start()
            while len(life.order) < count + 5:
                time.sleep(0.01)
            time.sleep(draw.random() * 0.2)
            server.process.kill()
            thread.join(TIMEOUT)
            told.append(len(life.order))
    wrong += [] if life is None else life.wrong
    return {"kills": times, "swaps": told[-1], "wrong": wrong, "ok": not wrong}


def _swap_on(life: Swaps, turn: int) -> None:
    with life.client() as client, suppress(httpx.TransportError):
        for number in range(1000 * turn, 1000 * turn + 1000):
            life.load(client, number if number % 3 != 2 else number + 1)


def _after_a_kill(server: LaunchedServer, life: Swaps) -> list[str]:
    wrong = []
    with httpx.Client(base_url=server.url, timeout=TIMEOUT, trust_env=False) as client:
        listed = client.get("/v1/adapters").raise_for_status().json()["data"]
        listed = {one["name"]: one for one in listed if one["name"].startswith(NAME)}
        newest = listed.get(NAME)
        allowed = {life.told[life.order[-1]], life.coming}
        if newest is None or newest["content_hash"] not in allowed:
            wrong.append(f"{NAME} is {newest and newest['content_hash']}, not one of {allowed}")
        for name, one in listed.items():
            label = str(one["version"])
            if life.told.get(label, one["content_hash"]) != one["content_hash"]:
                wrong.append(f"{name} is {one['content_hash']}, it was {life.told[label]}")
            before = life.num_answers, len(life.wrong)
            life.ask(client, name, 0, stream=False)
            if life.num_answers == before[0]:
                wrong.append(f"{name} did not answer")
        wrong += [f"{label} is gone" for label in life.order[-KEEP + 1 :] if not _has(listed, label)]
    return wrong


def _has(listed: dict[str, Any], label: str) -> bool:
    return any(str(one["version"]) == label for one in listed.values())


def _command(cluster: int) -> Sequence[str]:
    return ("cluster", "up") if cluster else ("serve",)


def main(argv: Sequence[str] | None = None) -> int:
    flags = parser(__spec__, __doc__ or "")
    flags.add_argument("--swaps", type=int, default=1000, help="swaps in each mode")
    flags.add_argument("--clients", type=int, default=4, help="clients that ask meanwhile")
    flags.add_argument("--kills", type=int, default=4, help="times that the server is killed")
    flags.add_argument("--cluster", type=int, default=0, help="replicas of a cluster; 0: one process")
    given = flags.parse_args(argv)
    result: dict[str, Any] = {}
    for name, more in (("lora", []), *([] if given.cluster else [("merged", ["--mode-policy", "fastest"])])):
        with tempfile.TemporaryDirectory() as root:
            result[name] = under_load(Path(root), given.swaps, given.clients, given.cluster, more)
            say(f"{name}: {result[name]}")
    with tempfile.TemporaryDirectory() as root:
        result["killed"] = killed(Path(root), given.kills, given.cluster)
        say(f"killed: {result['killed']}")
    return conclude(result, all(one["ok"] for one in result.values()))


if __name__ == "__main__":
    sys.exit(main())
