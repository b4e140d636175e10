"""Decode steps of torch's CPU path with parts compiled by Inductor: `python -m chorus.perf.cpu.compiled`.

The decoder's forward pass over random weights, `--rows` decode rows of `--context` tokens each, by

* `eager`: torch's operators, as they serve where no native decoder was built;
* `elementwise`: norms, rotary embedding with the append to the cache, and SiLU compiled, one function each;
* `products`: the same, and a norm with the product behind it, and SiLU behind that, in one compiled function. Weights
  lie row by row then: Inductor takes oneDNN's packed ones as constants alone, one compilation for each layer.

Every function is compiled for each number of rows on its own (`dynamic=False`), so that a row's sums do not depend on
how many rows there are beyond what its bucket says. All run in turns; the ratio is of medians to `eager`'s. `compile s`
is what compiling takes at the start for that one number of rows, with an empty cache. `differs` is the largest
difference from eager's logits, as a share of the largest. The last line is one JSON object.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from ...core.model import decoder as module
from ...core.model.batch import StepBatch
from ...core.model.config import ModelConfig
from ...core.model.decoder import DecoderModel, Layer, Residual
from ...core.model.dummy_weights import DummyWeights
from ...memory.pages.arena import Arena
from ...ops import elementwise
from ..report.command import conclude, parser, say
from ..report.table import Table
from .workload import Geometry

#: Shapes of SmolLM-135M, and a quarter of the layers of Llama-3.2-1B.
GEOMETRIES = {
    "135m": Geometry(hidden=576, ffn=1536, layers=30, heads=9, kv_heads=3, vocab=49152, positions=2048),
    "1b": Geometry(hidden=2048, ffn=8192, layers=4, heads=32, kv_heads=8, vocab=32000, positions=2048),
}

_ELEMENTWISE = ("rms_norm", "add_rms_norm", "rotate_and_write", "silu_and_mul")
_WAYS = ("eager", "elementwise", "products")


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False)


@contextmanager
def _elementwise() -> Iterator[None]:
    with ExitStack() as stack:
        for name in _ELEMENTWISE:
            stack.enter_context(patch.object(module, name, _compiled(getattr(elementwise, name))))
        yield


def _normed_product(
    rows: torch.Tensor, added: torch.Tensor | None, norm: torch.Tensor, eps: float, weight: torch.Tensor, gate: bool
) -> torch.Tensor:
    if added is not None:
        rows.add_(added)
    y = torch.nn.functional.linear(elementwise.rms_norm(rows, norm, eps), weight)
    return elementwise.silu_and_mul(y) if gate else y


@contextmanager
def _products() -> Iterator[None]:
    """Of base steps: what LoRA multiplies with is not kept."""
    product = _compiled(_normed_product)

    def compiled(
        self: Layer, group: int, x: Residual, norm: torch.Tensor, weight: torch.Tensor, bias: Any, *, gate: bool = False
    ) -> tuple[None, torch.Tensor]:
        added, x.added = x.added, None
        return None, product(x.rows, added, norm, x.eps, weight, gate)

    with _elementwise(), patch.object(Layer, "_normed_product", compiled):
        yield


_CONTEXTS = {"elementwise": _elementwise, "products": _products}


def _model(geometry: Geometry, dtype: torch.dtype, pages: int, packs: bool) -> tuple[DecoderModel, Arena]:
    with tempfile.TemporaryDirectory() as directory:
        raw = geometry.config(str(dtype).removeprefix("torch."), rope_theta=10000.0, eos_token_id=2)
        Path(directory, "config.json").write_text(json.dumps(raw), encoding="utf-8")
        config = ModelConfig.read(Path(directory))
    arena = Arena(geometry.page_layout(dtype.itemsize), pages, dtype, "cpu")
    weights = DummyWeights(config, dtype)
    with patch.object(module, "pack", module.pack if packs else lambda weight: weight):
        return DecoderModel(config, weights, arena, geometry.positions, dtype), arena


def _batch(decoder: DecoderModel, rows: int, context: int, blocks: int) -> StepBatch:
    attention = decoder.new_attention()
    table = torch.arange(1, 1 + rows * blocks).view(rows, blocks)
    attention.plan(range(rows + 1), table, [context] * rows)
    at = torch.full((rows,), context - 1)
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(3, decoder.config.vocab_size, (rows,), generator=generator)
    return StepBatch(ids, at, table[:, (context - 1) // 16].contiguous(), at % 16, attention, None)


def measure(
    geometry: Geometry, dtype: torch.dtype, rows: int, context: int, seconds: float, ways: Sequence[str]
) -> dict[str, Any]:
    """Median seconds of a step, seconds to compile, and difference of the logits, of each of `ways`."""
    blocks = -(-context // 16)
    packed, arena = _model(geometry, dtype, 1 + rows * blocks, packs=True)
    plain = _model(geometry, dtype, 1, packs=False)[0] if "products" in ways else packed
    plain.use_arena(arena)
    arena.pages.zero_()
    batch = _batch(packed, rows, context, blocks)
    found: dict[str, Any] = {}
    with torch.inference_mode(), ExitStack() as stack:
        want = packed.forward(batch)
        taken: dict[str, list[float]] = {way: [] for way in ways}
        entered: dict[str, Callable[[], Any]] = {}
        for way in ways:
            decoder = plain if way == "products" else packed
            began = time.perf_counter()
            got = _run(way, decoder, batch, entered, stack)
            found[way] = {
                "first_s": time.perf_counter() - began,
                "differs": float((got - want).abs().max() / want.abs().max()),
            }
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or len(taken["eager"]) < 5:
            for way in ways:
                began = time.perf_counter()
                entered[way]()
                taken[way].append(time.perf_counter() - began)
    for way in ways:
        found[way] |= {"ms": median(taken[way]) * 1e3}
        found[way]["compile_s"] = found[way]["first_s"] - found[way]["ms"] / 1e3
        found[way]["over_eager"] = found[way]["ms"] / found["eager"]["ms"]
    return found


def _run(
    way: str, decoder: DecoderModel, batch: StepBatch, entered: dict[str, Callable[[], Any]], stack: ExitStack
) -> torch.Tensor:
    """Compute a step, and keep a call that computes it again with what was compiled."""
    kept: dict[tuple[Any, str], Any] = {}
    if way != "eager":
        with _CONTEXTS[way]():
            for owner, name in [*((module, name) for name in _ELEMENTWISE), (Layer, "_normed_product")]:
                kept[owner, name] = getattr(owner, name)
            result = decoder.forward(batch)
    else:
        result = decoder.forward(batch)

    def again() -> None:
        with ExitStack() as inside:
            for (owner, name), value in kept.items():
                inside.enter_context(patch.object(owner, name, value))
            decoder.forward(batch)

    entered[way] = again
    return result


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--models", nargs="+", choices=tuple(GEOMETRIES), default=list(GEOMETRIES))
    command.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    command.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    command.add_argument("--context", type=int, default=64, help="tokens of each row")
    command.add_argument("--seconds", type=float, default=4.0, help="to measure each case for")
    command.add_argument("--threads", type=int, default=1)
    args = command.parse_args(argv)
    torch.set_num_threads(args.threads)
    table = Table(
        f"decode steps of torch's CPU path, {args.threads} threads, load {os.getloadavg()[0]:.1f}",
        ["model", "dtype", "rows", "by", "ms", "/ eager", "compile s", "differs"],
    )
    cases = []
    for name in args.models:
        for dtype in args.dtypes:
            for rows in args.rows:
                with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache):
                    torch.compiler.reset()
                    found = measure(GEOMETRIES[name], getattr(torch, dtype), rows, args.context, args.seconds, _WAYS)
                cases.append({"model": name, "dtype": dtype, "rows": rows, "ways": found})
                say(f"{name} {dtype} {rows} rows: {found}")
                for way, each in found.items():
                    table.add(
                        name, dtype, rows, way, each["ms"], each["over_eager"],
                        each["compile_s"] if way != "eager" else None, each["differs"],
                    )  # fmt: skip
    table.show()
    return conclude({"context": args.context, "threads": args.threads, "cases": cases}, ok=True)


if __name__ == "__main__":
    raise SystemExit(main())
