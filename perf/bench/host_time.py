"""Host time of a decode step without a GPU: `python -m chorus.perf.bench.host_time [--rows 1 8 32 64]`.

The engine, scheduler, executor, static buffers and tables are real. Graph replays, device copies and kernel launches do
nothing, so only the host's work between them is measured. Reported are microseconds, of the fastest step, for the base
model and with an adapter per sequence:

* `step`: a whole step
* `execute`: the executor's part, from the plan to the tokens
* `pages`: the part of that which writes the page lists for FlashInfer

For a step that prefills `--prompt` tokens, of the base model, with an adapter, and together with decoding sequences
(`mixed`); left out without triton:

* `layer`: one layer's launches
* `layer in pieces`: the same with piecewise CUDA graphs

The number of launches per layer, by kind: for decode steps with the library's GEMMs, our kernel (`small`) or ours with
fused norms (`fused`), also beside an adapter in the weights (`merged`), and for prompts, eager or piecewise; left out
without triton. Counts and times are the gate's
suite `host_time`.

`tables`: bytes of the adapter tables for Llama-3.1-8B's shapes, in page-locked host memory and on the device.

FlashInfer's own planning and CUDA's calls are not included. The last line is one JSON object.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ...core.executors.cuda import CudaExecutor
from ...core.model.lora.lora_state_cuda import CudaLoraState, StepLimits
from ...core.model.read_config import read_model_config
from ...ops.attention.attention_plan import PlanBuffers
from ...ops.table_records import Copy
from ..report.command import conclude, parser
from ..report.table import rows_table
from .idle_engine import GEOMETRY, StubDevice, add, decoding, idle_engine
from .launches import decode_launches, prompt_launches
from .machine import processor
from .models.sizes import SIZES

#: (rows, largest rank) of the counted engines: defaults of GPUs with 14 GiB and with 40 GiB, and the most rows.
CASES = (128, 256), (256, 64), (256, 256), (4096, 256)


def table_bytes(rows: int, rank: int, size: str = "llama-3.1-8b") -> dict[str, int]:
    """Page-locked host memory, and device memory, of an engine of `rows` sequences and adapters of up to `rank`.

    Partial sums of the kernels are left out.
    """
    locked = []

    def make_copy(num_bytes: int) -> Copy:
        locked.append(2 * num_bytes)  # two blocks, used in turn
        return torch.Tensor.copy_

    with tempfile.TemporaryDirectory() as work:
        config = read_model_config(SIZES[size].write_config(Path(work), "bfloat16"))
    layout = SIZES[size].geometry.page_layout(itemsize=2)
    arena = torch.zeros(1, layout.page_elems, dtype=torch.bfloat16, device="meta")
    limits = StepLimits(rank, adapters=rows, rows=rows, tokens=max(8192, rows), padded=512)
    state = CudaLoraState(config, arena, layout, limits, max_stall=0.0, make_copy=make_copy)
    return {"rows": rows, "rank": rank, "page-locked": sum(locked), "device": state.table_bytes}


def host_times(
    rows: int, tokens: int, lora: bool, steps: int, work_dir: Path, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Microseconds of each part of a step of `rows` decoding sequences of `tokens` tokens and more; lora: an adapter
    each.
    """
    with idle_engine(rows, tokens + 2 * steps + 8, lora, work_dir, StubDevice(), async_scheduling=False) as engine:
        decoding(engine, sorted(engine.store.names()) if lora else [None] * rows, tokens, 2 * steps + 4)
        engine.step()
        parts = {"step": (engine, "step"), "execute": (engine.executor, "execute"), "pages": (PlanBuffers, "write")}
        with timed(parts, clock) as took:
            for _ in range(steps):
                engine.step()
        if any(len(times) != steps for times in took.values()):
            raise RuntimeError(f"not every step was one of {rows} decode rows: {[len(it) for it in took.values()]}")
    return {part: min(times) * 1e6 for part, times in took.items()}


