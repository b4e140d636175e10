"""Uploads under attack: `python -m tests.attacks.uploads`, a minute on a quiet machine.

Adapters are uploaded to `chorus serve` and to a small cluster. Then come wrong starts (a small arena, lost names, a
second server, another registry), names and labels that are to take over others, a full disk, uploads that are many,
large, slow or empty, and a removal while the engine is paused. No file may be deleted that nothing has retired, no
change may be in force that was refused, and a neighbour's /ping is answered all the while. Prints a line for each part
and one line of JSON; exits with 1 unless all of it held.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from chorus.perf.report.command import conclude, parser, say
from chorus.perf.serving.server_process import LaunchedServer, launched
from chorus.server.demo.builtin import BUILTIN_ADAPTERS
from tests.attacks.attacked_server import Probe
from tests.processes import rss

FILES = ("adapter_config.json", "adapter_model.safetensors")
NAME = "policy"
TIMEOUT = 60.0
TURNS_SECONDS = 5.0
"""Two runs of the upload cleanup, each of which may remove files."""

FLAGS = ["--threads", "1", "--memory-bytes", str(64 << 20), "--keep-versions", "3"]
LARGE_BYTES, MOST_LARGE_BYTES = 90 << 20, 96 << 20
"""Of the weights of an upload in JSON, which make 120 MiB of body; and how much more memory it may take."""

MOST_BYTES = 160 << 20
MANY, MANY_BYTES = 15, 16 << 20
NUM_KEPT, NUM_EMPTY = 2000, 200
MOST_PING_SECONDS = 0.3
"""Seconds by which an answer to /ping may exceed the worst one before, during the large upload."""


class Target:
    """A server's client, and the directory of its uploads."""

    def __init__(self, server: LaunchedServer, uploads: Path) -> None:
        self.server, self.uploads = server, uploads
        self.http = httpx.Client(base_url=server.url, timeout=TIMEOUT, trust_env=False)

    def push(self, content: str, name: str = NAME) -> httpx.Response:
        files = {file: (file, (BUILTIN_ADAPTERS / content / file).read_bytes()) for file in FILES}
        return self.http.post("/v1/adapters", data={"name": name}, files=files)

    def push_bytes(self, weights: bytes, name: str) -> int:
        files = {FILES[0]: ("c", b"{}"), FILES[1]: ("w", weights)}
        return self.http.post("/v1/adapters", data={"name": name}, files=files).status_code

    def served(self) -> dict[str, tuple[Any, str, bool]]:
        listed = self.http.get("/v1/adapters").raise_for_status().json()["data"]
        uploaded = [one for one in listed if one["name"].partition("@")[0] in (NAME, "v", "other")]
        return {one["name"]: (one["version"], one["content_hash"], one["paused"]) for one in uploaded}

    def files(self) -> list[bytes]:
        return weights_of(self.uploads)


def weights_of(uploads: Path) -> list[bytes]:
    """All weights below a directory."""
    return sorted(path.read_bytes() for path in uploads.rglob(FILES[1]))


@contextmanager
def target(uploads: Path, *flags: str, command: Sequence[str] = ("serve",)) -> Iterator[Target]:
    with launched([*FLAGS, "--adapter-uploads", str(uploads), *flags], command=command) as server:
        yield Target(server, uploads)


def refused_start(uploads: Path, *flags: str, command: Sequence[str] = ("serve",)) -> str:
    """The output of a server that must not start; empty if it started, or if it does not mention the directory."""
    line = [sys.executable, "-m", "chorus.server", *command, *FLAGS, "--port", "0", "--adapter-uploads", str(uploads)]
    with subprocess.Popen([*line, *flags], stderr=subprocess.PIPE, text=True) as process:
        try:
            told = process.communicate(timeout=TIMEOUT)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            return ""
    words = ("another server or cluster", "another registry")
    return told[-300:] if process.returncode and any(word in told for word in words) else ""


def lose_names(uploads: Path, to: Path) -> Callable[[], None]:
    """Move the files of names away; returns a function that brings them back."""
    to.mkdir()
    names = [path.name for path in uploads.glob("names.sqlite*")]
    for name in names:
        shutil.move(uploads / name, to / name)

    def restore() -> None:
        for path in uploads.glob("names.sqlite*"):
            path.unlink()
        (uploads / "owner.json").unlink()
        for name in names:
            shutil.copy(to / name, uploads / name)

    return restore


