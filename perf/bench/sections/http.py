"""Output tokens per second over HTTP, by `chorus serve` without speculation, compared with the same requests without
HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from statistics import median
from typing import Any

import httpx
import numpy as np

from ...report.table import Table, rows_table
from ...serving.server_process import LaunchedServer, launched
from ...serving.streams import Answered, read_streams
from ..context import Context
from ..models.random_model import write_tokenizer
from .mixes import RANK, load

#: Popularities of the requests' adapters; "base": no adapters.
POPULARITIES = ("base", "distinct")


def run(context: Context) -> dict[str, Any]:
    """All requests arrive at once, as in section `mixes`, whose rates are shown, too. Adapters are resident."""
    size = load(context)
    adapters = context.adapters(RANK, size["requests"])
    (folder,) = {path.parent for path in adapters.values()}
    model = context.size.write_config(context.work_dir / context.size.name / "http", context.dtype_name)
    write_tokenizer(context.size.geometry.vocab, model)
    mixes = context.store.values("mixes")
    offline = {row["popularity"]: row["tokens_per_s"] for row in mixes["rows"]}
    offline["base"] = mixes.get("base", {}).get("tokens_per_s")
    flags = ["--model", str(model), "--load-format", "dummy", "--device", context.device, "--adapters", str(folder)]
    flags += ["--max-model-len", str(size["prompt_tokens"] + size["output_tokens"] + 16)]
    flags += ["--speculation", "off"]  # as in section mixes; a random model repeats itself
    if context.smoke:
        flags += ["--cpu-kernels", "torch", "--threads", "1"]
    for name, value in context.engine.items():
        flags += [f"--{name.replace('_', '-')}", value]
    found: dict[str, Any] = {**size, "rank": RANK, "rows": []}
    vocab = context.size.geometry.vocab
    with launched(flags) as server:
        for popularity in POPULARITIES:
            with context.row(found, f"HTTP, {popularity}"):
                answered = measure(server, popularity, size, list(adapters), vocab)
                rate, beside = size["requests"] * size["output_tokens"] / answered.seconds, offline.get(popularity)
                itl, itl_p99 = np.percentile(answered.gaps, (50, 99)).tolist()
                found["rows"].append(
                    {
                        "popularity": popularity,
                        "tokens_per_s": rate,
                        "offline_tokens_per_s": beside,
                        "over_offline": None if beside is None else rate / beside,
                        "ttft_ms": 1e3 * median(answered.firsts),
                        "itl_ms": 1e3 * itl,
                        "itl_p99_ms": 1e3 * itl_p99,
                    }
                )
    return found


def measure(server: LaunchedServer, popularity: str, size: dict[str, int], adapters: list[str], vocab: int) -> Answered:
    """Load the server twice, the first time to warm it up; return the result of the second."""
    draw = Random(popularity)
    models: list[str | None] = [None] * size["requests"] if popularity == "base" else [*adapters]

    def once() -> Answered:
        return read_streams(server.address, bodies(server.url, models[: size["requests"]], size, draw, vocab))

    once()  # prompts differ from the second time's, because the server caches the KV of prompts
    return once()


def bodies(
    url: str, adapters: Sequence[str | None], size: Mapping[str, int], draw: Random, vocab: int
) -> list[dict[str, Any]]:
    """Requests with random prompts, one for each of the adapters; None: for the base model."""
    base = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
    return [
        {
            "model": name or base,
            "prompt": draw.choices(range(3, vocab), k=size["prompt_tokens"]),
            "temperature": 0,
            "max_tokens": size["output_tokens"],
            "ignore_eos": True,
        }
        for name in adapters
    ]


def tables(values: dict[str, Any]) -> list[Table]:
    columns = (
        "popularity | tokens/s: tokens_per_s | without HTTP: offline_tokens_per_s | share: over_offline | "
        "TTFT ms, median: ttft_ms | between tokens ms, median: itl_ms | 99 %: itl_p99_ms"
    )
    tokens = f"{values['prompt_tokens']} + {values['output_tokens']}"
    title = f"(i) over HTTP, output tokens/s: {values['requests']} requests of {tokens} tokens at once"
    return [rows_table(title, columns, values["rows"])]
