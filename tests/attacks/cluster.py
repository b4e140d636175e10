"""Answers of a cluster while replicas are killed: right, lost and stale ones, and requests that went on elsewhere.

    python -m tests.attacks.cluster --check
    python -m tests.attacks.cluster --check --api-servers 2 --api-server-kill-seconds 30
    python -m tests.attacks.cluster --check --api-servers 2 --uploads --registry-kill-seconds 25 --full-disk-seconds 40

`chorus cluster up` serves the built-in model. Clients ask for its skills, and for long answers that outlive a replica;
every answer is compared with the one that the same cluster gave before. Meanwhile one replica after another is killed
(-9), and an adapter is replaced under its name: a request that was sent after the answer to a reload must have the
content of that reload, or of a later one. API servers are killed, too, where there are several: a client whose
connection breaks just then asks again, as `cut` counts. With `--uploads` adapters are uploaded; the registry may be
killed, and the disk be full for some seconds. In the end no replica may still hold a request or a page of KV, every API
server must serve the last content, and no uploaded adapter may be gone.
"""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import httpx

from chorus.perf.report.command import judge, parser, say
from chorus.perf.report.table import Goal, Table
from chorus.perf.serving.server_process import LaunchedServer, launched
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_NAME
from chorus.server.demo.questions import skill_questions

RELOADED = "reloaded"
"""Name of the adapter that is replaced again and again, by each of `CONTENTS` in turn."""

CONTENTS = ("reverse", "upper", "rot13")
QUESTIONS, LONG_QUESTIONS, LONG_TOKENS = 6, 6, 250
TIMEOUT_SECONDS = 120.0


@dataclass
class Reloads:
    """Contents of the reloaded adapter, in order; `begun` reloads may be seen, `ended` ones must be."""

    begun: int = 0
    ended: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @staticmethod
    def content(number: int) -> str:
        return CONTENTS[number % len(CONTENTS)]


AGAIN_SECONDS = 0.1
"""Seconds before a client asks again where an API server was killed, or the registry was away."""

CUT_SECONDS = 5.0
"""Seconds from the death of an API server in which it may be the reason for a broken connection."""

REST_SECONDS = 60.0
"""Seconds that replicas may take to be all there, and without work, once clients ask no more."""


MOVES_SECONDS = 2.0
"""Seconds between two looks at the counts of the API servers."""

HELD = ("chorus_requests_running", "chorus_requests_waiting", 'chorus_pages{kind="kv"}')
"""Metrics of the slots, pages and adapters that replicas hold for requests."""

FILES = ("adapter_config.json", "adapter_model.safetensors")
KEPT = {f"kept-{index}": content for index, content in enumerate(CONTENTS)}
"""Uploaded adapters that must answer in the end, by name."""

FULL_SECONDS = 3.0
"""Seconds for which the disk is full: no process of the cluster's HTTP side may let a file grow."""

LISTENS = "0A"
"""State of a socket in /proc/net/tcp."""

LAST_ASKS = 12
"""Connections by which every API server of a few is met."""


