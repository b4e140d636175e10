"""Counts a decoder layer's launches without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ...core.engine import Engine
from ...core.model import decoder
from ...core.model.batch import GemmBackend
from .idle_engine import GEOMETRY, StubDevice, Wrapper, add, decoding, idle_engine

#: GEMM backends of layers in a decode step. The logits come from the fake library, which returns numbers.
_WAYS = {"library": GemmBackend.LIBRARY, "small": GemmBackend.SMALL, "fused": GemmBackend.EXPANDED}

#: Sequences that decode together with a prompt, or in a decode step; tokens of the prompt.
_ROWS, _PROMPT = 8, 64

_KINDS = "product", "attention", "LoRA", "other", "graph"


def decode_launches(work_dir: Path) -> list[dict[str, Any]]:
    """A row for each kind of decode step: its description, and one layer's launches by kind and in total. Needs
    triton.

    The last are of steps with one sequence's adapter in the weights and another adapter in each other sequence.
    """
    rows = []
    with _engine(work_dir) as (engine, _, layers):
        steps = engine.executor.steps.decoding
        steps.captures = False  # captured steps have the same launches, but only when they are captured
        for step, adapters in (("decode", False), ("decode", True), ("merged", True)):
            ids = _decode(engine, adapters)
            if step == "merged":
                engine.merge(min(engine.store.names()))
                while engine.merging.is_under_way:
                    engine.step()
            kinds = [kind for kind in engine.executor.steps.decoder.gemms() if not kind.is_head]
            for by, backend in _WAYS.items():
                steps.backends = dict.fromkeys(steps.backends, dict.fromkeys(kinds, backend))
                engine.step()
                rows.append(_row(step, adapters, by, layers[-1]))
            _abort(engine, ids)
    return rows


def prompt_launches(work_dir: Path) -> list[dict[str, Any]]:
    """The same for steps of a prompt, and of a prompt with decoding sequences."""
    rows = []
    for by, padded in (("library", 0), ("pieces", _PROMPT + _ROWS)):
        with _engine(work_dir, mixed_graph_tokens=padded) as (engine, launched, layers):
            for step, adapters in (("prompt", False), ("prompt", True), ("mixed", True)):
                ids = _decode(engine, adapters) if step == "mixed" else []
                for index in range(2):  # the first captures
                    launched.clear()
                    add(engine, f"p{index}", engine.store.names()[-1] if adapters else None, _PROMPT, 1)
                    engine.step()
                _abort(engine, ids)
                pieces = [name for name in launched if name in ("graph", "attention")]
                layer = pieces[1 : 1 + len(pieces) // GEOMETRY.layers] if padded else layers[-1]  # without embedding
                rows.append(_row(step, adapters, by, layer))
    return rows


def _row(step: str, adapters: bool, by: str, launches: Sequence[str]) -> dict[str, Any]:
    counts = Counter(map(_kind, launches))
    return {
        "step": step,
        "adapters": "each row" if adapters else "none",
        "by": by,
        **{kind: counts[kind] for kind in _KINDS},
        "all": len(launches),
    }


def _kind(name: str) -> str:
    if name.startswith(("shrink", "expand")):
        return "LoRA"
    return {"multiply_rows": "product"}.get(name, name if name in _KINDS else "other")


def _decode(engine: Engine, adapters: bool) -> list[str]:
    """Decoding requests for the base model, or for an adapter each."""
    return decoding(engine, sorted(engine.store.names())[:_ROWS] if adapters else [None] * _ROWS, 1, 64)


def _abort(engine: Engine, ids: Sequence[str]) -> None:
    for name in ids:
        engine.abort(name)


@contextmanager
def _engine(work_dir: Path, mixed_graph_tokens: int = 0) -> Iterator[tuple[Any, list[str], list[list[str]]]]:
    """An engine, its launches, and the launches by layer."""
    from ..kernels.idle_triton import idle_kernels  # needs triton

    launched: list[str] = []

    def run(self: Wrapper, q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        launched.append("attention")
        return q

    with (
        idle_kernels(launched.append),
        patch.object(Wrapper, "run", run),
        idle_engine(
            _ROWS + 1,
            256,
            True,
            work_dir,
            StubDevice(launched.append),
            async_scheduling=False,
            forward=True,
            mixed_graph_tokens=mixed_graph_tokens,
        ) as engine,
        _recorded(launched) as layers,
    ):
        yield engine, launched, layers


@contextmanager
def _recorded(launched: list[str]) -> Iterator[list[list[str]]]:
    """The launches of each layer of the forward passes in the `with` block."""
    layers: list[list[str]] = []

    @contextmanager
    def span(name: str) -> Iterator[None]:
        begin = len(launched)
        yield
        if name.startswith("layer."):
            layers.append(launched[begin:])

    with patch.object(decoder, "span", span):
        yield layers
