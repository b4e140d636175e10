"""Punica's text generation on one A100 (§7.2), simulated: its step and its throughput."""

from __future__ import annotations

import numpy as np
import pytest

from chorus.core.config import EngineConfig
from chorus.core.costs.profile import load_profile
from chorus.perf.simulate.adapters import SimAdapters
from chorus.perf.simulate.cluster import simulate
from chorus.perf.simulate.engine import MODEL
from chorus.perf.simulate.replica import Replica
from chorus.perf.workload.request import TraceRequest

REQUESTS, BATCH, LONGEST, RANK = 1024, 32, 2048, 16


def lengths(seed):
    """Prompts and answers as the authors' benchmark draws them (punica-ai/punica, benchmarks/bench_textgen.py).

    Prompts: a lognormal of sigma 0.8 around 18 tokens, less one; prompt and answer together: evenly up to 2048.
    """
    source = np.random.default_rng(seed)
    prompts = np.clip(18.0 * np.exp(0.8 * source.standard_normal(REQUESTS)) - 1.0, 1, LONGEST - 2).astype(int)
    both = np.maximum(prompts + 2, source.integers(0, LONGEST, REQUESTS))
    return prompts, both - prompts


@pytest.mark.wide
def test_throughput_and_step():
    """1044 tokens/s, to which the profile's overhead is fitted, and "each decode step takes around 30 ms" (§5.2)."""
    profile = load_profile("a100-llama2-7b")
    config = EngineConfig(
        model=MODEL, prefix_cache=False, max_waiting=None, max_num_seqs=BATCH, max_num_batched_tokens=4096
    )
    adapters = SimAdapters(profile.geometry, config.block_tokens)
    prompts, answers = lengths(0)
    requests = []
    for index, (prompt, answer) in enumerate(zip(prompts.tolist(), answers.tolist(), strict=True)):
        adapters.add(f"a{index}", RANK, profile.geometry.adapter_bytes(RANK))
        requests.append(TraceRequest(index, 0.0, f"a{index}", prompt, answer))
    replica = Replica(profile, adapters, config, most_prompts=1)
    assert len(simulate(requests, [replica])) == REQUESTS
    seconds = replica.clock.now
    assert (prompts.sum() + answers.sum()) / seconds == pytest.approx(1044, rel=0.03)
    assert seconds / replica.engine.stats().num_steps == pytest.approx(30e-3, abs=1e-3)