class Chaos:
    """A cluster under load, with counts of the outcomes of its requests."""

    def __init__(self, server: LaunchedServer, root: Path, api_servers: int, seed: int, uploads: bool = False) -> None:
        """uploads: adapters are sent as bytes, not by their path."""
        self._uploads = uploads
        self.counts: Counter[str] = Counter()
        self.examples: list[str] = []
        self._server = server
        self._api_servers = api_servers
        self._client = httpx.Client(base_url=server.url, timeout=TIMEOUT_SECONDS)
        self._root = root
        self._random = random.Random(seed)
        self._reloads = Reloads()
        self._bodies = [
            body
            for questions in skill_questions(BUILTIN_NAME, QUESTIONS, seed).values()
            for question in questions
            for body in [{**question.body(), "stream": False}]
        ]
        for index in range(LONG_QUESTIONS):
            rest: dict[str, Any] = {"temperature": 1.0, "seed": index} if index % 2 else {"temperature": 0}
            self._bodies.append(
                {
                    "model": (BUILTIN_NAME, *CONTENTS)[index % 4],
                    "prompt": f"long {index}\n",
                    "ignore_eos": True,
                    "max_tokens": LONG_TOKENS,
                    **rest,
                }
            )
        self._expected: list[str] = []
        self._word = "".join(self._random.choices("abcdefghij", k=6))
        self._stop = threading.Event()
        self._api_server_killed_at = -CUT_SECONDS
        self._moves: dict[int, int] = {}  # by the process that counted

    # --- before ---

    def prepare(self) -> None:
        """Ask everything once, while nothing dies."""
        self._reload(0)
        for name, content in KEPT.items() if self._uploads else ():
            self._upload(name, content).raise_for_status()
        self._expected = [self._ask(body) for body in self._bodies]
        self._of_content = {name: self._ask(self._word_body(name)) for name in CONTENTS}
        if len(set(self._of_content.values())) != len(CONTENTS):
            raise RuntimeError(f"the contents give equal answers: {self._of_content}")

    # --- during ---

    def run(
        self,
        seconds: float,
        clients: int,
        kill_seconds: float,
        api_server_kill_seconds: float,
        reload_seconds: float,
        registry_kill_seconds: float = 1e9,
        full_disk_seconds: float = 1e9,
    ) -> None:
        with ThreadPoolExecutor(clients + 6) as threads:
            tasks = [threads.submit(self._load, index) for index in range(clients)]
            tasks.append(threads.submit(self._every, kill_seconds, partial(self._kill, "replica")))
            tasks.append(threads.submit(self._every, api_server_kill_seconds, self._kill_api_server))
            tasks.append(threads.submit(self._every, registry_kill_seconds, partial(self._kill, "registry")))
            tasks.append(threads.submit(self._every, full_disk_seconds, self._fill_disk))
            tasks.append(threads.submit(self._every, reload_seconds, self._reload_next))
            tasks.append(threads.submit(self._every, MOVES_SECONDS, self._note_moves))
            self._stop.wait(seconds)
            self._stop.set()
            for task in tasks:
                task.result()

    def _load(self, index: int) -> None:
        draw = random.Random(index)
        while not self._stop.is_set():
            if draw.random() < 0.3:
                self._ask_reloaded()
                continue
            number = draw.randrange(len(self._bodies))
            self._judge(self._bodies[number], {self._expected[number]}, "wrong")

    def _ask_reloaded(self) -> None:
        with self._reloads.lock:
            first = self._reloads.ended
        body = self._word_body(RELOADED)
        answer = self._answer(body)
        with self._reloads.lock:
            last = self._reloads.begun
        allowed = {self._of_content[Reloads.content(number)] for number in range(first, last + 1)}
        self._count(body, answer, allowed, "stale" if answer in self._of_content.values() else "wrong")

    def _judge(self, body: dict[str, Any], allowed: set[str], otherwise: str) -> None:
        self._count(body, self._answer(body), allowed, otherwise)

    def _count(self, body: dict[str, Any], answer: str | None, allowed: set[str], otherwise: str) -> None:
        kind = "lost" if answer is None else "right" if answer in allowed else otherwise
        self.counts[kind] += 1
        if kind in (otherwise, "lost") and len(self.examples) < 20:
            self.examples.append(f"{kind}: {body['model']} {body['prompt']!r} gave {answer!r}, not {sorted(allowed)}")

    def _kill(self, kind: str) -> None:
        if there := self._server.children(kind):
            os.kill(self._random.choice(there), signal.SIGKILL)
            self.counts[f"{kind} kills"] += 1

    def _kill_api_server(self) -> None:
        """Kill an API server once all of them listen: clients are to find another one."""
        while not self._stop.is_set():
            if self._all_listen():
                self._api_server_killed_at = time.monotonic()
                self._kill("api-server")
                return
            self._stop.wait(AGAIN_SECONDS)

    def _all_listen(self) -> bool:
        """True if each of several API servers listens on the port that they share."""
        sockets = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        here = f":{self._server.address[1]:04X}"
        return sum(where.endswith(here) and state == LISTENS for where, _, state in sockets) >= self._api_servers

    def _reload_next(self) -> None:
        with self._reloads.lock:
            self._reloads.begun += 1
            number = self._reloads.begun
        self._reload(number)
        self.counts["reloads"] += 1
        with self._reloads.lock:
            self._reloads.ended = number

    def _fill_disk(self) -> None:
        """Let no file of the registry and the API servers grow for a while: changes must be refused."""
        limits: dict[int, tuple[int, int]] = {}
        for pid in (*self._server.children("registry"), *self._server.children("api-server")):
            with suppress(ProcessLookupError):
                limits[pid] = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limits[pid][1]))
        self.counts["full disks"] += 1
        time.sleep(FULL_SECONDS)
        for pid, limit in limits.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)

    # --- common ---

    def _upload(self, name: str, content: str) -> httpx.Response:
        files = {file: (file, (self._root / content / file).read_bytes()) for file in FILES}
        return self._client.post("/v1/adapters", data={"name": name}, files=files)

    def _send(self, number: int) -> httpx.Response:
        """Ask for the adapter's next content; each lies in a directory of its own, as running answers keep theirs."""
        content = Reloads.content(number)
        if self._uploads:
            return self._upload(RELOADED, content)
        body = {"lora_name": RELOADED, "lora_path": str(self._root / content), "load_inplace": True}
        return self._client.post("/v1/load_lora_adapter", json=body)

    def _reload(self, number: int) -> None:
        """Replace the adapter's content; a 503 is tried again, as its change was not made."""
        while True:
            began = time.monotonic()
            try:
                answer = self._send(number)
            except httpx.TransportError:
                if not self._is_cut(began):
                    raise
                time.sleep(AGAIN_SECONDS)
                continue
            if answer.is_success:
                return
            if answer.status_code != 503:
                raise RuntimeError(f"a reload failed: {answer.text}")
            time.sleep(AGAIN_SECONDS)

    def _every(self, seconds: float, act: Any) -> None:
        while not self._stop.wait(seconds):
            try:
                act()
            except (httpx.HTTPError, RuntimeError) as error:
                self.counts["lost"] += 1
                self.examples.append(f"lost at {time.strftime('%H:%M:%S')}: {error!r}")

    def _word_body(self, model: str) -> dict[str, Any]:
        return {"model": model, "prompt": f"{self._word}\n", "max_tokens": 12, "temperature": 0}

    def _answer(self, body: dict[str, Any]) -> str | None:
        """The answer's text; None, and an example, for a request that failed."""
        try:
            return self._ask_again_if_cut(body)
        except (httpx.HTTPError, RuntimeError) as error:
            if len(self.examples) < 20:
                self.examples.append(f"lost at {time.strftime('%H:%M:%S')}: {body['model']}: {error!r}")
            return None

    def _ask_again_if_cut(self, body: dict[str, Any]) -> str:
        """Ask; and again, as a client would, where an API server was killed in the middle of the answer."""
        while True:
            began = time.monotonic()
            try:
                return self._ask(body)
            except httpx.TransportError:
                if not self._is_cut(began):
                    raise
                self.counts["cut"] += 1
                time.sleep(AGAIN_SECONDS)

    def _is_cut(self, began: float) -> bool:
        """True if the death of an API server may have broken a connection of a request that began then."""
        return self._api_server_killed_at > began - CUT_SECONDS

    def _ask(self, body: dict[str, Any]) -> str:
        answer = self._client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code} {answer.text}")
        (choice,) = answer.json()["choices"]
        return f"{choice['text']}|{choice['finish_reason']}"

    # --- after ---

    def held(self) -> int:
        """Requests and KV pages that replicas hold for longer than `REST_SECONDS` though no client asks, once all
        processes run.
        """
        deadline = time.monotonic() + REST_SECONDS
        while True:
            is_late, work = time.monotonic() > deadline, -1
            if self._all_listen() or is_late:
                with httpx.Client(base_url=self._server.url, timeout=TIMEOUT_SECONDS) as client:
                    text = client.get("/metrics").text
                is_whole = _metric(text, "chorus_replicas_up") == _metric(text, "chorus_replicas")
                work = sum(_metric(text, name) for name in HELD) if is_whole or is_late else -1
            if work == 0 or is_late:
                return work
            time.sleep(1)

    def check_last_content(self) -> None:
        """Ask every API server for the reloaded adapter: the system picks one for each connection."""
        for _ in range(LAST_ASKS):
            with httpx.Client(base_url=self._server.url, timeout=TIMEOUT_SECONDS) as self._client:
                self._ask_reloaded()

    def num_gone(self) -> int:
        """Uploaded adapters that no longer answer as they did."""
        if not self._uploads:
            return 0
        with httpx.Client(base_url=self._server.url, timeout=TIMEOUT_SECONDS) as self._client:
            answers = {name: self._answer(self._word_body(name)) for name in KEPT}
        return sum(answer != self._of_content[KEPT[name]] for name, answer in answers.items())

    def num_moves(self) -> int:
        """Requests that went on elsewhere, as counted by the API servers; counts made just before a server's death are
        lost.
        """
        for _ in range(LAST_ASKS):
            self._note_moves()
        return sum(self._moves.values())

    def _note_moves(self) -> None:
        """Read the count of the API server that answers."""
        host, port = self._server.address
        connection = HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            pid = self._peer(connection.sock.getsockname()[1])
        except (OSError, HTTPException, AttributeError):  # the API server was killed
            return
        finally:
            connection.close()
        self._moves[pid] = max(self._moves.get(pid, 0), _metric(text, "chorus_requests_moved_total"))

    def _peer(self, port: int) -> int:
        """Process id of the API server at the other end of a connection from a port."""
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[2].rpartition(":")[2], 16) == port:
                for pid in self._server.children("api-server"):
                    if any(os.readlink(one) == f"socket:[{fields[9]}]" for one in Path(f"/proc/{pid}/fd").iterdir()):
                        return pid
        return self._server.pid


