"""Prefixes from files beside llama.cpp's saved slots: `python -m chorus.perf.bench.llamacpp_slots TREE`.

TREE is llama.cpp's source tree with its libraries built in `build/`, as `llamacpp_steps` needs it; a C++ compiler
builds a small program with them. Both engines get random weights of one shape, the same prompts and the same number of
threads. Each prompt, with a question after it, is computed, and the prompt is kept: by llama.cpp with the calls of a
slot's `save`, by us in host memory and in files. Then llama.cpp restores each slot and computes the question, and we
serve each prompt with other questions, from host memory and, in an engine that begins with the files alone, from files.
The system has the files in its memory for both.

Tests: tests/perf/bench/test_llamacpp_slots.py
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ...memory.pages.eviction import RestoreCosts
from ..report.command import count, judge, parser, say
from ..report.table import Goal, rows_table
from .context import Context, on_cpu
from .driving import asked, first_token_seconds
from .llamacpp_steps import write_gguf
from .machine import processor
from .models.sizes import SIZES
from .subject import Subject

ANSWER = 2
"""Tokens of an answer."""

MOST = {"host": 0.15, "files": 0.3}
"""Goals: median time to first token over that of computing the prompt."""


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("tree", type=Path, metavar="TREE")
    command.add_argument("--model-size", choices=SIZES, default="125m", metavar="NAME")
    command.add_argument("--prompts", type=count, default=12)
    command.add_argument("--tokens", type=count, default=2000, help="of a prompt")
    command.add_argument("--question", type=count, default=32, help="tokens after a prompt")
    command.add_argument("--threads", type=count, default=len(os.sched_getaffinity(0)))
    args = command.parse_args(argv)
    size = SIZES[args.model_size]
    draw = random.Random(0)
    prompts = [[draw.randrange(3, size.geometry.vocab) for _ in range(args.tokens)] for _ in range(args.prompts)]

    def question() -> list[int]:
        return [draw.randrange(3, size.geometry.vocab) for _ in range(args.question)]

    with on_cpu(size) as context:
        work = context.work_dir
        say("llama.cpp")
        model = write_gguf(size, work / "model.gguf")
        peer = peer_times(
            args.tree, model, work, [prompt + question() for prompt in prompts], args.question, args.threads
        )
        say("chorus")
        ours = own_times(context, prompts, question, args.threads)
    sizes = {name: getattr(args, name) for name in ("model_size", "threads", "prompts", "tokens", "question")}
    theirs = {"peer_megabytes": peer["bytes"] / args.prompts / 1e6, "peer_equal": peer["equal"]}
    found = {"device": processor(), **sizes, "rows": rows_of(ours, peer), **theirs}
    columns = "prefix | ours: ours * 1e3 | over computing: share | llama.cpp: peer * 1e3 | over computing: peer_share"
    rows_table("median time to first token, ms", columns, found["rows"]).show()
    return judge(found, goals(found["rows"]))


def rows_of(ours: dict[str, list[float]], peer: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per place that a prefix comes from; llama.cpp has no place in memory but its slots."""
    theirs = {"computed": peer["computed"], "host": peer["restored"], "files": peer["restored"]}
    computed, computed_by_peer = median(ours["computed"]), median(peer["computed"])
    return [
        {
            "prefix": place,
            "ours": median(times),
            "share": median(times) / computed,
            "peer": median(theirs[place]),
            "peer_share": median(theirs[place]) / computed_by_peer,
            "over_peer": median(times) / median(theirs[place]),
        }
        for place, times in ours.items()
    ]


def goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    shares = [Goal(f"{row['prefix']} over computing", row["share"], MOST[row["prefix"]], True) for row in rows[1:]]
    beside = [Goal(f"{row['prefix']} over llama.cpp's slots", row["over_peer"], 1.0, True) for row in rows[1:]]
    return shares + beside


# -- llama.cpp


def peer_times(
    tree: Path, model: Path, work: Path, prompts: Sequence[Sequence[int]], question: int, threads: int
) -> dict[str, Any]:
    """Seconds of llama.cpp: `computed`, `saved` and `restored`, with `bytes` of all files and how many are `equal`.

    question: the last tokens of each prompt, which are not saved.
    """
    program, folder = build(tree, work), work / "slots"
    folder.mkdir()
    words = "\n".join(" ".join(map(str, prompt)) for prompt in prompts)
    arguments = [*map(str, (program, model, folder, threads, len(prompts[0]), question))]
    said = subprocess.run(arguments, input=words, check=True, capture_output=True, text=True)
    shutil.rmtree(folder)
    return json.loads(said.stdout)


def build(tree: Path, work: Path) -> Path:
    """Build the program that times llama.cpp."""
    source, libraries, program = Path(__file__).with_suffix(".cpp"), tree / "build" / "bin", work / "slots-program"
    includes = [f"-I{tree / folder}" for folder in ("include", "ggml/include")]
    links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lllama", "-lggml", "-lggml-base"]
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, "-O2", "-std=c++17", *includes, str(source), "-o", str(program), *links], check=True)
    return program


# -- ours


def own_times(
    context: Context, prompts: Sequence[Sequence[int]], question: Callable[[], list[int]], threads: int
) -> dict[str, list[float]]:
    """Seconds to the first token: `computed`, from `host` memory, and from `files`. question: draws one."""
    page = context.size.geometry.page_layout(context.kv_itemsize)
    length = len(prompts[0]) + len(question()) + ANSWER
    pages = page.pages_for_tokens(length)
    kv_bytes = (len(prompts) + 1) * pages * page.page_bytes
    fields: dict[str, Any] = {
        "prefix_cache": True,
        "num_pages": 2 + pages,
        "memory_bytes": None,
        "host_cache_bytes": 2 * kv_bytes,
        "kv_cache_dir": context.work_dir / "kv",
        "kv_cache_disk_bytes": max(1 << 20, 2 * kv_bytes),
        "threads": threads,
    }
    limits = {"max_seqs": 1, "max_batched": 512, "max_len": length}
    times: dict[str, list[float]] = {}
    with Subject(context, {}, **limits, **fields) as subject:
        _prefer_copies(subject, context)
        times["computed"] = [_first_token(subject, prompt, question(), 0) for prompt in prompts]
        times["host"] = [_first_token(subject, prompt, question(), 0.9) for prompt in prompts]
    with Subject(context, {}, **limits, **fields) as subject:
        _prefer_copies(subject, context)
        times["files"] = [_first_token(subject, prompt, question(), 0.9) for prompt in prompts]
    return times


def _prefer_copies(subject: Subject, context: Context) -> None:
    """Copy whatever it costs in a smoke run, whose times mean nothing."""
    engine = subject.engine
    assert engine.disk is not None
    if context.smoke:
        engine.memory.copies.costs = engine.disk.costs = RestoreCosts(prefix_page=1.0)


def _first_token(subject: Subject, prompt: Sequence[int], question: Sequence[int], least: float) -> float:
    """Seconds to a request's first token. Raises RuntimeError unless at least this part of the prompt was cached."""
    request = asked([*prompt, *question], max_tokens=ANSWER)
    seconds = first_token_seconds(subject.engine, request)
    if not least * len(prompt) <= request.num_cached_tokens <= (len(prompt) if least else 0):
        raise RuntimeError(f"{request.num_cached_tokens} of a prompt's {len(prompt)} tokens were cached")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
