"""Greedy answers of the engine against transformers + peft, token by token, on a real model.

    python -m tests.core.real_model --model DIR --adapters DIR --requests 64 [--kernels auto|torch|native]

All requests run in one engine at once, spread over the base model and every adapter; the reference answers them one
at a time. Both compute in float32. Prints a table per adapter, then one line of JSON; exits 1 if any token differs.
Where one does, the reference's lead of its best over its second-best logit is printed: rounding explains leads of
some 1e-4, nothing explains more. Needs the package `peft`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.quarantine import adapter_directories
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.perf.report.command import conclude, parser

QUESTIONS = (
    "What is {}?",
    "Explain {} to a child.",
    "Name three facts about {}.",
    "Why does {} matter?",
    "Write a short poem about {}.",
    "What is a common mistake about {}?",
    "How would you teach {}?",
    "Tell me a joke about {}.",
)
TOPICS = (
    "the Moon",
    "fever",
    "prime numbers",
    "bread",
    "gravity",
    "the number 7 times 8",
    "rivers",
    "vitamin C",
    "chess",
    "a diabetes diet",
    "sleep",
    "percentages",
)


@dataclass
class Case:
    """A request and both answers; `leads[i]` is the reference's margin for its token i."""

    id: str
    adapter: str | None
    prompt: list[int]
    got: list[int] = field(default_factory=list)
    want: list[int] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)

    @property
    def mismatch(self) -> int | None:
        """The first position at which the answers differ."""
        pairs = itertools.zip_longest(self.got, self.want)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def make_cases(tokenizer: Any, adapters: Sequence[str], count: int) -> list[Case]:
    """`count` chat prompts, all different, that go round the base model and the adapters."""
    names, cases = [None, *adapters], []
    texts = [question.format(topic) for topic in TOPICS for question in QUESTIONS]
    for i in range(count):
        text = texts[i % len(texts)] + (f" (answer {i})" if i >= len(texts) else "")
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=True, add_generation_prompt=True, return_dict=False
        )
        cases.append(Case(str(i), names[i % len(names)], list(prompt)))
    return cases


def run_engine(arguments: argparse.Namespace, cases: list[Case]) -> tuple[float, tuple[int, ...]]:
    """Fill in `got`; returns the seconds it took and the end-of-sequence ids."""
    config = EngineConfig(
        model=arguments.model,
        adapters=arguments.adapters,
        dtype="float32",
        cpu_kernels=arguments.kernels,
        max_model_len=arguments.max_tokens + max(len(case.prompt) for case in cases),
        memory_bytes=arguments.memory_bytes,
        threads=arguments.threads,
    )
    engine = Engine.from_config(config)
    by_id = {case.id: case for case in cases}
    started = time.perf_counter()
    for case in cases:
        engine.add_request(Request(case.id, case.prompt, RequestParams(arguments.max_tokens, 0.0), case.adapter))
    while engine.has_work():
        for output in engine.step():
            if output.error:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            by_id[output.request_id].got += output.token_ids
    seconds = time.perf_counter() - started
    engine.close()
    return seconds, engine.model.eos_token_ids


def run_reference(
    arguments: argparse.Namespace, cases: list[Case], adapters: dict[str, Path], eos: tuple[int, ...]
) -> float:
    """Fill in `want` and `leads`, one request at a time; returns the seconds it took."""
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    if adapters:
        from peft import PeftModel

        (first, path), *others = adapters.items()
        model = PeftModel.from_pretrained(model, path, adapter_name=first).eval()
        for name, path in others:
            model.load_adapter(path, adapter_name=name)
    started = time.perf_counter()
    for case in cases:
        if case.adapter is not None:
            model.set_adapter(case.adapter)
        with model.disable_adapter() if adapters and case.adapter is None else nullcontext():
            _answer(model, case, arguments.max_tokens, eos)
    return time.perf_counter() - started


@torch.inference_mode()
def _answer(model: Any, case: Case, max_tokens: int, eos: tuple[int, ...]) -> None:
    inputs, cache = case.prompt, None
    while len(case.want) < max_tokens:
        output = model(torch.tensor([inputs]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        best = output.logits[0, -1].topk(2)
        inputs, cache = [int(best.indices[0])], output.past_key_values
        case.want += inputs
        case.leads.append(float(best.values[0] - best.values[1]))
        if inputs[0] in eos:
            return


def report(cases: list[Case], arguments: argparse.Namespace, engine_s: float, reference_s: float) -> int:
    """Print the table and the JSON line; the exit code."""
    print(f"{'adapter':32} {'requests':>8} {'tokens':>7} {'equal':>6} {'least lead':>11}")
    for adapter in dict.fromkeys(case.adapter for case in cases):
        own = [case for case in cases if case.adapter == adapter]
        tokens, equal = sum(len(case.want) for case in own), sum(case.mismatch is None for case in own)
        least = min(lead for case in own for lead in case.leads)
        print(f"{adapter or '(base)':32} {len(own):8} {tokens:7} {equal:6} {least:11.2e}")
    wrong = [case for case in cases if case.mismatch is not None]
    for case in wrong:
        at = case.mismatch or 0
        lead = f"{case.leads[at]:.2e}" if at < len(case.leads) else "none: it had ended"
        print(
            f"request {case.id} on {case.adapter or '(base)'}: token {at} is {case.got[at : at + 1]}, "
            f"the reference has {case.want[at : at + 1]}; the reference's lead there: {lead}"
        )
    summary = {
        "model": arguments.model.resolve().name,
        "kernels": arguments.kernels,
        "requests": len(cases),
        "adapters": len({case.adapter for case in cases} - {None}),
        "tokens": sum(len(case.want) for case in cases),
        "mismatches": len(wrong),
        "least_lead": min(lead for case in cases for lead in case.leads),
        "engine_s": round(engine_s, 2),
        "reference_s": round(reference_s, 2),
    }
    return conclude(summary, not wrong)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; 0 when every token is equal, 1 otherwise."""
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="checkpoint with a chat template")
    add("--adapters", type=Path, metavar="DIR", help="directory of PEFT adapters for it")
    add("--requests", type=int, default=64, metavar="N", help="requests in flight")
    add("--max-tokens", type=int, default=32, metavar="N", help="most tokens each")
    add("--kernels", choices=("auto", "torch", "native"), default="auto", help="CPU operators")
    add("--memory-bytes", type=int, default=1 << 30, metavar="N", help="arena; default: 1 GiB")
    add("--threads", type=int, metavar="N", help="CPU threads; default: torch's")
    arguments = command.parse_args(argv)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    adapters = {path.name: path for path in adapter_directories(arguments.adapters)} if arguments.adapters else {}
    cases = make_cases(AutoTokenizer.from_pretrained(arguments.model), list(adapters), arguments.requests)
    engine_s, eos = run_engine(arguments, cases)
    return report(cases, arguments, engine_s, run_reference(arguments, cases, adapters, eos))


if __name__ == "__main__":
    sys.exit(main())
