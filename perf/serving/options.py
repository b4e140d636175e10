"""The command line of the serving benchmark, and the workload that its flags describe."""

from __future__ import annotations

import argparse
import math
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from ..report.command import parser
from ..workload import WorkloadError, WorkloadSpec
from .aiperf import OBJECTIVES

#: Requests per second that stand for all at once.
_AT_ONCE = 1e6

_PARAMETER = {"zipf": "alpha", "power_law": "exponent"}


def parse(argv: list[str] | None, spec: ModuleSpec, doc: str) -> argparse.Namespace:
    command = parser(spec, doc)
    where = command.add_mutually_exclusive_group(required=True)
    where.add_argument("url", nargs="?", help="of the server, such as http://127.0.0.1:8000")
    where.add_argument("--launch", action="store_true", help="start `chorus serve` for the load and stop it after")
    add = command.add_argument
    add("--serve-flags", default="", metavar="FLAGS", help="flags of the launched server; none: the built-in model")
    add("--endpoint", choices=("completions", "chat"), default="completions")
    add("--model", metavar="NAME", help="the base model's name; default: the first that is served without a parent")
    add("--adapters", metavar="NAMES", help="adapters to use, with commas; none; default: all that are served")
    add("--api-key", metavar="KEY", help="default: $OPENAI_API_KEY")  # which --help must not print
    add("--plain", action="store_true", help="send only fields that OpenAI has: answers may be shorter than planned")

    add = command.add_argument_group("workload").add_argument
    add("--workload", type=Path, metavar="FILE", help="a specification; see `python -m chorus.perf.workload --help`")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="instead of the file's: popularity.alpha=2")
    add("--rate", type=float, default=8.0, metavar="R", help="requests per second; inf: all at once")
    add("--burstiness", type=float, default=1.0, metavar="K",
        help="gamma shape of the gaps: below 1 bursts, 1 Poisson, inf equal gaps")  # fmt: skip
    add("--num-requests", type=int, default=200, metavar="N")
    add("--popularity", default="uniform", metavar="LAW",
        help="uniform, distinct, identical, zipf:ALPHA or power_law:EXPONENT")  # fmt: skip
    add("--base-share", type=float, default=0.0, metavar="P", help="share of requests to the base model")
    add("--input-len", type=int, default=128, metavar="N", help="tokens of a prompt")
    add("--output-len", type=int, default=64, metavar="N", help="tokens of an answer")
    add("--seed", type=int, default=0, help="of the workload and its prompts")
    add("--prompts", choices=("auto", "skills", "random"), default="auto",
        help="skills: questions with exact answers, as with auto where the built-in model is served")  # fmt: skip
    add("--tokenizer", type=Path, metavar="DIR",
        help="source of the prompts' tokens; default: the served model's if here, else words")  # fmt: skip

    add = command.add_argument_group("run").add_argument
    add("--warm-up", type=int, default=3, metavar="N", help="requests to the base model before measuring")
    add("--warm-adapters", action="store_true", help="before measuring, ask every adapter once, so that none is cold")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds until a request has failed")
    for name in OBJECTIVES:
        add(f"--slo-{name}", type=float, metavar="MS", help=f"objective for {name.upper()}, for goodput")
    add("--aiperf", default="aiperf", metavar="COMMAND", help="the program that sends the load")
    add("--out", type=Path, metavar="DIR", help="where serving.json and aiperf's files go")
    return command.parse_args(argv)


def workload(args: argparse.Namespace, num_adapters: int) -> WorkloadSpec:
    """The specification of the file, or of the flags. Raises WorkloadError."""
    if args.workload is not None:
        return WorkloadSpec.load(args.workload, args.set)
    if args.set:
        raise WorkloadError("--set changes fields of a file; give one with --workload, or use the other flags")
    return WorkloadSpec.parse(_fields(args, num_adapters), origin="flags")


def _fields(args: argparse.Namespace, num_adapters: int) -> dict[str, Any]:
    rate = _AT_ONCE if math.isinf(args.rate) else args.rate
    if math.isinf(args.burstiness) or rate == _AT_ONCE:
        arrivals: dict[str, Any] = {"process": "constant", "rate": rate}
    elif args.burstiness == 1.0:
        arrivals = {"process": "poisson", "rate": rate}
    elif args.burstiness > 0:
        arrivals = {"process": "gamma", "rate": rate, "cv": args.burstiness**-0.5}
    else:
        raise WorkloadError(f"--burstiness is {args.burstiness:g}; give a positive number")
    law, colon, number = args.popularity.partition(":")
    if colon and law not in _PARAMETER:
        raise WorkloadError(f"--popularity is {args.popularity!r}; only {' and '.join(_PARAMETER)} take a number")
    lengths = {
        name: {"law": "constant", "tokens": tokens}
        for name, tokens in (("prompt", args.input_len), ("output", args.output_len))
    }
    return {
        "seed": args.seed,
        "requests": args.num_requests,
        "arrivals": arrivals,
        "popularity": {"kind": law, **({_PARAMETER[law]: number} if colon else {})},
        "lengths": {"kind": "laws", **lengths},
        "adapters": {"count": num_adapters, "base_share": args.base_share} if num_adapters else {"base_share": 1.0},
    }
