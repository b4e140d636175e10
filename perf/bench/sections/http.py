"""Output tokens per second over HTTP, by `chorus serve` as it is by default, beside the same requests without HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from ...report.table import Table
from ...serving.server_process import launched
from ..context import Context
from .mixes import RANK, load
from .registry import rows_table

#: Popularities of the requests' adapters; "base": no adapters.
POPULARITIES = ("base", "distinct")


def run(context: Context) -> dict[str, Any]:
    """All requests come at once, as in section `mixes`; its rates are shown beside. Adapters are resident."""
    size = load(context)
    adapters = context.adapters(RANK, size["requests"])
    (folder,) = {path.parent for path in adapters.values()}
    model = context.size.write_config(context.work_dir / context.size.name / "http", context.dtype_name)
    _write_tokenizer(model, context.size.geometry.vocab)
    mixes = context.store.values("mixes")
    offline = {row["popularity"]: row["tokens_per_s"] for row in mixes["rows"]}
    offline["base"] = mixes.get("base", {}).get("tokens_per_s")
    flags = ["--model", str(model), "--load-format", "dummy", "--device", context.device, "--adapters", str(folder)]
    flags += ["--max-model-len", str(size["prompt_tokens"] + size["output_tokens"] + 16)]
    if context.smoke:
        flags += ["--cpu-kernels", "torch", "--threads", "1"]
    for name, value in context.engine.items():
        flags += [f"--{name.replace('_', '-')}", value]
    found: dict[str, Any] = {**size, "rank": RANK, "timed": "by the client, from the first byte sent", "rows": []}
    with launched(flags) as server:
        for popularity in POPULARITIES:
            with context.row(found, f"HTTP, {popularity}"):
                result = _measure(server.url, popularity, size, list(adapters))
                rate, beside = result["output_tokens_per_second"], offline.get(popularity)
                found["rows"].append(
                    {"popularity": popularity, "tokens_per_s": rate, "offline_tokens_per_s": beside,
                     "over_offline": None if beside is None else rate / beside,
                     "ttft_ms": result["ttft_ms"]["p50"], "itl_ms": result["itl_ms"]["p50"],
                     "itl_p99_ms": result["itl_ms"]["p99"]}
                )  # fmt: skip
    return found


def _measure(url: str, popularity: str, size: dict[str, int], adapters: list[str]) -> dict[str, Any]:
    """Load the server twice, the first time to warm it up; returns what the client says of the second."""
    words = [
        sys.executable, "-m", f"{__package__.split('.')[0]}.perf.serving", url, "--rate", "inf",
        "--num-requests", str(size["requests"]), "--input-len", str(size["prompt_tokens"]),
        "--output-len", str(size["output_tokens"]), "--prompts", "random",
        *(("--adapters", "none") if popularity == "base" else
          ("--adapters", ",".join(adapters), "--popularity", popularity)),
    ]  # fmt: skip
    for _ in range(2):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the load ended with {done.returncode}: {done.stderr[-2000:]}{done.stdout[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])["load"]


def _write_tokenizer(model: Path, vocab: int) -> None:
    """A word for each token: random weights say any of them."""
    Tokenizer(WordLevel({f"w{token} ": token for token in range(vocab)}, unk_token="w0 ")).save(
        str(model / "tokenizer.json")
    )
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0 "}), encoding="utf-8"
    )


def tables(values: dict[str, Any]) -> list[Table]:
    columns = {
        "popularity": "popularity", "tokens/s": "tokens_per_s", "without HTTP": "offline_tokens_per_s",
        "share": "over_offline", "TTFT ms, median": "ttft_ms", "between tokens ms, median": "itl_ms",
        "99 %": "itl_p99_ms",
    }  # fmt: skip
    title = (
        f"(i) over HTTP, output tokens/s: {values['requests']} requests of {values['prompt_tokens']} + "
        f"{values['output_tokens']} tokens at once"
    )
    return [rows_table(title, columns, values["rows"])]
