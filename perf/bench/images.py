"""Images: how fast they are encoded, and how text fares beside a flood of them.

`python -m chorus.perf.bench.images`, on CPUs. All ratios are of turns next to each other in one run:

* `encoding`: images a second of processors through the engine's encoder, from the file to the rows, over those of
  transformers with the same threads, the same priority and one image a call; and through eight adapters of the tower
  over those without. Images a second of the clock are printed, too.
* `text`: tokens a second of text requests with one thread for steps and one for the encoder, over those without
  images. The flood is either of images alone, whose rows nobody takes, or of whole requests, whose prompts join the
  steps and take their part of them. The longest step is compared with the median of the same turn.
* `again`: images that are encoded when all of them are sent a second time.

`first` is the turn in which the tower is read, `alone` shows what the machine does to steps without images. Bars hold
for what a busy machine tells, too: encoding by processor time; text without the time in which its thread could have
run and had no processor, by Linux's `schedstat`. Waits for the encoder, such as for the interpreter's lock, count. The
clock's values are printed, too, and other processes' share of the machine.

Tests: tests/perf/bench/test_images.py
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from ...core.cpus import available_cpus
from ...core.media import background
from ...core.media.lacking import why_lacking
from ..report.command import count, judge, parser, say
from ..report.table import Goal, Table
from .machine import CpuSample, processor
from .models.random_seeing import SEEING_SIZES, seeing_checkpoint, tower_adapters
from .seeing.beside_images import ALONE, IMAGES, REQUESTS, Pace, beside
from .seeing.image_encoding import ADAPTERS, encoding

ENCODING_BAR, ADAPTERS_BAR = 0.7, 0.8
TEXT_BAR, STEP_BAR = 0.8, 3.0


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("--model-size", choices=SEEING_SIZES, default="384px", metavar="NAME")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--threads", type=count, default=available_cpus(), help="that encode, where nothing else runs")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--same-priority", action="store_true", help="as steps: on a busy machine the encoder hardly runs else")
    add("--rounds", type=count, default=3)
    add("--seconds", type=float, default=10.0, help="of a turn of text")
    add("--output-tokens", type=count, default=64, help="of a text request")
    add("--images", type=count, default=400, help="prepared before turns of text; each is encoded once")
    add("--memory-mib", type=count, default=256, help="for KV and adapters")
    add("--work-dir", type=Path, default=Path("build/images"))
    args = command.parse_args(argv)
    if (lacking := why_lacking()) is not None:
        print(f"images: {lacking}", file=sys.stderr)
        return 2
    path = seeing_checkpoint(args.model_size, args.work_dir)
    adapters = tower_adapters(args.model_size, ADAPTERS, args.work_dir)
    began = CpuSample.take([os.getpid()])
    found: dict[str, Any] = {"device": processor(), "model_size": args.model_size, "dtype": args.dtype}
    with patch.object(background, "stand_back", _nothing) if args.same_priority else nullcontext():
        goals = [goal for part in args.parts for goal in PARTS[part](args, path, adapters, found)]
    found["foreign_share"] = CpuSample.take([os.getpid()]).foreign_share(began)
    say(f"other processes had {found['foreign_share']:.0%} of the machine's time")
    return judge(found, goals)


def _encoding(args: Namespace, path: Path, adapters: Path, found: dict[str, Any]) -> list[Goal]:
    rates, again = encoding(args, path, adapters)
    over = {"encoding": ("base", "transformers"), "adapters": ("adapters", "base")}
    wall = {name: [each.wall for each in own] for name, own in rates.items()}
    busy = {name: [each.processors for each in own] for name, own in rates.items()}
    ratios = {name: _ratio(busy[own], busy[other]) for name, (own, other) in over.items()}
    by_clock = {name: _ratio(wall[own], wall[other]) for name, (own, other) in over.items()}
    table = Table("encoding", ["way", "images/s", "ratio", "images/s of processors", "ratio of these"])
    table.add("transformers, one image a call", median(wall["transformers"]), None, median(busy["transformers"]), None)
    table.add("encoder", median(wall["base"]), by_clock["encoding"], median(busy["base"]), ratios["encoding"])
    title = f"encoder, {ADAPTERS} adapters"
    table.add(title, median(wall["adapters"]), by_clock["adapters"], median(busy["adapters"]), ratios["adapters"])
    table.show()
    found |= {"ratios": ratios, "by_clock": by_clock, "rates": wall, "again": again}
    return [
        Goal("encoding / transformers", ratios["encoding"], ENCODING_BAR),
        Goal("eight adapters / none", ratios["adapters"], ADAPTERS_BAR),
        Goal("images encoded again", again, 0, at_most=True),
    ]


def _text(args: Namespace, path: Path, adapters: Path, found: dict[str, Any]) -> list[Goal]:
    turns = beside(args, path, adapters)
    shares, longest = _shown("text", {name: [turn.unqueued for turn in own] for name, own in turns.items()})
    by_clock, _ = _shown("text, by the clock", {name: [turn.clock for turn in own] for name, own in turns.items()})
    images = {name: sum(turn.images for turn in own) for name, own in turns.items()}
    say(f"images encoded meanwhile: {images}")
    found |= {"text": shares, "text_by_clock": by_clock, "longest": longest, "images": images}
    return [
        *(Goal("text / alone", shares[name], TEXT_BAR, where=name) for name in (IMAGES, REQUESTS)),
        *(Goal("longest step / median", longest[name], STEP_BAR, True, name) for name in (IMAGES, REQUESTS)),
    ]


def _shown(title: str, paces: Mapping[str, Sequence[Pace]]) -> tuple[dict[str, float], dict[str, float]]:
    """Show a table; return rates over those without images, and the longest steps over the median."""
    rates = {name: [pace.rate for pace in own] for name, own in paces.items()}
    shares = {name: _ratio(own, rates[ALONE][: len(own)]) for name, own in rates.items()}
    longest = {name: max(pace.longest for pace in own) for name, own in paces.items()}
    table = Table(title, ["beside", "tokens/s", "ratio", "step, ms", "longest step, ms", "longest / median"])
    for name, own in paces.items():
        step, most = (1e3 * value for value in (median(p.median_step for p in own), max(p.longest_step for p in own)))
        table.add(name, median(rates[name]), shares[name], step, most, longest[name])
    table.show()
    return shares, longest


PARTS = {"encoding": _encoding, "text": _text}


def _nothing(_: int) -> None: ...


def _ratio(own: Sequence[float], over: Sequence[float]) -> float:
    """Median of the ratios within a round."""
    return median(mine / others for mine, others in zip(own, over, strict=True))


if __name__ == "__main__":
    sys.exit(main())
