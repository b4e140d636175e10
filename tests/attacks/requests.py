"""Attacks a real server with small requests that ask for much, and measures the cost to others.

While each request is answered, a neighbour streams and /health is polled. No request may delay /health by more than 250
ms, add more than 64 MB of memory, leave the neighbour without a token for half a second (`gap`), or halve its tokens
per second: `rate` is relative to its rate alone, just before and after. `fair`, for information, is relative to its
rate with as many plain answers. No answer is a 5xx except 503. Nothing connects to a port of this machine that all URLs
in schemas, messages, tools and adapter names point to. Neighbour and attacker are processes of their own that count
events and parse nothing. Prints a row per shape, the worst of the random bodies, and a JSON line; exits with 1 if a bar
is missed. Needs a machine of its own: other load shows in the neighbour's rate.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chorus.perf.report.command import conclude, parser
from chorus.server.demo.builtin import BUILTIN_MODEL
from tests.processes import forget_peak, peak, rss

from .attack import Attack, attack
from .attacked_server import AttackedServer, Canary, attacked_server, rate, worst_delay, worst_gap
from .mutants import CHAT, COMPLETIONS, damaged, rendered, with_odd_values
from .structured import outward_shapes, structured_shapes

MAX_DELAY = 0.25
MAX_GAP = 0.5
MAX_GROWTH = 64 << 20
LEAST_RATE = 0.5
MAX_BODY = 64 << 10
CONTEXT = 4096
LEAST_WINDOW = 0.6
COMPANY = (1, 8, 31)
"""Plain answers that run with the neighbour for comparison: a step that more sequences share takes longer for all."""

COSTLY: dict[str, Sequence[Any]] = {
    "n": (1, 2, 8, 31, 128),
    "max_tokens": (1, 16, 64, 200),
    "logprobs": (0, 1, 5, 20),
    "prompt_logprobs": (0, 1, 20),
    "top_logprobs": (1, 20),
    "stream": (True,),
    "echo": (True,),
    "stop": (["a"], ["\0"] * 2, ["€😀"] * 4),
    "bad_words": (["w"], [f"w{i}" for i in range(50)], [f"w{i}" for i in range(256)]),
    "ignore_eos": (True,),
    "logit_bias": ({"0": 100}, {str(i): 5 for i in range(100)}),
    "temperature": (0, 1, 2),
    "repetition_penalty": (1.3,),
    "allowed_token_ids": (list(range(256)),),
    "min_tokens": (16, 200),
    "best_of": (31,),
    "top_k": (5,),
    "seed": (7,),
    "return_token_ids": (True,),
    "return_tokens_as_token_ids": (True,),
    "tools": ([{"a": 1}] * 300,),
}
"""Values that make an answer dear."""


HEAD = (
    f"{'shape':<42}{'bytes':>9}{'status':>7}{'seconds':>9}{'delay ms':>10}{'gap ms':>9}{'MB':>9}{'rate':>8}{'fair':>7}"
)


@dataclass(frozen=True, slots=True)
class Row:
    """Result of an attack.

    rate: the neighbour's tokens per second, relative to its rate before and after. fair: relative to its rate with as
    many plain answers. gap: its longest time without a token. went_out: connections to the canary.
    """

    name: str
    status: int
    size: int
    seconds: float
    delay: float
    growth: int
    rate: float
    fair: float = 1.0
    gap: float = 0.0
    went_out: int = 0

    @property
    def missed(self) -> list[str]:
        bars = {
            "delay": self.delay > MAX_DELAY,
            "memory": self.growth > MAX_GROWTH,
            "rate": self.rate < LEAST_RATE,
            "gap": self.gap > MAX_GAP,
            "went out": self.went_out > 0,
            "no answer": self.status == 0 or (self.status >= 500 and self.status != 503),
        }
        return [name for name, missed in bars.items() if missed]


def shapes() -> Iterator[Attack]:
    """Requests made to cost much."""
    user = [{"role": "user", "content": "hi"}]
    prompts = ["a b " * 120] * 128
    for count in (100, 20, 1):
        yield attack(
            f"128 prompts, echo, prompt_logprobs={count}",
            COMPLETIONS,
            prompt=prompts,
            echo=True,
            prompt_logprobs=count,
            max_tokens=1,
        )
    yield attack("9 prompts, echo, logprobs=20", COMPLETIONS, prompt=prompts[:9], echo=True, logprobs=20, max_tokens=1)
    yield attack(
        "9 prompts, echo, logprobs=20, stream",
        COMPLETIONS,
        prompt=prompts[:9],
        echo=True,
        logprobs=20,
        max_tokens=1,
        stream=True,
    )
    for count in (100, 20):
        yield attack(f"n=128, logprobs={count}", COMPLETIONS, prompt="x", n=128, logprobs=count, ignore_eos=True)
        yield attack(f"chat n=128, top_logprobs={count}", CHAT, messages=user, n=128, logprobs=True, top_logprobs=count)
    yield attack(
        "n=128, logprobs=20, stream",
        COMPLETIONS,
        prompt="x",
        n=128,
        logprobs=20,
        max_tokens=30,
        stream=True,
        ignore_eos=True,
    )
    yield attack(
        "1 answer of 1,500 tokens, logprobs=20", COMPLETIONS, prompt="x", logprobs=20, max_tokens=1500, ignore_eos=True
    )
    words = [f"w{index}" for index in range(1024)]
    yield attack("1,024 bad words, n=31", COMPLETIONS, prompt="x", bad_words=words, n=31, ignore_eos=True)
    yield attack(
        "256 bad words, n=31", COMPLETIONS, prompt="x", bad_words=words[:256], n=31, ignore_eos=True, max_tokens=64
    )
    yield attack(
        "logit_bias of 256, n=31",
        COMPLETIONS,
        prompt="x",
        n=31,
        ignore_eos=True,
        max_tokens=64,
        logit_bias={str(token): 1 for token in range(256)},
    )
    yield attack(
        "16 stop strings of 1,024, n=31",
        COMPLETIONS,
        prompt="x",
        stop=["a" * 1023 + "b"] * 16,
        n=31,
        logit_bias={"97": 100},
        max_tokens=400,
    )
    yield attack(
        "16 stop strings of 500",
        COMPLETIONS,
        prompt="x",
        stop=["a" * 499 + chr(98 + i) for i in range(16)],
        logit_bias={"97": 100},
        max_tokens=1000,
        ignore_eos=True,
    )
    yield attack("200,000 empty messages", CHAT, messages=[{}] * 200_000)
    yield attack("200,000 messages", CHAT, messages=[{"role": "user", "content": ""}] * 200_000)
    yield attack("2,000 messages", CHAT, messages=[{"role": "user", "content": ""}] * 2000, max_tokens=4)
    yield attack("1,000 messages", CHAT, messages=[{"role": "user", "content": ""}] * 1000, max_tokens=4)
    yield attack("8 MB prompt", COMPLETIONS, prompt="lorem ipsum " * 690_000)
    yield attack("64 KB prompt", COMPLETIONS, prompt="lorem " * 10_900)
    yield attack("64 KB conversation", CHAT, messages=[{"role": "user", "content": "lorem " * 10_900}])
    yield attack("64 KB to tokenize", "/tokenize", prompt="lorem " * 10_900, return_token_strs=True)
    yield attack("16,000 tokens to decode", "/detokenize", tokens=[128] * 16_000)
    yield attack("32,000 token ids, n=128", COMPLETIONS, prompt=[1] * 32_000, n=128)
    yield attack("4,000 token ids, n=128", COMPLETIONS, prompt=[1] * 4000, n=128, max_tokens=1)
    yield attack("4,000 token ids, n=32", COMPLETIONS, prompt=[1] * 4000, n=32, max_tokens=1)
    yield attack("8 prompts of 4,000 tokens", COMPLETIONS, prompt=[[1] * 4000] * 8, max_tokens=1)
    yield attack("n=128, 100 tokens", COMPLETIONS, prompt="x", n=128, max_tokens=100, ignore_eos=True)
    yield attack(
        "n=31, 400 tokens, stream", COMPLETIONS, prompt="x", n=31, max_tokens=400, ignore_eos=True, stream=True
    )
    yield attack(
        "endless invalid bytes", COMPLETIONS, prompt="x", logit_bias={"128": 100}, max_tokens=1500, ignore_eos=True
    )
    yield attack(
        "endless invalid bytes, n=8, stream",
        COMPLETIONS,
        prompt="x",
        logit_bias={"128": 100},
        n=8,
        max_tokens=1000,
        ignore_eos=True,
        stream=True,
    )
    yield Attack("60,000 brackets", COMPLETIONS, b'{"prompt":' + b"[" * 60_000 + b"]" * 5000)
    yield Attack("12,000 braces", COMPLETIONS, b'{"a":' * 12_000 + b"1" + b"}" * 3000)
    yield attack("6,000 unknown fields", COMPLETIONS, prompt="x", **{f"f{index}": 1 for index in range(6000)})
    yield attack("a name of 60,000 letters", COMPLETIONS, prompt="x", **{"f" * 60_000: 1})
    yield attack("a model of 60,000 letters", COMPLETIONS, prompt="x", model="f" * 60_000)
    yield attack("10,000 bad values", COMPLETIONS, prompt="x", stop_token_ids=["a"] * 10_000)
    yield attack("5,000 biases", COMPLETIONS, prompt="x", logit_bias={f"k{index}": "x" for index in range(5000)})
    yield attack("template variables", CHAT, messages=user, chat_template_kwargs={f"k{i}": [i] for i in range(4000)})
    yield attack("3,000 tools", CHAT, messages=user, tool_choice="none", tools=[{"a": 1}] * 3000)
    yield Attack("10,000 escapes", COMPLETIONS, b'{"prompt":"' + b"\\u0041" * 10_000 + b'"}')


def mutations(seed: int, count: int) -> Iterator[Attack]:
    """Random bodies under 64 KB: a request's fields with values that cost much, and with odd ones."""
    draw, made = random.Random(seed), 0
    texts = ["", "a", "\x00", "€😀", "{{ x }}", "a" * 1000, "b c " * 5000, "\\" * 300, "<bos>", "é" * 2000]
    while made < count:
        chat = draw.random() < 0.4
        if chat:
            asked: Any = [{"role": "user", "content": draw.choice(texts)}] * draw.choice([1, 1, 20, 500])
        else:
            asked = draw.choice([draw.choice(texts), [draw.choice(texts)] * draw.choice([1, 9, 128]), [97] * 3000])
        body = {"messages" if chat else "prompt": asked, "max_tokens": draw.choice([1, 16, 64])}
        sent = rendered(draw, with_odd_values(draw, body, COSTLY))
        if draw.random() < 0.1:
            sent = damaged(draw, sent)
        if len(sent) < MAX_BODY:
            made += 1
            yield Attack(f"random {made}", CHAT if chat else COMPLETIONS, sent)