def labels(one: Target) -> dict[str, bool]:
    """Names and versions that try to take over others; a refusal changes nothing."""
    checks = {"first": one.push("upper", "v@a").status_code == 201, "second": one.push("reverse", "v@b").is_success}
    before = one.served()
    checks["mark in a name"] = all(one.push("rot13", name).status_code == 400 for name in ("v@a@b", "v@a@1", "@a"))
    checks["other content"] = one.push("rot13", "v@b").status_code == 400 == one.push("rot13", "v@a").status_code
    checks["same content"] = one.push("reverse", "v@b").status_code == 200 == one.push("upper", "v@a").status_code
    checks["a version is not paused"] = one.http.patch("/v1/adapters/v@b", json={"paused": True}).status_code == 400
    checks["nothing changed"] = one.served() == before
    checks["the newest goes"] = one.http.delete("/v1/adapters/v@b").status_code == 200
    checks["the one before is newest"] = one.served().get("v", (None,))[0] == "a"
    checks["it is retired"] = one.push("rot13", "v@b").status_code == 400 and one.push("reverse", "v@b").is_success
    return checks


def numbers(one: Target) -> dict[str, bool]:
    """Versions count per name."""
    told = [
        one.push(content, name).json()["version"]
        for content, name in (("upper", NAME), ("reverse", NAME), ("rot13", "other"))
    ]
    return {"numbers count per name": told == [1, 2, 1]}


