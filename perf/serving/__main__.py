"""Load a server and see what its users would: `python -m chorus.perf.serving URL`, or `--launch`.

Open loop against any OpenAI-compatible server, over streaming HTTP: requests are sent when the workload says, however
many are still unanswered, and every latency counts from then. The workload is a specification file, or a few flags.
The built-in model is asked questions with exact answers, and its adapters' answers are checked while they are timed.
Exits with 1 if a request failed or an answer was another adapter's, with 2 if nothing could be measured. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from ..report.command import conclude
from ..workload import WorkloadError
from ..workload.request import TraceRequest
from .answers import Questions, has_skills, judge
from .client import Client, need_aiohttp
from .load import Outcome, run_load, warm_up
from .options import parse, workload
from .plan import Names, PlannedRequest, with_prompts, with_questions
from .prompts import find_prompts
from .record import LoadError
from .server_process import launched
from .show import show
from .summary import Objectives, client_summary, summarise


def main(argv: list[str] | None = None) -> int:
    args = parse(argv, __spec__, __doc__)
    try:
        need_aiohttp()
        with launched(shlex.split(args.serve_flags)) if args.launch else nullcontext() as server:
            result, outcome = asyncio.run(_measure(args, server.url if server else args.url))
        _write(args, result, outcome)
    except (LoadError, WorkloadError) as error:
        print(f"serving: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    show(Console() if sys.stdout.isatty() else Console(width=120), result)
    crossed = result["answers"]["cross_talk"] if result["answers"] else 0
    return conclude(result, not (crossed or result["load"]["errors"]))


@dataclass(frozen=True)
class _Served:
    """Models of the server, of which the load uses `adapters`. card: the base model's."""

    base: str
    adapters: list[str]
    card: dict[str, Any]


async def _measure(args: argparse.Namespace, url: str) -> tuple[dict[str, Any], Outcome]:
    counts = {"include_usage": True} if args.plain else {"include_usage": True, "continuous_usage_stats": True}
    extra = {"temperature": 0.0, "stream_options": counts}
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    async with Client(url, args.endpoint, timeout=args.timeout, api_key=key, extra=extra) as client:
        served = _choose(args, await client.models())
        spec = workload(args, len(served.adapters))
        names = Names(served.adapters)
        requests = [names.serve(request) for request in spec]
        if not requests:
            raise LoadError("the workload has no requests; give it a longer duration or a higher rate")
        plan = _plan(args, served, requests)
        await _warm(args, client, plan, served)
        outcome = await run_load(client, plan, args.max_concurrency)
    setting = {
        "url": url,
        "endpoint": args.endpoint,
        "model": served.base,
        "adapters": served.adapters,
        "workload": spec.model_dump(mode="json", by_alias=True),
        "substituted_adapters": names.substituted,
        "shortened_requests": sum(request.shortened for request in plan),
    }
    return {**setting, **_findings(args, plan, outcome)}, outcome


def _findings(args: argparse.Namespace, plan: Sequence[PlannedRequest], outcome: Outcome) -> dict[str, Any]:
    objectives, records = Objectives(args.slo_ttft, args.slo_tpot, args.slo_e2e), outcome.records
    asked = [request.question for request in plan]
    details = {record.error: record.detail for record in reversed(records) if record.error}
    return {
        "objectives": asdict(objectives),
        "load": summarise(records, objectives),
        "client": client_summary(outcome.cost, records),
        "error_details": details,
        "prompts": "skills" if any(asked) else "random",
        "answers": judge(asked, records) if any(asked) else None,
    }


def _choose(args: argparse.Namespace, cards: Sequence[dict[str, Any]]) -> _Served:
    """The base model and the adapters that the load uses. Raises LoadError for names that are not served."""
    by_name = {card["id"]: card for card in cards}
    bases = [name for name, card in by_name.items() if not card.get("parent")]
    base = args.model or next(iter(bases or by_name), None)
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
    prompts = find_prompts(served.card, args.tokenizer, args.seed, as_text=chat)
    limit = served.card.get("max_model_len")
    return list(with_prompts(requests, served.base, prompts, limit, plain=args.plain))


async def _warm(args: argparse.Namespace, client: Client, plan: Sequence[PlannedRequest], served: _Served) -> None:
    """Requests that are not measured, short ones. Raises LoadError if one fails: then none would succeed."""
    models = [served.base] * args.warm_up + (served.adapters if args.warm_adapters else [])
    first = plan[0]
    requests = [PlannedRequest(0.0, model, first.prompt, min(first.max_tokens, 8), first.extra) for model in models]
    for record in await warm_up(client, requests):
        if not record.ok:
            raise LoadError(f"a first request to {record.model} failed: {record.error}: {record.detail}")


def _write(args: argparse.Namespace, result: dict[str, Any], outcome: Outcome) -> None:
    if args.out is None:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "serving.json").write_text(json.dumps(result, indent=1), "utf-8")
    with (args.out / "requests.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record.to_json()) + "\n" for record in outcome.records)


if __name__ == "__main__":
    sys.exit(main())