def num_answers(attack: Attack) -> int:
    """Answers that a body asks for, as far as it can be read."""
    try:
        body = json.loads(attack.body)
        prompt = body.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        return max(1, prompts * int(body.get("n", 1) or 1))
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return 1


def company(server: AttackedServer) -> dict[int, float]:
    """The neighbour's tokens per second next to so many plain answers."""
    rates = {}
    for count in COMPANY:
        body = {"prompt": "x", "n": count, "ignore_eos": True, "max_tokens": 300}
        begin = time.monotonic()
        server.post(COMPLETIONS, json.dumps(body).encode())
        rates[count] = rate(server.neighbour, begin, time.monotonic())
    return rates


def strike(server: AttackedServer, attack: Attack, beside: dict[int, float], canary: Canary) -> Row:
    """Sends one request and measures its effect."""
    tokens, process = server.neighbour, server.server
    quiet = time.monotonic()
    time.sleep(LEAST_WINDOW)
    before, resident = rate(tokens, quiet, time.monotonic()), rss(process.pid)
    forget_peak(process.pid)
    begin = time.monotonic()
    status = server.post(attack.path, attack.body)
    took = time.monotonic() - begin
    if took < LEAST_WINDOW:
        time.sleep(LEAST_WINDOW - took)
    end = time.monotonic()
    growth = peak(process.pid) - resident
    time.sleep(LEAST_WINDOW)
    alone = (before + rate(tokens, end, time.monotonic())) / 2
    plain = beside[min((count for count in COMPANY if count >= num_answers(attack)), default=COMPANY[-1])]
    meanwhile, delay = rate(tokens, begin, end), worst_delay(server.health.answers, begin, end)
    of_alone, of_plain = (meanwhile / other if other else 1.0 for other in (alone, plain))
    gap, went_out = worst_gap(tokens, begin, end), canary.count()
    return Row(attack.name, status, len(attack.body), took, delay, growth, of_alone, of_plain, gap, went_out)