def full_disk(one: Target) -> dict[str, bool]:
    """No file may grow: a change that can't be written is refused and has no effect."""
    before, limits = one.served(), resource.prlimit(one.server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(one.server.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        told = [
            one.push("upper", "other"),
            one.http.delete(f"/v1/adapters/{NAME}"),
            one.http.patch(f"/v1/adapters/{NAME}", json={"paused": True}),
        ]
    finally:
        resource.prlimit(one.server.pid, resource.RLIMIT_FSIZE, limits)
    codes = [(each.status_code, each.json().get("error", {}).get("code")) for each in told]
    return {
        "refused": codes == [(503, "storage_unavailable")] * 3,
        "not in force": one.served() == before,
        "then made": one.push("upper", "other").is_success,
    }


def force_while_paused(one: Target) -> dict[str, bool]:
    """A removal by force ends requests though no step runs."""
    body = {"model": NAME, "prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}
    one.push("upper")
    with one.http.stream("POST", "/v1/completions", json=body, timeout=15) as stream:
        lines = stream.iter_lines()
        next(lines)
        one.http.post("/pause", params={"mode": "keep"}).raise_for_status()
        try:
            one.http.delete(f"/v1/adapters/{NAME}", params={"force": "true"}).raise_for_status()
            ended = any("was removed" in line for line in lines)
        except httpx.ReadTimeout:
            ended = False
        finally:
            one.http.post("/resume").raise_for_status()
    return {"requests end at once": ended}


def large(one: Target) -> tuple[dict[str, bool], dict[str, float]]:
    """An upload in JSON of 120 MiB."""
    text = base64.b64encode(os.urandom(1 << 20) * (LARGE_BYTES >> 20)).decode()
    body = json.dumps({"name": "large", "adapter_config": {}, "adapter_model": text}).encode()
    before, peak, over = rss(one.server.pid), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.02):
            peak = max(peak, rss(one.server.pid) - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    quiet = Probe(one.server.url, ["/ping"], 0.005)
    time.sleep(1)
    quiet.end()
    calm = max(took for _, took in quiet.answers)
    probe = Probe(one.server.url, ["/ping"], 0.005)
    answer = one.http.post("/v1/adapters", content=body, headers={"content-type": "application/json"})
    probe.end()
    over.set()
    watcher.join()
    worst = max(took for _, took in probe.answers)
    checks = {
        "it is judged": answer.status_code == 400,
        "memory": peak <= MOST_LARGE_BYTES,
        "neighbours": worst <= MOST_PING_SECONDS + calm and not probe.failures,
    }
    return checks, {"large_mib": peak / 2**20, "large_ping_seconds": worst}


def many(one: Target) -> tuple[dict[str, bool], dict[str, float]]:
    """Uploads at once that together are beyond the bound."""
    over, most, weights = threading.Event(), 0, os.urandom(MANY_BYTES)

    def watch() -> None:
        nonlocal most
        while not over.wait(0.02):
            most = max(most, used(one.uploads))

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(MANY) as threads:
        told = list(threads.map(lambda number: one.push_bytes(weights, f"m{number}"), range(MANY)))
    over.set()
    watcher.join()
    return {"bound": most <= MOST_BYTES, "told": set(told) <= {400, 503} and 503 in told}, {"most_mib": most / 2**20}


def used(uploads: Path) -> int:
    """Bytes in a directory tree just now."""
    total = 0
    for file in uploads.glob("*/*"):
        try:
            total += file.stat().st_blocks * 512
        except OSError:
            continue  # it went meanwhile
    return total


def empty(one: Target) -> tuple[dict[str, bool], dict[str, float]]:
    """Forms without files, sent during thousands of uploads."""

    def pings(seconds: float, busy: Callable[[], object] = lambda: None) -> float:
        probe = Probe(one.server.url, ["/ping"], 0.005)
        busy()
        time.sleep(seconds)
        probe.end()
        return statistics.median(took for _, took in probe.answers)

    def forms() -> None:
        def post(_: int) -> int:
            return one.http.post("/v1/adapters", data={"name": "x"}, files={"y": ("y", b"")}).status_code

        with ThreadPoolExecutor(8) as threads:
            assert set(threads.map(post, range(NUM_EMPTY))) == {400}

    quiet, beside = pings(1.0), pings(0.0, forms)
    return {"neighbours": beside <= max(0.03, 8 * quiet)}, {"quiet_ping": quiet, "beside_forms_ping": beside}


def slow(one: Target) -> dict[str, bool]:
    """A body that comes at the least rate is taken, a slower one is told why not."""

    def send(rate: int, most: float) -> bytes:
        head = b"POST /v1/adapters HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        body = b'{"name": "slow", "padding": "' + b"x" * (200 << 10) + b'"}'
        with socket.create_connection(one.server.address, timeout=0.02) as connection:
            connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body))
            end, sent = time.monotonic() + most, 0
            while time.monotonic() < end:
                if sent < len(body):
                    connection.sendall(body[sent : sent + rate // 20])
                    sent += rate // 20
                    time.sleep(0.03)
                try:
                    return connection.recv(100)
                except TimeoutError:
                    continue
        return b""

    return {
        "fast enough": send(100 << 10, 20).startswith(b"HTTP/1.1 400"),
        "too slow": send(4 << 10, 20).startswith(b"HTTP/1.1 408"),
    }


def on_a_server(root: Path) -> tuple[dict[str, dict[str, bool]], dict[str, float]]:
    uploads, parts, seen = root / "uploads", dict[str, dict[str, bool]](), dict[str, float]()
    limits = ("--max-uploaded-bytes", str(MOST_BYTES), "--whole-body-seconds", "1", "--body-bytes-per-second", "32768")
    with target(uploads, *limits) as one:
        parts["numbers"], parts["labels"] = numbers(one), labels(one)
        parts["full disk"] = full_disk(one)
        parts["slow"] = slow(one)
        (parts["large"], more), (parts["many"], most) = large(one), many(one)
        seen |= more | most
        parts["paused"] = force_while_paused(one)
        one.push("upper")
        parts["second server"] = {"refused": bool(refused_start(uploads))}
        before, kept = one.served(), one.files()
    with target(uploads, "--memory-bytes", "1MiB"):
        time.sleep(TURNS_SECONDS)
    wrong = {"small arena": weights_of(uploads) == kept}
    restore = lose_names(uploads, root / "names")
    for number in range(NUM_KEPT):
        (uploads / f"{number:064x}").mkdir()
    with target(uploads) as one:
        parts["empty forms"], more = empty(one)
        time.sleep(TURNS_SECONDS)
    seen |= more
    wrong["lost names"] = weights_of(uploads) == kept
    restore()
    with target(uploads) as one:
        wrong["restored"] = one.served() == before and one.files() == kept
    return {**parts, "wrong starts": wrong}, seen


def on_a_cluster(root: Path) -> dict[str, dict[str, bool]]:
    uploads, flags, up = root / "shared", ("--replicas", "1", "--api-servers", "2"), ("cluster", "up")
    with target(uploads, *flags, command=up) as one:
        parts = {"cluster numbers": numbers(one), "cluster labels": labels(one)}
        before, kept = one.served(), one.files()
        other = ("--registry", str(root / "other.sqlite"))
        wrong = {"other registry": bool(refused_start(uploads, *flags, *other, command=up))}
    restore = lose_names(uploads, root / "registry")
    wrong["lost registry"] = bool(refused_start(uploads, *flags, command=up)) and weights_of(uploads) == kept
    restore()
    with target(uploads, *flags, command=up) as one:
        wrong["restored"] = one.served() == before and one.files() == kept
    return {**parts, "cluster wrong starts": wrong}


def main(argv: Sequence[str] | None = None) -> int:
    flags = parser(__spec__, __doc__ or "")
    flags.add_argument("--only", choices=("server", "cluster"), help="one of the two; default: both")
    given = flags.parse_args(argv)
    parts, seen, began = dict[str, dict[str, bool]](), dict[str, float](), time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        if given.only != "cluster":
            parts, seen = on_a_server(Path(directory))
        if given.only != "server":
            parts |= on_a_cluster(Path(directory))
    for part, checks in parts.items():
        failed = [check for check, held in checks.items() if not held]
        say(f"{part}: {'held' if not failed else f'BROKEN: {failed}'}")
    held = all(all(checks.values()) for checks in parts.values())
    return conclude({"parts": parts, **seen, "seconds": time.monotonic() - began}, held)


if __name__ == "__main__":
    sys.exit(main())
