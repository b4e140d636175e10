"""Engines of family models on one kind of executor, closed at the end of a test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.perf.inline_reads import InlineReads

from ..conftest import Driver, RecordingExecutor, ticking

EVERY = os.environ.get("CHORUS_FAMILIES") == "every"
"""Every geometry in every way, as `make families` asks, rather than a choice of them."""


def drivers(open_executor: Callable[[EngineConfig], Any], **defaults: Any) -> Iterator[Callable[..., Driver]]:
    """A fixture's function `make(it, names, **config)`: an engine with these adapters of `it`. defaults: of config."""
    engines: list[Engine] = []

    def make(it: Any, names: Any = (), **config: Any) -> Driver:
        settings = EngineConfig(model=it.model, **{**defaults, **config})
        executor = RecordingExecutor(open_executor(settings))
        engine = Engine(settings, executor, ticking(), InlineReads())
        engines.append(engine)
        for name in names:
            engine.store.register(name, it.adapters[name])
        return Driver(engine, executor)

    yield make
    for engine in engines:
        engine.close()
