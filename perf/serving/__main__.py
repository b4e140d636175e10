"""Load a server and measure the latencies that its users would see: `python -m chorus.perf.serving URL`, or `--launch`.

The load is an open loop against any OpenAI-compatible server, sent by aiperf, a separate program (`uv tool install
aiperf`): requests are sent at the workload's times, however many are still unanswered. The workload is a specification
file, or a few values. The built-in model is asked questions with exact answers, and its adapters' answers are checked.
Exits with 1 if a request failed or an answer was another adapter's, with 2 if nothing could be measured. The last line
is a JSON object.

Tests: tests/perf/serving/test_load.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np

from ..report.command import conclude
from ..report.table import Table
from ..workload import WorkloadError
from ..workload.request import TraceRequest
from . import aiperf
from .answers import Questions, has_skills, judge
from .errors import LoadError
from .options import parse, workload
from .plan import Names, PlannedRequest, body, with_prompts, with_questions
from .prompts import find_prompts
from .server_process import launched

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv, __spec__, __doc__)
    try:
        with launched(shlex.split(args.serve_flags)) if args.launch else nullcontext() as server:
            result = _measure(args, (server.url if server else args.url).rstrip("/").removesuffix("/v1"))
    except (LoadError, WorkloadError) as error:
        print(f"serving: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if args.out is not None:
        (args.out / "serving.json").write_text(json.dumps(result, indent=1), "utf-8")
    crossed = result["answers"]["cross_talk"] if result["answers"] else 0
    return conclude(result, not (crossed or result["failed"]))


@dataclass(frozen=True)
class _Served:
    """Models of the server; the load uses `adapters`."""

    base: str
    adapters: list[str]
    card: dict[str, Any]
    """The base model's card."""


def _measure(args: argparse.Namespace, url: str) -> dict[str, Any]:
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=args.timeout, trust_env=False) as http:
        served = _choose(args, _send(http, "GET", "/v1/models")["data"])
        spec = workload(args, len(served.adapters))
        names = Names(served.adapters)
        requests = [names.serve(request) for request in spec]
        if not requests:
            raise LoadError("the workload has no requests; give it a longer duration or a higher rate")
        plan = _plan(args, served, requests)
        for model in [served.base] * args.warm_up + (served.adapters if args.warm_adapters else []):
            short = body(model, "hello world\n", 8, chat=args.endpoint == "chat")
            _send(http, "POST", PATHS[args.endpoint], {**short, "stream": False, "stream_options": None})
    with TemporaryDirectory() if args.out is None else nullcontext(args.out) as directory:
        outcome = aiperf.run(args, url, key, plan, Path(directory))
    asked = [request.question for request in plan]
    models = _by_model(plan, outcome)
    models.show()
    return {
        "url": url,
        "endpoint": args.endpoint,
        "model": served.base,
        "adapters": served.adapters,
        "workload": spec.model_dump(mode="json", by_alias=True),
        "substituted_adapters": names.substituted,
        "shortened_requests": sum(request.shortened for request in plan),
        "requests": len(plan),
        "failed": outcome.failed,
        "load": outcome.metrics,
        "errors": outcome.summary.get("error_summary"),
        "prompts": "skills" if any(asked) else "random",
        "models": [dict(zip(models.columns, row, strict=True)) for row in models.rows],
        "answers": judge(asked, outcome.texts) if any(asked) else None,
    }


def _send(http: httpx.Client, method: str, path: str, sent: dict[str, Any] | None = None) -> dict[str, Any]:
    """Body of a response. Raises LoadError."""
    try:
        response = http.request(method, path, json=sent)
    except httpx.HTTPError as error:
        raise LoadError(f"{http.base_url} can't be reached: {error}; is the server up?") from None
    if response.status_code != 200:
        raise LoadError(f"{path} {(sent or {}).get('model', '')} answered {response.status_code}: {response.text:.300}")
    return response.json()


def _by_model(plan: Sequence[PlannedRequest], outcome: aiperf.Outcome) -> Table:
    """Medians and 99th percentiles of each model, the most used first."""
    found: dict[str, list[dict[str, float]]] = {}
    for request, times in zip(plan, outcome.times, strict=True):
        found.setdefault(request.model, []).append(times)
    table = Table("by model, ms", ["model", "requests", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"])
    for model, each in sorted(found.items(), key=lambda item: -len(item[1])):
        known = (
            [one[name] for one in each if name in one]
            for name in (aiperf.OBJECTIVES["ttft"], aiperf.OBJECTIVES["tpot"])
        )
        marks = (np.percentile(its, (50, 99)).tolist() if its else (None, None) for its in known)
        table.add(model, len(each), *itertools.chain.from_iterable(marks))
    return table


def _choose(args: argparse.Namespace, cards: Sequence[dict[str, Any]]) -> _Served:
    """The base model and the adapters that the load uses. Raises LoadError for names that are not served."""
    by_name = {card["id"]: card for card in cards}
    bases = [name for name, card in by_name.items() if not card.get("parent")]
    base = args.model or next(iter(bases or by_name), "")
    adapters = [name for name in by_name if name != base]
    if args.adapters is not None:
        adapters = [name for name in args.adapters.split(",") if name not in ("", "none")]
    for name in (base, *adapters):
        if name not in by_name:
            raise LoadError(f"the server has no model {name!r}; it has {', '.join(by_name) or 'none'}")
    return _Served(base, adapters, by_name[base])


def _plan(args: argparse.Namespace, served: _Served, requests: Sequence[TraceRequest]) -> list[PlannedRequest]:
    chat, skilled = args.endpoint == "chat", has_skills(served.base, served.adapters)
    if args.prompts == "skills" and not skilled:
        raise LoadError("--prompts skills needs the built-in model, and only adapters named after its skills")
    if args.prompts == "skills" or (args.prompts == "auto" and skilled and args.workload is None):
        return list(with_questions(requests, served.base, Questions(args.seed), chat=chat))
    prompts = find_prompts(served.card, args.seed, as_text=chat)
    limit = served.card.get("max_model_len")
    return list(with_prompts(requests, served.base, prompts, limit, chat=chat, plain=args.plain))


if __name__ == "__main__":
    sys.exit(main())
