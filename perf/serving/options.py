"""The command line of the serving benchmark."""

from __future__ import annotations

import argparse
from copy import deepcopy
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from ..report.command import parser
from ..workload import WorkloadSpec
from .aiperf import OBJECTIVES

#: The workload without a file. All adapters have the same share of the requests.
_WORKLOAD: dict[str, Any] = {
    "requests": 200,
    "arrivals": {"process": "poisson", "rate": 8.0},
    "popularity": {"kind": "uniform"},
    "lengths": {
        "kind": "laws",
        "prompt": {"law": "constant", "tokens": 128},
        "output": {"law": "constant", "tokens": 64},
    },
}


def parse(argv: list[str] | None, spec: ModuleSpec | None, doc: str | None) -> argparse.Namespace:
    command = parser(spec, doc)
    where = command.add_mutually_exclusive_group(required=True)
    where.add_argument("url", nargs="?", help="of the server, such as http://127.0.0.1:8000")
    where.add_argument("--launch", action="store_true", help="start `chorus serve` for the load and stop it after")
    add = command.add_argument
    add("--serve-flags", default="", metavar="FLAGS", help="flags of the launched server; none: the built-in model")
    add("--endpoint", choices=("completions", "chat"), default="completions")
    add("--model", metavar="NAME", help="the base model's name; default: the first served model without a parent")
    add("--adapters", metavar="NAMES", help="adapters to use, with commas; none; default: all that are served")
    add("--api-key", metavar="KEY", help="default: $OPENAI_API_KEY")  # --help must not print these
    add("--plain", action="store_true", help="send only fields that OpenAI has: answers may be shorter than planned")

    add = command.add_argument_group("workload").add_argument
    add("--workload", type=Path, metavar="FILE", help="a specification; perf/notebook/simulator.md has its fields")
    add(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="instead of the file's, or of 200 requests "
        "of 128 + 64 tokens, 8 a second: arrivals.rate=20, lengths.prompt.tokens=512",
    )
    add("--seed", type=int, default=0, help="of the prompts")
    add(
        "--prompts",
        choices=("auto", "skills", "random"),
        default="auto",
        help="skills: questions with exact answers, as with auto where the built-in model is served",
    )

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
    """The specification of the file, or the default one, with the values that `--set` gives. Raises WorkloadError."""
    if args.workload is not None:
        return WorkloadSpec.load(args.workload, args.set)
    adapters = {"count": num_adapters} if num_adapters else {"base_share": 1.0}
    return WorkloadSpec.parse({**deepcopy(_WORKLOAD), "adapters": adapters}, settings=args.set)
