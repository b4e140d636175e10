"""Images under attack: a neighbour's small image beside small files that take long, or much memory, to decode.

    python -m tests.attacks.images

The attacker's clients stay, or leave after two seconds, and ask for answers or for counts of tokens. Needs the extra
`vision`. Exits with 1 if a neighbour's image of 8 x 8 took longer than `MOST_SECONDS`, a neighbour's request failed, or
the server grew by more than `MOST_BYTES`.
"""

from __future__ import annotations

import base64
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx

from chorus.perf.report.command import judge, parser, say
from chorus.perf.report.table import Goal
from chorus.perf.serving.server_process import LaunchedServer, launched
from tests.attacks import image_bombs
from tests.core.media.tiny_vision import tiny
from tests.processes import forget_peak, peak, rss

MOST_SECONDS = 5.0
MOST_BYTES = 600 << 20
LEAVES_SECONDS = 2.0
KEYS = {"attacker": "sk-attacker-0123456789", "neighbour": "sk-neighbour-0123456789"}

ATTACKS: dict[str, Callable[[], list[bytes]]] = {
    "80,000 empty scans of 50 million pixels": lambda: [image_bombs.jpeg_of_scans()] * 4,
    "256 empty scans of 50 million pixels": lambda: [image_bombs.jpeg_of_scans(240)] * 16,
    "a tile of 46,000 x 46,000": lambda: [image_bombs.tiff_of_one_tile()] * 3,
    "64 tiles of the same bytes": lambda: [image_bombs.tiff_of_one_blob()] * 16,
    "3 million runs": lambda: [image_bombs.bitmap_of_runs(1700)] * 4,
    "32 WebP of 50 million pixels": lambda: [image_bombs.large_webp(each) for each in range(32)],
}


def small(number: int) -> bytes:
    """An image of 8 x 8, another for each number."""
    from PIL import Image

    file = BytesIO()
    Image.new("RGB", (8, 8), (number % 256, number // 256, 9)).save(file, "PNG")
    return file.getvalue()


def ask(server: LaunchedServer, tenant: str, path: str, files: Sequence[bytes], timeout: float) -> httpx.Response:
    urls = [f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in files]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "model": "base"}
    body |= {} if path == "/tokenize" else {"max_tokens": 1}
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=timeout, trust_env=False)


def flood(server: LaunchedServer, files: Sequence[bytes], over: threading.Event) -> list[str]:
    """What the attacker is answered. Each request has as many files as a body may hold, 16 at most."""
    room = max(1, min(16, (5 << 20) // max(map(len, files))))
    requests = [files[at : at + room] for at in range(0, len(files), room)]

    def one(path: str, part: Sequence[bytes], timeout: float) -> str:
        with suppress(httpx.HTTPError):
            answer = ask(server, "attacker", path, part, timeout)
            return answer.text[:300] if answer.status_code != 200 else "200"
        return "left"

    told: list[str] = []
    with ThreadPoolExecutor(8) as clients:
        while not over.is_set():
            waiting = [
                clients.submit(one, path, part, timeout)
                for part in requests
                for path, timeout in (("/v1/chat/completions", 60.0), ("/tokenize", LEAVES_SECONDS))
            ]
            told += [each.result() for each in waiting]
    return told


def beside(server: LaunchedServer, files: Sequence[bytes], begin: int, seconds: float) -> tuple[float, list[str]]:
    """The longest that a neighbour's image took, and what the attacker was answered."""
    over, longest, number = threading.Event(), 0.0, begin
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(flood, server, files, over)
        until = time.monotonic() + seconds
        while time.monotonic() < until or number < begin + 3:
            time.sleep(0.3)
            began = time.monotonic()
            ask(server, "neighbour", "/v1/chat/completions", [small(number)], 120).raise_for_status()
            longest = max(longest, time.monotonic() - began)
            number += 1
        over.set()
        return longest, told.result()


def main(argv: Sequence[str] | None = None) -> int:
    flags = parser(__spec__, __doc__ or "")
    flags.add_argument("--seconds", type=float, default=15.0, help="of each attack")
    given = flags.parse_args(argv)
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys"
        keys.write_text("".join(f"{key} {tenant}\n" for tenant, key in KEYS.items()))
        options = ["--model", str(tiny("smolvlm")), "--served-model-name", "base", "--threads", "1", "--device", "cpu"]
        options += ["--memory-bytes", str(64 << 20), "--api-key-file", str(keys)]
        with launched(options) as server:
            ask(server, "neighbour", "/v1/chat/completions", [small(0)], 120).raise_for_status()
            before = rss(server.pid)
            for number, (name, files) in enumerate(ATTACKS.items(), 1):
                made = files()
                forget_peak(server.pid)
                longest, told = beside(server, made, number * 500, given.seconds)
                grown = peak(server.pid) - before
                say(f"{name}: {longest:.2f} s, {grown >> 20:+} MB; the attacker: {max(set(told), key=told.count)}")
                goals.append(Goal(f"{name}: a neighbour's image, s", longest, MOST_SECONDS, at_most=True))
                goals.append(
                    Goal(f"{name}: the server's growth, MB", grown / (1 << 20), MOST_BYTES >> 20, at_most=True)
                )
    return judge({goal.name: goal.value for goal in goals}, goals)


if __name__ == "__main__":
    sys.exit(main())