def prefill_time(
    tokens: int,
    behind: int,
    lora: bool,
    steps: int,
    work_dir: Path,
    clock: Callable[[], float] = time.perf_counter,
    *,
    pieces: bool = False,
) -> float:
    """Microseconds that a layer of a prefill takes on the host, of the fastest step.

    behind: decoding sequences of other requests. lora: each sequence has an adapter. pieces: use piecewise graphs.
    """
    from ..kernels.idle_triton import idle_kernels  # needs triton

    max_len = tokens + 3 * steps + 8
    with (
        idle_kernels(),
        idle_engine(
            behind + 1,
            max_len,
            lora,
            work_dir,
            StubDevice(),
            async_scheduling=False,
            forward=True,
            mixed_graph_tokens=tokens + behind if pieces else 0,
        ) as engine,
    ):
        assert isinstance(engine.executor, CudaExecutor)
        computing = engine.executor.steps
        forward = (computing.mixed, "run") if pieces else (computing.decoder, "forward")
        first, *others = sorted(engine.store.names()) if lora else [None] * (behind + 1)
        decoding(engine, others, 1, 3 * steps)
        skipped = int(pieces)  # the first step captures
        with timed({"forward": forward}, clock) as took:
            for index in range(steps + skipped):
                add(engine, f"p{index}", first, tokens, 1)
                engine.step()
    if len(took["forward"]) != steps + skipped:
        raise RuntimeError(f"{len(took['forward'])} forward passes in {steps + skipped} steps")
    return min(took["forward"][skipped:]) / GEOMETRY.layers * 1e6


@contextmanager
def timed(parts: Mapping[str, tuple[Any, str]], clock: Callable[[], float]) -> Iterator[dict[str, list[float]]]:
    """Seconds of each call of methods, by part. parts: the owner and the name of each method."""
    took: dict[str, list[float]] = {part: [] for part in parts}
    with ExitStack() as stack:
        for part, (owner, name) in parts.items():
            inner = getattr(owner, name)

            def call(*args: Any, inner: Callable = inner, times: list[float] = took[part], **kwargs: Any) -> Any:
                began = clock()
                result = inner(*args, **kwargs)
                times.append(clock() - began)
                return result

            stack.enter_context(patch.object(owner, name, call))
        yield took


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    command.add_argument("--tokens", type=int, nargs="+", default=[512], help="that each row has")
    command.add_argument("--steps", type=int, default=100, help="of which the fastest counts")
    command.add_argument("--prompt", type=int, default=64, help="tokens that a step prefills")
    command.add_argument("--decoding", type=int, default=8, help="decode rows of a mixed step")
    command.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "chorus-host-time")
    args = command.parse_args(argv)
    found = []
    for tokens, rows, lora in itertools.product(args.tokens, args.rows, (False, True)):
        case = rows, tokens, lora, args.steps, args.work_dir
        found.append({"rows": rows, "tokens": tokens, "lora": lora, **host_times(*case)})
    cases = ("base", 0, False), ("adapter", 0, True), ("mixed", args.decoding, True)
    layer, in_pieces = (
        {
            name: prefill_time(args.prompt, behind, lora, args.steps, args.work_dir, pieces=pieces)
            for name, behind, lora in (cases if find_spec("triton") else ())
        }
        for pieces in (False, True)
    )
    rows_table("host time of a decode step, µs", " | ".join(found[0]), found).show()
    launches: list[dict[str, Any]] = []
    if layer:
        launches = [*decode_launches(args.work_dir), *prompt_launches(args.work_dir)]
        layers = [{"launches": "each", **layer}, {"launches": "in pieces", **in_pieces}]
        for title, rows in (
            (f"host time of a layer of a prefill of {args.prompt} tokens, µs", layers),
            ("launches of a layer", launches),
        ):
            rows_table(title, " | ".join(rows[0]), rows).show()
    tables = [table_bytes(*case) for case in CASES]
    rows_table("bytes of adapter tables", " | ".join(tables[0]), tables).show()
    result = {"tables": tables, "cases": found, "layer": layer, "layer in pieces": in_pieces, "launches": launches}
    return conclude({"device": processor(), "steps": args.steps, **result}, ok=True)


if __name__ == "__main__":
    raise SystemExit(main())
