"""`python -m chorus.perf.gpu.tune`: measure this GPU's table of SGMV schedules, which serving reads at start-up."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from ...ops.schedule_table import FOLDER, FORMAT, ScheduleTable, device_key
from .environment import describe
from .sizes import SIZES

#: The model whose shapes a table that is kept was measured at.
MODEL = "llama-3.1-8b"
SMOKE = "smoke run, not a measurement"


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    model = args.model_size or ("tiny" if args.device == "cpu" else MODEL)
    if args.write and (args.device == "cpu" or model != MODEL or args.max_ranks):
        parser.error(f"--write: only a GPU's whole table, at the shapes of {MODEL}, goes into the repository")
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    found = measure(args.device, model, args.out.resolve(), args.max_ranks, args.seed)
    name = device_key(found["device"]["name"])
    paths = [args.out / f"{name}.json", *([FOLDER / f"{name}.json"] if args.write else [])]
    if args.device != "cpu":
        ScheduleTable.parse(found, str(paths[0]))
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path}", file=sys.stderr)
    entries = found["entries"]
    gains = [1 - entry["us"] / entry["rule_us"] for entry in entries]
    summary = {"entries": len(entries), "changed": sum(gain > 0 for gain in gains), "largest_gain": max(gains)}
    print(json.dumps({**summary, **({"note": SMOKE} if args.device == "cpu" else {})}))
    return 0


def measure(device: str, model: str, out: Path, max_ranks: list[int] | None, seed: int) -> dict[str, Any]:
    """A table's contents; entries that are in `out` already, of the same device and commit, are not measured again.

    Raises RuntimeError where the device is not there, OtherSettings where `out` has entries of others.
    """
    import torch

    from .context import Context
    from .store import ResultStore
    from .timer import CudaTimer, WallTimer
    from .tune_bench import Bench, buckets
    from .tune_search import search

    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device; for a smoke run without one: --device cpu")
    timer = CudaTimer(0.1) if device == "cuda" else WallTimer(1)
    environment = describe(device)
    settings = {"run": "tune", "device": environment["device"]["name"], "model": model, "seed": seed}
    settings["commit"] = environment["commit"]
    store = ResultStore(out, settings)
    context = Context(device, SIZES[model], False, timer, store, out / "work", seed)
    chosen = {bucket.name: bucket for bucket in buckets(context, max_ranks or ())}
    store.check(chosen)
    missing = {name: bucket for name, bucket in chosen.items() if not store.is_done(name)}
    bench = Bench(context, list(missing.values())) if missing else None
    for name, bucket in missing.items():
        began = time.perf_counter()
        found = search(bucket, bench)
        context.say(f"{bucket}: {found.us:.1f} µs, by the rules {found.rule_us:.1f} µs; {found.schedule}")
        for line in found.unfit:
            context.say(f"  left out {line}")
        store.write_done(name, time.perf_counter() - began, environment, found.entry())
    entries = [store.values(name) for name in chosen]
    return {
        "format": FORMAT, **environment, "model": model, "method": context.timer.method,
        **({"note": SMOKE} if device == "cpu" else {}), "entries": entries,
    }  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m chorus.perf.gpu.tune", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder that the table is written to")
    add("--write", action="store_true", help="write it into the repository, too, where serving finds it")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a smoke run of the command itself")
    add("--model-size", choices=tuple(SIZES), help=f"default: {MODEL}, on a CPU tiny")
    add("--max-ranks", type=int, nargs="+", metavar="RANK", help="only these; default: 16, 64 and 256")
    add("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
