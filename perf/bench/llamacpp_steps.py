"""Prompts and decode steps beside llama.cpp's, in turns: `python -m chorus.perf.bench.llamacpp_steps TREE`.

TREE is llama.cpp's source tree (`pip download --no-deps --no-binary llama-cpp-python llama-cpp-python` has it as
`vendor/llama.cpp`) with its programs `llama-batched-bench` and `llama-quantize` built in `build/`. Both engines get
random weights of one shape and the same number of threads; each sequence has other tokens. In every turn the rate of
reading memory is measured, too: it limits decode steps of one sequence. Head and embedding of a quantised model are
quantised in both.

Tests: tests/perf/bench/test_llamacpp_steps.py
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from ...core.model.checkpoints.quantization.round_to_nearest import RoundToNearest
from ...core.model.read_config import read_model_config
from ..report.command import count, judge, parser, say
from ..report.table import Goal, rows_table
from .context import on_cpu
from .machine import processor
from .models.families import fields_of
from .models.sizes import SIZES, ModelSize
from .sections.families import weights_of
from .sections.levels import prefill, rates
from .subject import Subject

ARCHITECTURES = {"llama": "llama", "qwen3-moe": "qwen3moe"}
"""llama.cpp's names of the families whose files can be written."""

PLAIN = "none"

PEERS_TYPE = {PLAIN: None, "int8": "Q8_0", "int4": "Q4_0"}
"""llama.cpp's type of weights by `quantization`."""

#: Case → sequences, and whether their prompts are timed or decode steps.
CASES = {"decode, 1 row": (1, False), "decode, 8 rows": (8, False), "prompt of 1": (1, True), "prompts of 8": (8, True)}

_MARKS = {"decode, 1 row": (1.0, 1.0), "decode, 8 rows": (1.1, 1.5), "prompts of 8": (1.5, 1.5)}
"""Least ratio of our rate to llama.cpp's by case, plain and quantised."""

_NORM = 1e-5


@dataclass(frozen=True)
class Load:
    """Tokens of a turn."""

    prompt: int
    steps: int


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("tree", type=Path, metavar="TREE")
    command.add_argument("--model-size", choices=SIZES, default="170m", metavar="NAME")
    command.add_argument("--family", choices=ARCHITECTURES, default="qwen3-moe")
    command.add_argument("--quantization", choices=PEERS_TYPE, nargs="+", default=[*PEERS_TYPE])
    command.add_argument("--prompt", type=count, default=256, help="tokens")
    command.add_argument("--steps", type=count, default=64)
    command.add_argument("--rounds", type=count, default=3)
    command.add_argument("--threads", type=count, default=len(os.sched_getaffinity(0)))
    args = command.parse_args(argv)
    size = replace(SIZES[args.model_size], family=args.family)
    load = Load(args.prompt, args.steps)
    found: dict[str, Any] = {"device": processor(), "model_size": args.model_size, "family": args.family}
    with TemporaryDirectory(prefix="chorus-llamacpp-") as name:
        work = Path(name)
        plain = write_gguf(size, work / "model.gguf")
        race = partial(_race, args.tree, size, load, work, args.threads, args.rounds)
        found["rows"] = [row for each in args.quantization for row in race(plain, each)]
    columns = (
        "weights: quantization | case | ours | llama.cpp: peer | ours / llama.cpp: ratio | of the reading rate: share"
    )
    rows_table("tokens/s", columns, found["rows"]).show()
    return judge(found, goals(found["rows"]))


def goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    return [
        Goal(f"{row['quantization']}: {row['case']}", row["ratio"], _MARKS[row["case"]][row["quantization"] != PLAIN])
        for row in rows
        if row["case"] in _MARKS
    ]


def _race(
    tree: Path, size: ModelSize, load: Load, work: Path, threads: int, rounds: int, plain: Path, quantization: str
) -> list[dict[str, Any]]:
    """A row per case: medians of tokens per second, and of the ratio in one turn."""
    say(quantization)
    engine = {} if quantization == PLAIN else {"quantization": quantization, "quantize_lm_head": "true"}
    model = quantised(tree, plain, quantization)
    limits: dict[str, Any] = {"max_seqs": 8, "max_batched": 8 * load.prompt, "max_len": load.prompt + load.steps + 24}
    turns = []
    with on_cpu(size, engine=engine) as context, Subject(context, {}, threads=threads, **limits) as subject:
        weights = weights_of(read_model_config(subject.model), 1)
        for _ in range(rounds + 1):  # the first warms both up
            theirs = peer_rates(tree, model, load, threads)
            turns.append({case: (_ours(subject, load, *what), theirs[case]) for case, what in CASES.items()})
        reading, num_bytes = rates(context, threads)["read"], bytes_of(context.quantiser, weights)
    rows = []
    for case in CASES:
        ours, peer = ([turn[case][who] for turn in turns[1:]] for who in (0, 1))
        share = median(ours) * num_bytes / reading if case == "decode, 1 row" else None
        ratio = median(mine / its for mine, its in zip(ours, peer, strict=True))
        row = {"quantization": quantization, "case": case, "ours": median(ours), "peer": median(peer)}
        rows.append({**row, "ratio": ratio, "share": share})
    return rows