def long_model(directory: Path) -> Path:
    """The built-in model with a longer context: its text there is meaningless, but costs as much as any."""
    model = directory / "model"
    shutil.copytree(BUILTIN_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (model / "config.json").write_text(json.dumps(config))
    return model


def show(row: Row) -> str:
    return (
        f"{row.name:<42}{row.size:>9}{row.status:>7}{row.seconds:>9.2f}{1000 * row.delay:>10.0f}"
        f"{1000 * row.gap:>9.0f}"
        f"{row.growth / 2**20:>9.1f}{row.rate:>8.2f}{row.fair:>7.2f}  {', '.join(row.missed)}"
    )


def main() -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--only", choices=("costly", "structured", "outward"), help="one kind of shapes")
    command.add_argument("--mutations", type=int, default=100, help="random bodies to send")
    command.add_argument("--seed", type=int, default=0, help="what they are drawn from")
    args = command.parse_args()
    rows: list[Row] = []
    canary = Canary()
    with tempfile.TemporaryDirectory() as directory:
        model = long_model(Path(directory))
        with attacked_server(["--model", str(model), "--log-level", "info"]) as server:
            time.sleep(2 * LEAST_WINDOW)
            server.post(COMPLETIONS, b'{"prompt": "warm", "logprobs": 5, "n": 8, "max_tokens": 8}')
            beside = company(server)
            print("the neighbour's tokens/s beside plain answers:", {n: round(rate) for n, rate in beside.items()})
            print(HEAD)
            kinds = {"costly": shapes(), "structured": structured_shapes(), "outward": outward_shapes(canary.url)}
            chosen = [attack for kind, made in kinds.items() if args.only in (None, kind) for attack in made]
            for attack in [*chosen, *mutations(args.seed, args.mutations)]:
                rows.append(strike(server, attack, beside, canary))
                if len(rows) <= len(chosen) or rows[-1].missed:
                    print(show(rows[-1]), flush=True)
            failures = len(server.health.failures)
    canary.close()
    missed = {row.name: row.missed for row in rows if row.missed}
    worst = [worst_of(rows), worst_of(rows[len(chosen) :])]
    print(f"random bodies: {worst[1]}")
    result = {
        "requests": len(rows),
        **worst[0],
        "health_failures": failures,
        "missed": missed,
        "met": not missed and not failures,
    }
    return conclude(result, result["met"])


def worst_of(rows: Sequence[Row]) -> dict[str, float]:
    return {
        "worst_delay_ms": round(1000 * max((row.delay for row in rows), default=0), 1),
        "worst_gap_ms": round(1000 * max((row.gap for row in rows), default=0), 1),
        "worst_growth_mb": round(max((row.growth for row in rows), default=0) / 2**20, 1),
        "worst_rate": round(min((row.rate for row in rows), default=1), 3),
        "worst_fair_rate": round(min((row.fair for row in rows), default=1), 3),
    }


if __name__ == "__main__":
    sys.exit(main())
