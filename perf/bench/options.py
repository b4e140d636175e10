"""The command line of the benchmark.

Tests: tests/perf/bench/test_main.py
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.config import EngineConfig
from .. import bench
from ..report.command import parser
from .models.families import FAMILIES
from .models.sizes import SIZES, TINY, is_smoke
from .sections.registry import SECTIONS, sections_of
from .store import ResultStore

if TYPE_CHECKING:
    from .context import Context

#: A quick run ends within 8 minutes, and one section that hangs leaves time for the others.
QUICK_SECONDS, QUICK_SECTION_SECONDS = 480.0, 200.0

_ABOUT = "Measure a device; a second call runs only what is missing.\n\nSections:\n" + "\n".join(
    f"  {name}: {what}" for name, what in SECTIONS.items()
)


class Options(argparse.Namespace):
    """Parse the command line. given: its arguments. worker: the one section that this process is to run."""

    @classmethod
    def parse(cls, argv: list[str] | None) -> Options:
        given = sys.argv[1:] if argv is None else argv
        options = _parser().parse_args(given, cls(given=given))
        options.out = options.out.resolve()
        options.work_dir = (options.work_dir or options.out / "work").resolve()
        options.model_size = options.model_size or (TINY if options.device == "cpu" else "llama-3.1-8b")
        chosen = options.sections or options.known
        options.sections = [name for name in SECTIONS if name in chosen]  # some need results of those before them
        options.budget = options.budget or (QUICK_SECONDS if options.quick else math.inf)
        options.section_timeout = options.section_timeout or (QUICK_SECTION_SECONDS if options.quick else math.inf)
        return options

    @property
    def engine_fields(self) -> dict[str, str]:
        """Fields of EngineConfig with other than default values, from `--engine NAME=VALUE`."""
        return dict(field.split("=", 1) for field in self.engine)

    @property
    def known(self) -> dict[str, str]:
        """Sections of a complete run of this kind."""
        return sections_of(self.device, self.smoke)

    @property
    def smoke(self) -> bool:
        return is_smoke(self.device, self.model_size)

    @property
    def settings(self) -> dict[str, Any]:
        """Values that must be equal for results to belong together."""
        run = "quick" if self.quick else "full"
        return {
            "run": run,
            "device": self.device,
            "model": self.model_size if self.family == "llama" else f"{self.model_size} as {self.family}",
            "seed": self.seed,
            "engine": " ".join(sorted(self.engine)) or "as it is by default",
        }

    def store(self) -> ResultStore:
        return ResultStore(self.out, self.settings)

    def context(self, save: Callable[[dict[str, Any]], None] = lambda found: None) -> Context:
        """Context for sections. save: see Context. Raises RuntimeError if the device is missing."""
        import torch

        from .context import Context
        from .timer import CudaTimer, WallTimer

        if self.device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device; for a smoke run without one: --device cpu")
        timer = WallTimer(1 if self.smoke else 5)
        if self.device == "cuda":
            timer = CudaTimer(0.05 if self.quick else 0.3)
        beside = {name: Path(path) for name, path in (each.split("=", 1) for each in self.beside)}
        size, fields = replace(SIZES[self.model_size], family=self.family), self.engine_fields
        return Context(
            self.device,
            size,
            quick=self.quick,
            timer=timer,
            store=self.store(),
            work_dir=self.work_dir,
            seed=self.seed,
            save=save,
            engine=fields,
            beside=beside,
        )


def _parser() -> argparse.ArgumentParser:
    command = parser(bench.__spec__, _ABOUT)
    add = command.add_argument
    how = command.add_mutually_exclusive_group(required=True)
    how.add_argument("--quick", action="store_true", help="few cases: at most 8 minutes")
    how.add_argument("--full", action="store_true", help="all cases")
    add("--out", type=Path, required=True, help="folder of the result files")
    what = "cpu: with the model size tiny a smoke run of the benchmark itself"
    add("--device", choices=("cuda", "cpu"), default="cuda", help=what)
    add("--model-size", choices=tuple(SIZES), help="default: llama-3.1-8b, on a CPU tiny")
    add(
        "--family", choices=tuple(FAMILIES), default="llama", help="section levels: of these shapes, with dummy weights"
    )
    add("--sections", nargs="+", choices=tuple(SECTIONS), metavar="NAME", help="default: all of this device")
    add("--work-dir", type=Path, help="where adapters are written; default: work in the folder of the results")
    add("--budget", type=float, metavar="SECONDS", help="time for all; default: 480 with --quick, else no limit")
    add("--section-timeout", type=float, metavar="SECONDS", help="for one; default: 200 with --quick, else no limit")
    add(
        "--engine",
        type=engine_field,
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="fields of the engine's configuration, such as dependent_launch=off, to compare with a run without them",
    )
    add(
        "--beside",
        type=_named,
        nargs="+",
        default=[],
        metavar="NAME=PATH",
        help="baselines for sections peers and levels: vllm=ENV/bin/vllm, llamacpp=TREE, NAME=LIBRARY.so",
    )
    add("--seed", type=int, default=0)
    add("--worker", choices=tuple(SECTIONS), help=argparse.SUPPRESS)
    return command


def _named(text: str) -> str:
    if "=" not in text or not Path(text.split("=", 1)[1]).exists():
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=PATH with an existing path")
    return text


def engine_field(text: str) -> str:
    """An argument NAME=VALUE. Raises ArgumentTypeError if no field of EngineConfig has the name."""
    name, equals, _ = text.partition("=")
    if not equals or name not in EngineConfig.model_fields:
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=VALUE with a field of EngineConfig")
    return text
