"""Tables of schedules as files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from chorus.ops.schedule_table import device_key
from chorus.ops.sgmv_schedule import Schedule

Line = tuple[str, int, int, int, Schedule]


def contents(name: str, lines: Iterable[Line]) -> dict:
    """JSON of a table; lines: kind, tokens, max_rank, itemsize, schedule."""
    names = ("kind", "tokens", "max_rank", "itemsize")
    return {
        "format": 1,
        "device": {"type": "cuda", "name": name, "capability": "9.0"},
        "driver": None,
        "versions": {"triton": "3.6.0"},
        "commit": {"hash": "0" * 40, "dirty": False},
        "date": "2026-01-01T00:00:00+00:00",
        "model": "made up",
        "method": "made up",
        "entries": [
            {**dict(zip(names, key, strict=True)), "us": 1.0, "rule_us": 2.0, "schedule": asdict(schedule)}
            for *key, schedule in lines
        ],
    }


def write_table(folder: Path, name: str, lines: Iterable[Line]) -> Path:
    path = folder / f"{device_key(name)}.json"
    path.write_text(json.dumps(contents(name, lines)), encoding="utf-8")
    return path
