"""Load by aiperf, a separate program: it gets a plan as a file, and its result files are read back as texts and
times.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...server.demo.builtin import BUILTIN_MODEL
from .errors import LoadError
from .plan import PlannedRequest

#: Our flags → metrics of its objectives.
OBJECTIVES = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2e": "request_latency"}


@dataclass(frozen=True)
class Outcome:
    """summary: aiperf's own, from `profile_export_aiperf.json`. texts: completions in the order of the plan, None for a
    request without one. times: `time_to_first_token` and so on of each, in milliseconds.
    """

    summary: dict[str, Any]
    texts: list[str | None]
    times: list[dict[str, float]]

    @property
    def metrics(self) -> dict[str, Any]:
        return {name: found for name, found in self.summary.items() if isinstance(found, dict) and "unit" in found}

    @property
    def failed(self) -> int:
        return len(self.texts) - int(self.metrics.get("request_count", {}).get("avg", 0))


def run(
    args: argparse.Namespace, url: str, key: str | None, plan: Sequence[PlannedRequest], directory: Path
) -> Outcome:
    """Send each request at its time, however many are unanswered. Its files, including ours, are in `directory`.

    Raises LoadError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    load = directory / "load.jsonl"
    lines = (
        {"session_id": str(index), "timestamp": 1e3 * request.at, "payload": request.body}
        for index, request in enumerate(plan)
    )
    load.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    objectives = [
        f"{metric}:{getattr(args, f'slo_{name}'):g}"
        for name, metric in OBJECTIVES.items()
        if getattr(args, f"slo_{name}") is not None
    ]
    models = ",".join(dict.fromkeys(request.model for request in plan))
    words = [*shlex.split(args.aiperf), "profile", "--url", url, "--endpoint-type", args.endpoint, "--streaming"]
    words += ["--model-names", models, "--input-file", str(load), "--custom-dataset-type", "mooncake_trace"]
    words += ["--fixed-schedule", "--use-server-token-count"]
    words += ["--tokenizer", str(BUILTIN_MODEL)]  # aiperf requires one, and counts nothing with it
    words += ["--request-timeout-seconds", f"{args.timeout:g}", "--export-outputs-json"]
    words += ["--artifact-dir", str(directory), "--ui", "none"]
    words += ["--goodput", " ".join(objectives)] if objectives else []
    words += ["--api-key", key] if key else []
    try:
        done = subprocess.run(words, check=False)
    except OSError as error:
        raise LoadError(
            f"--aiperf {args.aiperf!r} can't be run ({error}); install it with `uv tool install aiperf` or "
            "`pipx install aiperf`, or name its command"
        ) from None
    if done.returncode:
        raise LoadError(f"aiperf ended with {done.returncode}; {directory / 'logs'} has its log")
    answers = {int(found["conversation_id"]): found for found in _read(directory / "outputs.json")["data"]}
    found = [answers.get(index, {}) for index in range(len(plan))]
    return Outcome(
        _read(directory / "profile_export_aiperf.json"),
        [one.get("response_text") for one in found],
        [one.get("metrics", {}) for one in found],
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} can't be read ({error}); aiperf 0.13 writes it, use that version") from None
