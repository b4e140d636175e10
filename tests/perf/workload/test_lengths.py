"""Lengths: published means, laws, and traces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.perf.workload import WorkloadError, WorkloadSpec
from chorus.perf.workload.lengths import LognormalTokens

from .traces_on_disk import adapters, azure_llm


def spec(lengths: dict, requests: int = 40_000, **fields: object) -> WorkloadSpec:
    fields = {"arrivals": {"process": "poisson", "rate": 10}, "popularity": {"kind": "identical"}, **fields}
    return WorkloadSpec.parse({"lengths": lengths, "requests": requests, **fields})


def columns(lengths: dict, **fields: Any) -> tuple[np.ndarray, np.ndarray]:
    found = [(request.prompt_tokens, request.output_tokens) for request in spec(lengths, **fields)]
    prompt, output = zip(*found, strict=True)
    return np.array(prompt), np.array(output)


@pytest.mark.parametrize(
    ("kind", "prompt", "output"),
    [("sharegpt", 161.31, 337.99), ("alpaca", 19.31, 58.45)],
)
def test_published_means(kind, prompt, output):
    prompts, outputs = columns({"kind": kind})
    assert prompts.mean() == pytest.approx(prompt, rel=0.08)
    assert outputs.mean() == pytest.approx(output, rel=0.08)
    assert min(prompts.min(), outputs.min()) >= 1


@given(mean=st.floats(5, 500), sigma=st.floats(0.1, 2), room=st.floats(4, 100))
def test_lognormal_keeps_its_mean_after_the_cut(mean, sigma, room):
    law = LognormalTokens(law="lognormal", mean=mean, sigma=sigma, most=int(mean * room))
    assert law.mean_at(law.mu) == pytest.approx(mean, rel=1e-6)
    drawn = law.draw(np.random.Generator(np.random.PCG64(0)), 2000)
    assert drawn.min() >= 1 and drawn.max() <= law.most


def test_laws():
    prompts, outputs = columns(
        {
            "kind": "laws",
            "prompt": {"law": "uniform", "low": 5, "high": 8},
            "output": {"law": "lognormal", "mean": 20, "sigma": 0.5, "most": 200},
        }
    )
    assert np.bincount(prompts)[5:].tolist() == pytest.approx([10_000] * 4, rel=0.1)
    assert outputs.mean() == pytest.approx(20, rel=0.05)
    prompts, outputs = columns(
        {"kind": "laws", "prompt": {"law": "constant", "tokens": 7}, "output": {"law": "constant", "tokens": 1}}
    )
    assert set(prompts) == {7} and set(outputs) == {1}


def test_replay_takes_the_rows_in_order(tmp_path):
    lengths = {"kind": "trace", "trace": azure_llm(tmp_path)}
    prompts, outputs = columns(lengths)
    assert (prompts.tolist(), outputs.tolist()) == ([100, 2000, 40], [7, 31, 1])


def test_a_trace_without_tokens_is_refused(tmp_path):
    with pytest.raises(WorkloadError, match=r"lengths: the trace \(.*has no prompt_tokens, only adapter"):
        columns({"kind": "trace", "trace": adapters(tmp_path)})


@pytest.mark.parametrize(
    ("law", "message"),
    [
        ({"law": "uniform", "low": 5, "high": 4}, "high must not be below low"),
        ({"law": "lognormal", "mean": 100, "sigma": 1, "most": 100}, "most must be well above the mean"),
        ({"law": "constant", "tokens": 0}, r"lengths\.prompt\.tokens is 0"),
    ],
)
def test_wrong_laws(law, message):
    with pytest.raises(WorkloadError, match=message):
        spec({"kind": "laws", "prompt": law, "output": {"law": "constant", "tokens": 1}})