def _ours(subject: Subject, load: Load, count: int, is_prompt: bool) -> float:
    """Tokens per second: of `count` prompts, or of the mean decode step of so many sequences."""
    chosen: list[str | None] = [None] * count
    if is_prompt:
        return count * load.prompt / prefill(subject, chosen, load.prompt, 1)
    return count / mean(subject.decode_seconds(chosen, load.prompt, load.steps))


def peer_rates(tree: Path, model: Path, load: Load, threads: int) -> dict[str, float]:
    """llama.cpp's tokens per second by case."""
    counts = sorted({number for number, _ in CASES.values()})
    room = max(counts) * (load.prompt + load.steps + 256)  # it rounds a sequence's room down to a multiple of 256
    command = [tree / "build" / "bin" / "llama-batched-bench", "-m", model, "-c", room, "-b", 2048, "-ub", 512]
    loads = ",".join(map(str, [*counts, counts[0]]))  # the line of the last one is lost at times, when it ends
    command += ["-npp", load.prompt, "-ntg", load.steps, "-npl", loads]
    command += ["-t", threads, "-tb", threads, "--output-format", "jsonl"]
    said = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout
    return parse_rates(said)


def parse_rates(said: str) -> dict[str, float]:
    """Rates by case from the JSON lines of `llama-batched-bench`."""
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    by_count = {line["pl"]: line for line in lines}
    return {
        case: by_count[count]["speed_pp" if is_prompt else "speed_tg"] for case, (count, is_prompt) in CASES.items()
    }


def quantised(tree: Path, plain: Path, quantization: str) -> Path:
    """The model in llama.cpp's type of about as many bits, its head and embedding, too."""
    kind = PEERS_TYPE[quantization]
    if kind is None:
        return plain
    target = plain.with_name(f"{plain.stem}.{kind}.gguf")
    if not target.is_file():
        command = [tree / "build" / "bin" / "llama-quantize", "--pure", plain, target, kind]
        subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return target


def write_gguf(size: ModelSize, path: Path, seed: int = 0) -> Path:
    """A file of random weights in bfloat16, without a tokenizer."""
    from gguf import GGMLQuantizationType, GGUFWriter  # not needed by other commands

    shape, generator = size.geometry, torch.Generator().manual_seed(seed)
    more = fields_of(size.family, shape.layers, shape.heads, shape.head_dim)
    writer = GGUFWriter(path, ARCHITECTURES[size.family])
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(size.rope["rope_theta"])
    writer.add_layer_norm_rms_eps(_NORM)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("none")
    if "num_experts" in more:
        writer.add_expert_count(more["num_experts"])
        writer.add_expert_used_count(more["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(more["moe_intermediate_size"])
    for name, dims in _tensors(size, more):
        if len(dims) == 1:
            writer.add_tensor(name, np.ones(dims, np.float32))
        elif name.endswith("gate_inp.weight"):
            writer.add_tensor(name, (torch.randn(*dims, generator=generator) / math.sqrt(dims[-1])).numpy())
        else:
            values = (torch.randn(*dims, generator=generator) / math.sqrt(dims[-1])).bfloat16()
            writer.add_tensor(name, values.view(torch.uint8).numpy(), raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(size: ModelSize, more: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, rows first."""
    shape = size.geometry
    hidden, query, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield from (("token_embd.weight", (shape.vocab, hidden)), ("output.weight", (shape.vocab, hidden)))
    yield "output_norm.weight", (hidden,)
    parts: dict[str, tuple[int, ...]] = {"attn_norm": (hidden,), "ffn_norm": (hidden,)}
    parts |= {"attn_q": (query, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, query)}
    if size.family.startswith("qwen3"):
        parts |= {"attn_q_norm": (shape.head_dim,), "attn_k_norm": (shape.head_dim,)}
    if "num_experts" in more:
        count, width = more["num_experts"], more["moe_intermediate_size"]
        parts |= {"ffn_gate_inp": (count, hidden), "ffn_gate_exps": (count, width, hidden)}
        parts |= {"ffn_up_exps": (count, width, hidden), "ffn_down_exps": (count, hidden, width)}
    else:
        parts |= {"ffn_gate": (shape.ffn, hidden), "ffn_up": (shape.ffn, hidden), "ffn_down": (hidden, shape.ffn)}
    for layer in range(shape.layers):
        yield from ((f"blk.{layer}.{name}.weight", dims) for name, dims in parts.items())


def bytes_of(quantiser: RoundToNearest | None, weights: float) -> float:
    """Bytes of so many weights, with their scales."""
    columns = 1024
    return weights * (2 if quantiser is None else quantiser.num_bytes(1, columns) / columns)


if __name__ == "__main__":
    sys.exit(main())