def _metric(text: str, name: str) -> int:
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return int(float(found[1])) if found else 0


def main() -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--replicas", type=int, default=3)
    command.add_argument("--clients", type=int, default=8, help="requests at once")
    command.add_argument("--seconds", type=float, default=300, help="of load")
    command.add_argument("--kill-seconds", type=float, default=20, help="between two kills")
    command.add_argument("--ray", metavar="ADDRESS", help="place replicas on a Ray cluster: local")
    command.add_argument("--api-servers", type=int, default=1)
    command.add_argument(
        "--api-server-kill-seconds", type=float, default=1e9, help="between two kills of an API server"
    )
    command.add_argument("--reload-seconds", type=float, default=3, help="between two reloads")
    command.add_argument("--uploads", action="store_true", help="send adapters as bytes")
    command.add_argument("--registry-kill-seconds", type=float, default=1e9, help="between two kills of the registry")
    command.add_argument("--full-disk-seconds", type=float, default=1e9, help="between two times that a disk is full")
    command.add_argument("--policy", default="least-delay", help="which replica gets a request")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--check", action="store_true", help="exit with 1 unless every answer was right")
    args = command.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for name in CONTENTS:
            shutil.copytree(BUILTIN_ADAPTERS / name, root / name)
        flags = ["--replicas", str(args.replicas), "--policy", args.policy, "--threads", "1"]
        flags += ["--api-servers", str(args.api_servers), "--adapter-roots", str(root)]
        flags += [] if args.ray is None else ["--ray", args.ray]
        flags += ["--adapter-uploads", str(root / "uploads")] if args.uploads else []
        with launched(flags, command=("cluster", "up")) as server:
            chaos = Chaos(server, root, args.api_servers, args.seed, args.uploads)
            chaos.prepare()
            say(f"{args.replicas} replicas are there; killing one every {args.kill_seconds:g} s")
            chaos.run(
                args.seconds,
                args.clients,
                args.kill_seconds,
                args.api_server_kill_seconds,
                args.reload_seconds,
                args.registry_kill_seconds,
                args.full_disk_seconds,
            )
            held = chaos.held()
            chaos.check_last_content()
            counts = {
                name: chaos.counts[name]
                for name in (
                    "right",
                    "wrong",
                    "lost",
                    "stale",
                    "cut",
                    "replica kills",
                    "api-server kills",
                    "registry kills",
                    "full disks",
                    "reloads",
                )
            }
            counts["moved"] = chaos.num_moves()
            counts["held"] = held
            counts["gone"] = chaos.num_gone()
            ended = server.process.poll()
    if ended is not None:
        say(f"the cluster had ended by itself with {ended}")
    for example in chaos.examples:
        say(example)
    table = Table("answers", list(counts))
    table.add(*counts.values())
    table.show()
    goals = [Goal(name, counts[name], 0, at_most=True) for name in ("wrong", "lost", "stale", "gone")]
    goals.append(Goal("requests and KV pages that replicas hold in the end", counts["held"], 0, at_most=True))
    goals.append(Goal("requests that went on elsewhere", counts["moved"], 1))
    code = judge(counts, goals)
    return code if args.check else 0


if __name__ == "__main__":
    sys.exit(main())
