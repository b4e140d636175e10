"""Adapters beyond `--max-adapters-per-step` take turns, whatever answers are under way."""

from __future__ import annotations

import threading
import time

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine

OVERTAKE = 0.5
STEP_SECONDS = 0.02
LONG = 240
"""Tokens of an answer that takes 8 s at least."""


@pytest.fixture
def live(start, subject):
    reference = subject("wide_heads")
    config = EngineConfig(
        model=reference.model,
        adapters=None,
        memory_bytes=32 << 20,
        threads=1,
        cpu_kernels="torch",
        max_adapters_per_step=1,
        max_overtake_seconds=OVERTAKE,
        max_num_seqs=4,
    )
    engine = Engine.from_config(config)
    for name, adapter in (("a", "r2-qv"), ("b", "r3-mlp")):
        engine.store.register(name, reference.adapters[adapter])
    execute = engine.executor.execute

    def slowly(plan):
        time.sleep(STEP_SECONDS)
        return execute(plan)

    engine.executor.execute = slowly
    return start(engine)


def first_token(live, model):
    """Return the seconds until a request's first token; the rest of its answer is not waited for."""
    begin = time.monotonic()
    body = {"model": model, "prompt": [5, 6], "max_tokens": LONG, "ignore_eos": True, "stream": True}
    with live.client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        next(line for line in answer.iter_lines() if line.startswith("data:"))
        return time.monotonic() - begin


@pytest.mark.wide
def test_neither_of_two_adapters_waits_for_the_others_answers(live):
    over = threading.Event()
    body = {"model": "a", "prompt": [5, 6], "max_tokens": LONG, "ignore_eos": True, "stream": True}

    def endless():
        while not over.is_set():
            with live.client.stream("POST", "/v1/completions", json=body) as answer:
                for _ in answer.iter_lines():
                    if over.is_set():
                        return

    threads = [threading.Thread(target=endless) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        live.wait_until(lambda: live.engine.stats().num_running == 3, 30)
        assert first_token(live, "b") < OVERTAKE + 3
        assert first_token(live, "a") < OVERTAKE + 3
        assert first_token(live, "b") < OVERTAKE + 3
    finally:
        over.set()
        for thread in threads:
            thread.join(30)
