"""What cutting a prompt into chunks changes: `python -m chorus.perf.bench.chunk_difference`.

Engines of one random model in bfloat16 read a prompt whole and in chunks, by PyTorch's operators and, where it has the
family, by the native decoder. The table has the largest and the mean difference of a token's log-probability.

Tests: tests/perf/bench/test_chunk_difference.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from ..report.command import conclude, count, parser, say
from ..report.table import rows_table
from .driving import asked, opened
from .machine import processor
from .models.families import FAMILIES
from .models.sizes import SIZES, ModelSize

KERNELS = ("torch", "native")


def logprobs(model: Path, kernels: str, chunk: int, prompt: list[int]) -> list[float]:
    """Log-probabilities of a prompt's tokens but the first, read in chunks of so many tokens."""
    limits = {"max_model_len": len(prompt) + 16, "max_num_seqs": 1, "max_num_batched_tokens": chunk}
    own = {"dtype": "bfloat16", "cpu_kernels": kernels, "prefix_cache": False, "threads": torch.get_num_threads()}
    with opened(model, memory_bytes=256 << 20, **limits, **own) as engine:
        engine.add_request(asked(prompt, prompt_logprobs=0))
        found: list[float] = []
        while engine.has_work():
            for output in engine.step():
                found += [one.logprob for one in output.prompt_logprobs or ()]
        return found


def random_weights(model: Path, hidden: int) -> Path:
    """Give a checkpoint random weights, of a size for which hidden states keep theirs, and clear winners of logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model)
    config.initializer_range = hidden**-0.5
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        made.get_output_embeddings().weight *= 4
    made.save_pretrained(model)
    return model


def measured(shape: ModelSize, kernels: str, tokens: int, chunk: int) -> dict[str, Any]:
    """The largest and the mean difference, or why there is none."""
    with TemporaryDirectory() as work:
        model = random_weights(shape.write_config(Path(work) / "model", "bfloat16"), shape.geometry.hidden)
        chance = Random(0)
        prompt = [chance.randrange(8, shape.geometry.vocab) for _ in range(tokens)]
        try:
            whole, cut = (np.array(logprobs(model, kernels, each, prompt)) for each in (tokens, chunk))
        except ValueError as error:
            return {"why": str(error)[:120]}
    differences = np.abs(whole - cut)
    return {"most": float(differences.max()), "mean": float(differences.mean()), "tokens": len(differences)}


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--model-size", choices=SIZES, default="tiny", metavar="NAME")
    add("--layers", type=count, default=12)
    add("--families", nargs="+", choices=FAMILIES, default=["llama", "qwen3-moe", "deepseek-v3"], metavar="NAME")
    add("--tokens", type=count, default=512, help="of the prompt")
    add("--chunk", type=count, default=64, help="tokens of a chunk")
    args = command.parse_args(argv)
    found: list[dict[str, Any]] = []
    for family in args.families:
        for kernels in KERNELS:
            say(f"{family}, {kernels}")
            size = SIZES[args.model_size]
            shape = replace(size, family=family, geometry=replace(size.geometry, layers=args.layers))
            one = measured(shape, kernels, args.tokens, args.chunk)
            found.append({"family": family, "kernels": kernels, **one})
    columns = "family | computed by: kernels | largest: most | mean | tokens"
    rows_table("log-probabilities, whole prompt and chunks", columns, found).show()
    about = {"model_size": args.model_size, "layers": args.layers, "chunk": args.chunk}
    return conclude({"device": processor(), **about, "rows": found}, True)


if __name__ == "__main__":
    sys.exit(main())
