"""The command line of the GPU benchmark."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .sections.registry import SECTIONS
from .sizes import SIZES
from .store import ResultStore

if TYPE_CHECKING:
    from .context import Context

#: A quick run ends within 8 minutes, and one section that hangs leaves time for the others.
QUICK_SECONDS, QUICK_SECTION_SECONDS = 480.0, 200.0

_EPILOG = "Sections: " + "; ".join(f"{name}: {what}" for name, what in SECTIONS.items()) + "."


@dataclass(frozen=True)
class Options:
    """Options of the command line. worker: the one section that this process is to run."""

    out: Path
    quick: bool
    device: str
    model_size: str
    work_dir: Path
    seed: int
    sections: tuple[str, ...]
    redo: tuple[str, ...]
    budget: float
    section_timeout: float
    archive: Path | None = None
    worker: str | None = None

    @classmethod
    def parse(cls, argv: list[str] | None) -> Options:
        args = _parser().parse_args(argv)
        out, unlimited = args.out.resolve(), math.inf
        return cls(
            out=out, quick=args.quick, device=args.device, seed=args.seed, worker=args.worker,
            model_size=args.model_size or ("tiny" if args.device == "cpu" else "llama-3.1-8b"),
            work_dir=(args.work_dir or out / "work").resolve(), sections=tuple(args.sections or SECTIONS),
            redo=tuple(SECTIONS if "all" in args.redo else args.redo), archive=args.archive and args.archive.resolve(),
            budget=args.budget or (QUICK_SECONDS if args.quick else unlimited),
            section_timeout=args.section_timeout or (QUICK_SECTION_SECONDS if args.quick else unlimited),
        )  # fmt: skip

    def argv(self) -> list[str]:
        """The command line of a worker."""
        return [
            "--quick" if self.quick else "--full", "--out", str(self.out), "--device", self.device,
            "--model-size", self.model_size, "--work-dir", str(self.work_dir), "--seed", str(self.seed),
        ]  # fmt: skip

    @property
    def settings(self) -> dict[str, Any]:
        """Values that must be equal for results to belong together."""
        return {
            "run": "quick" if self.quick else "full", "device": self.device, "model": self.model_size, "seed": self.seed
        }  # fmt: skip

    def store(self) -> ResultStore:
        return ResultStore(self.out, self.settings)

    def context(self) -> Context:
        """Context for sections. Raises RuntimeError where the device is not there."""
        import torch

        from .context import Context
        from .timer import CudaTimer, WallTimer

        if self.device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch sees no CUDA device; for a smoke run without one: --device cpu")
        timer = CudaTimer(0.05 if self.quick else 0.3) if self.device == "cuda" else WallTimer(1)
        return Context(
            self.device, SIZES[self.model_size], self.quick, timer, self.store(), self.work_dir, self.seed
        )  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m chorus.perf.gpu",
        description="Run every GPU test and measurement; a second call runs only what is missing.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--quick", action="store_true", help="few cases: at most 8 minutes")
    how.add_argument("--full", action="store_true", help="all cases")
    add("--out", type=Path, required=True, help="folder of the result files")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a smoke run of the benchmark itself")
    add("--model-size", choices=tuple(SIZES), help="default: llama-3.1-8b, on a CPU tiny")
    add("--sections", nargs="+", choices=tuple(SECTIONS), metavar="NAME", help="only these; default: all")
    add("--redo", nargs="+", choices=(*SECTIONS, "all"), default=[], metavar="NAME", help="run these again, or all")
    add("--work-dir", type=Path, help="where adapters are written; default: work in the folder of the results")
    add("--budget", type=float, metavar="SECONDS", help="time for all; default: 480 with --quick, else no limit")
    add("--section-timeout", type=float, metavar="SECONDS", help="for one; default: 200 with --quick, else no limit")
    add(
        "--archive", type=Path, metavar="FILE",
        help="a .tar.gz of all results and logs, written after every section; where it is there already it is unpacked "
        "first, so that a second call goes on from it",
    )  # fmt: skip
    add("--seed", type=int, default=0)
    add("--worker", choices=tuple(SECTIONS), help=argparse.SUPPRESS)
    return parser
