"""An engine of a checkpoint, and requests that it answers one after another."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from ...core.config import EngineConfig
from ...core.engine import Engine
from ...core.requests.request import Request
from ...core.requests.request_params import RequestParams
from ..inline_reads import InlineReads

_NUMBERS = count()


@contextmanager
def opened(model: Path, *, inline_reads: bool = True, **fields: Any) -> Iterator[Engine]:
    """An engine on the CPU, without speculation. fields: of `EngineConfig`."""
    config = EngineConfig.model_validate({"model": model, "device": "cpu", "speculation": "off", **fields})
    engine = Engine.from_config(config, InlineReads() if inline_reads else None)
    try:
        yield engine
    finally:
        engine.close()


def asked(prompt: Sequence[int], adapter: str | None = None, max_tokens: int = 1, **params: Any) -> Request:
    """A greedy request that goes on past any end-of-sequence token."""
    wanted = RequestParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **params})
    return Request(f"q{next(_NUMBERS)}", [*prompt], wanted, adapter)


def first_token_seconds(engine: Engine, request: Request) -> float:
    """Seconds until the first token of a request that arrives now; then it is finished."""
    began = time.perf_counter()
    engine.add_request(request)
    while not request.num_output_tokens:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
    seconds = time.perf_counter() - began
    while engine.has_work():
        engine.step()
    return seconds
