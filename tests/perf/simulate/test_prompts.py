"""Token ids of simulated prompts, and what a prefix cache makes of them."""

from __future__ import annotations

import json

import pytest

from chorus.perf.simulate.prompts import make_prompt
from chorus.perf.simulate.serving import run_serving
from chorus.perf.simulate.study import Setup
from chorus.perf.workload.request import TraceRequest

VOCAB = 32000


def prompt(number, tokens, ids=(), block=32):
    return make_prompt(TraceRequest(number, 0.0, None, tokens, 1, hash_ids=tuple(ids), hash_block_tokens=block), VOCAB)


def test_prompts_share_what_their_hash_ids_say():
    one, other = prompt(0, 100, (5, 6, 7, 8)), prompt(1, 70, (5, 6, 9))
    assert (len(one), len(other)) == (100, 70)
    assert one[:64] == other[:64]
    assert one[64] != other[64]
    assert prompt(2, 100, (6, 5, 7, 8))[:3] != one[:3]
    assert prompt(3, 200, (5, 6))[:64] == one[:64]
    assert len(prompt(3, 200, (5, 6))) == 200
    assert all(0 <= token < VOCAB for token in one)


def test_other_prompts_share_nothing():
    found = [tuple(prompt(number, 16)) for number in range(500)]
    assert len(set(found)) == len({each[:4] for each in found}) == 500
    assert prompt(7, 40) == prompt(7, 40)
    assert prompt(7, 40)[:16] == prompt(7, 16)


def setup(path, prefix_cache):
    trace = {"format": "mooncake", "path": str(path)}
    return Setup(
        profile="a100-llama2-7b",
        engine={"prefix_cache": prefix_cache, "max_num_seqs": 4},
        workload={
            "arrivals": {"process": "replay", "trace": trace},
            "popularity": {"kind": "identical"},
            "lengths": {"kind": "trace", "mode": "replay", "trace": trace},
            "adapters": {"base_share": 1.0},
        },
    )


@pytest.mark.parametrize("shared", [True, False])
def test_a_study_reuses_the_prefixes_that_a_trace_has(tmp_path, shared):
    """Before, all prompts were token 0 throughout, and the prefix cache found any of them in any other."""
    path = tmp_path / "mooncake.jsonl"
    rows = []
    for number in range(20):
        first = 0 if shared else 10 * number
        ids = [first, first + 1, 1000 + number]
        rows.append({"timestamp": 2000 * number, "input_length": 1200, "output_length": 5, "hash_ids": ids})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with_cache, without = (run_serving(setup(path, cache))["ttft_mean"] for cache in (True, False))
    assert with_cache < 0.5 * without if shared else with_cache == pytest.approx(without, rel=1e-3)
