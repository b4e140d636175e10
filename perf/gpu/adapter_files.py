"""Adapter directories for the benchmark: one set of random weights per rank, under as many names as are wanted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ..cpu import random_model
from ..cpu.workload import Workload
from .sizes import ModelSize


def adapter_dirs(size: ModelSize, dtype: str, rank: int, count: int, work_dir: Path) -> dict[str, Path]:
    """`count` adapters of one rank on all projections, by name; made on first use.

    Their files are hard links to the same weights: read, held and loaded they are adapters of their own, and the disk
    holds them once.
    """
    workload = Workload(size.geometry, ranks=(rank,), dtype=dtype)
    (source,) = random_model.adapters(workload, work_dir).values()
    made = {}
    for index in range(count):
        name = f"r{rank}-{index:03d}"
        made[name] = work_dir / "named" / dtype / name
        made[name].mkdir(parents=True, exist_ok=True)
        for path in source.iterdir():
            _link(path, made[name] / path.name)
    return made


def _link(source: Path, target: Path) -> None:
    """Make `target` another name of `source`, or a copy where the file system has no links."""
    if target.exists() and target.samefile(source):
        return
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
