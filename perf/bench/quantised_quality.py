"""Quality of quantised weights and KV caches: perplexity on texts, and tokens in common with the plain greedy output.

`--texts` are files with a JSON object per line, of `question` and `answer` or `instruction` and `response`. The first
is the prompt; perplexity is that of the second's tokens. The prompts of the first file are completed greedily.

Tests: tests/perf/bench/test_quantised_quality.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, product, takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...server.library.params import SamplingParams
from ...server.llm import LLM
from ..report.command import parser, say
from ..report.table import Table

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{
        f"{name}{' with lm_head' * has_head}": {"quantization": name, "quantize_lm_head": has_head}
        for name, has_head in product(("int8", "int4", "w8a8", "w4a8", "fp8"), (False, True))
    },
    "plain, FP8 KV cache": {"kv_cache_dtype": "fp8"},
    "int8, FP8 KV cache": {"quantization": "int8", "kv_cache_dtype": "fp8"},
}
_PAIRS = (("question", "answer"), ("instruction", "response"))


@dataclass
class Quality:
    """Of one form of the weights and the KV cache."""

    perplexity: dict[str, float] = field(default_factory=dict)
    """By file."""

    outputs: list[Sequence[int]] = field(default_factory=list)
    """Tokens of each greedy output."""


def pairs(path: Path, count: int, tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Tokens of the first prompts and answers of a file."""
    found = []
    with path.open(encoding="utf-8") as lines:
        for line in islice(lines, count):
            record = json.loads(line)
            names = next((names for names in _PAIRS if all(name in record for name in names)), None)
            if names is None:
                raise ValueError(f"{path}: a line has none of the fields {_PAIRS}; give JSON lines that have")
            prompt, answer = (tokenizer.encode(record[name]).ids for name in names)
            found.append((prompt + tokenizer.encode("\n").ids, answer))
    return found


def measured(llm: LLM, tokenizer: Tokenizer, files: Sequence[Path], count: int, tokens: int) -> Quality:
    """Perplexity of `count` answers of each file, and greedy outputs of `tokens` tokens."""
    quality = Quality()
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for path in files:
        texts = pairs(path, count, tokenizer)
        total, number = 0.0, 0
        answers = llm.generate([{"prompt_token_ids": prompt + answer} for prompt, answer in texts], scored)
        for (_, answer), done in zip(texts, answers, strict=True):
            scores = (done.prompt_logprobs or ())[-len(answer) :]
            total -= sum(each.logprob for each in scores if each is not None)
            number += len(answer)
        quality.perplexity[path.stem] = math.exp(total / number)
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in pairs(files[0], count, tokenizer)]
    quality.outputs = [done.token_ids for done in llm.generate(prompts, greedy)]
    return quality


def in_common(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Share of outputs that are the same, and mean share of tokens before the first difference."""

    def common(each: tuple[Sequence[int], Sequence[int]]) -> int:
        return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*each, strict=True)))

    same = list(map(common, zip(one, other, strict=True)))
    lengths = [len(each) for each in one]
    equal = sum(count == length for count, length in zip(same, lengths, strict=True))
    return equal / len(one), sum(same) / sum(lengths)


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("model", type=Path, help="directory of a checkpoint")
    command.add_argument("--texts", type=Path, nargs="+", required=True, metavar="FILE")
    command.add_argument("--count", type=int, default=100, help="lines of each file")
    command.add_argument("--tokens", type=int, default=64, help="of each greedy output")
    command.add_argument("--forms", nargs="+", choices=tuple(FORMS), default=list(FORMS))
    args = command.parse_args(argv)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    found: dict[str, Quality] = {}
    for name in args.forms:
        with LLM(args.model, device="cpu", **FORMS[name]) as llm:
            found[name] = measured(llm, tokenizer, args.texts, args.count, args.tokens)
        say(f"{name}: perplexity {found[name].perplexity}")
    first = next(iter(found.values()))
    columns = [f"perplexity, {name}" for name in first.perplexity]
    table = Table("quality", ["weights", *columns, "outputs the same", "tokens before a difference"])
    for name, quality in found.items():
        table.add(name, *quality.perplexity.values(), *in_common(first.outputs, quality.outputs))
    table.show()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
