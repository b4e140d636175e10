"""`chorus plan`: computes the replicas, GPU, memory and policy that a recorded load needs to meet an SLO."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path

from ...server.start.flags import UsageError, read_seconds
from ..simulate.command import number

HELP = "find the cheapest cluster that meets an SLO under a recorded load, by simulation"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add, count = parser.add_argument, number(int, 1)
    add(
        "--trace", type=Path, required=True, metavar="FILE", help="recorded requests, from `chorus serve --record FILE`"
    )
    gpu = "h100, h200, a100, l40s, l4, b200 or mi300x: steps are predicted from published figures; or profile:FILE, "
    add("--gpu", required=True, metavar="NAME", help=gpu + "which `chorus profile` measured")
    model = "directory, GGUF file or name of the model, needed for a GPU's name; reads no weights"
    add("--model", type=Path, metavar="MODEL", help=model)
    add("--slo-ttft", type=read_seconds, metavar="TIME", help="most time to the first token, such as 500ms")
    add("--slo-tpot", type=read_seconds, metavar="TIME", help="most time for each later token on average, such as 50ms")
    share = number(float, 0, above=True, most=1)
    add(
        "--attainment",
        type=share,
        default=0.99,
        metavar="SHARE",
        help="share of requests that must meet the SLO (default: 0.99)",
    )
    add("--policy", metavar="NAMES", help="as `chorus cluster up --policy` takes them, with commas (default: all)")
    add(
        "--memory-bytes",
        metavar="SIZES",
        help="sizes of the page pool to try, with commas (default: all of the memory, and half of it)",
    )
    hosts = "sizes of the host cache to try, with commas "
    hosts += "(default: 1GiB, and the size of the trace's adapters if that is more)"
    add("--host-cache-bytes", metavar="SIZES", help=hosts)
    add("--max-replicas", type=count, default=16, metavar="N", help="most replicas to try (default: 16)")
    follow = "have candidates follow the load, from N replicas on, as `chorus cluster up --min-replicas` does"
    add("--min-replicas", type=count, metavar="N", help=follow)
    boot = "seconds until one more replica serves (default: 30)"
    add("--boot-seconds", type=number(float, 0), default=30.0, metavar="S", help=boot)
    add(
        "--seeds",
        type=count,
        default=5,
        metavar="N",
        help="random loads that each candidate is tried with (default: 5)",
    )
    add("--jobs", type=count, default=1, metavar="N", help="processes; the plan doesn't depend on them (default: 1)")
    scale = "plan for X times the trace's rate (default: 1)"
    add("--scale", type=number(float, 0, above=True), default=1.0, metavar="X", help=scale)
    add("--rank", type=count, metavar="N", help="rank of adapters without one in the trace")
    add("--targets", metavar="NAMES", help="projections that adapters change, with commas (default: all)")
    engine = (
        "another setting of `chorus serve` for all candidates, such as max_num_seqs=64; repeatable; a wrong name is "
    )
    add(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=engine + "refused with the list of supported settings",
    )
    add("--out", type=Path, default=Path("plan.html"), metavar="FILE", help="the page (default: plan.html)")
    add("--json", action="store_true", help="print the plan and all candidates as one JSON object")


def check(arguments: argparse.Namespace) -> None:
    """Raise UsageError for flags that don't go together."""
    if (arguments.min_replicas or 1) > arguments.max_replicas:
        raise UsageError(
            f"chorus plan: error: --min-replicas is {arguments.min_replicas}, above --max-replicas "
            f"{arguments.max_replicas}; change one of them"
        )
    if arguments.slo_ttft is None and arguments.slo_tpot is None:
        raise UsageError("chorus plan: error: the SLO is missing; give --slo-ttft, --slo-tpot or both")


def run(arguments: argparse.Namespace) -> int:
    """Run the command: 0 for a plan, 1 if no candidate meets the SLO, 2 for wrong input."""
    from ...core.costs.profile import ProfileError
    from ...core.model.specs.config import UnsupportedModel
    from ...server.checkpoints.pull import PullError
    from ..workload.fields import WorkloadError
    from .plan import make_plan

    check(arguments)
    if not arguments.out.absolute().parent.is_dir():
        raise UsageError(f"chorus plan: error: --out is {arguments.out}: its directory does not exist; make it")
    if find_spec("matplotlib") is None:
        raise UsageError("chorus plan: error: the page's charts need matplotlib; run pip install 'chorus-lora[plan]'")
    from .page import page

    try:
        plan = make_plan(arguments)
        arguments.out.write_text(page(plan), encoding="utf-8")
    except (ProfileError, WorkloadError, UnsupportedModel) as error:
        print(f"chorus plan: error: {error}", file=sys.stderr)
        return 2
    except PullError as error:
        print(f"chorus plan: error: --model: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"chorus plan: error: --out {arguments.out}: {error.strerror}; name another file", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(plan.to_json()))
    else:
        command = plan.command()
        sizes = map(str, plan.fleet.adapter_sizes())
        print("\n".join([plan.summary(), *([command] if command else []), *sizes, f"The page: {arguments.out}"]))
    return 0 if plan.best is not None else 1
