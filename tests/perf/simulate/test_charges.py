"""Costs that plans imply in addition to their rows: each is charged when its operation is done, and only then."""

from __future__ import annotations

from typing import Any

import pytest

from chorus.core.config import EngineConfig
from chorus.core.costs.profile import Number, Terms, load_profile
from chorus.core.merging.mode_policy import ModeChoice, ModePolicy
from chorus.core.policies import Policies
from chorus.perf.simulate.adapters import SimAdapters
from chorus.perf.simulate.cluster import simulate
from chorus.perf.simulate.engine import MODEL
from chorus.perf.simulate.replica import Replica
from chorus.perf.simulate.serving import run_serving
from chorus.perf.simulate.setup import Setup, StudyError
from chorus.perf.workload.request import TraceRequest

pytestmark = pytest.mark.wide

PROFILE = load_profile("a100-llama2-7b")
RANKS = {"a": 8, "b": 64}
POLICIES = ("fastest", "dlora-1", "dlora-2", "dlora-3", "dlora-artifact")
WORKLOAD = {
    "requests": 5,
    "arrivals": {"process": "constant", "rate": 1.0},
    "popularity": {"kind": "identical"},
    "lengths": {"kind": "alpaca"},
    "adapters": {"ranks": {"kind": "fixed", "rank": 8}},
}


def terms(**values):
    return Terms(terms={name: Number(value=value, source="made up") for name, value in values.items()})


def replica(*, change=None, pages=2000, slots=8, preemption: Any = "auto", host_cache_bytes=1 << 40, **options: Any):
    profile = PROFILE.model_copy(update=change or {})
    config = EngineConfig(
        model=MODEL,
        prefix_cache=False,
        num_pages=pages,
        max_num_seqs=slots,
        preemption=preemption,
        host_cache_bytes=host_cache_bytes,
    )
    adapters = SimAdapters(profile.geometry, config.block_tokens)
    for name, rank in RANKS.items():
        adapters.add(name, rank, profile.geometry.adapter_bytes(rank))
    return Replica(profile, adapters, config, **options)


def asked(number, arrival=0.0, output=10, adapter=None, prompt=20):
    return TraceRequest(number, arrival, adapter, prompt, output, RANKS.get(adapter or "", 0))


def e2e(found, *requests):
    records = simulate(requests, [found])
    return dict(zip(records.column("arrival").tolist(), records.column("e2e").tolist(), strict=True)), records


class Always(ModePolicy):
    """Merges an adapter as soon as it can be."""

    prices = None

    def __init__(self, name):
        self._name = name

    def choose(self, state):
        return ModeChoice(next((each for each in state.eligible if each.name == self._name), state.merged))


def always(name) -> Any:
    return {"policies": Policies(mode=Always(name))}


def test_a_merge_is_charged_once_and_its_rows_then_cost_no_lora():
    change = {"merge": terms(base=0.05, per_rank=0.001)}
    plain, _ = e2e(replica(change=change), asked(0, 0.0, 200, "b"), asked(1, 60.0, 200, "b"))
    found = replica(change=change, **always("b"))
    merged, _ = e2e(found, asked(0, 0.0, 200, "b"), asked(1, 60.0, 200, "b"))
    assert found.engine.merging.num_merges == 1
    assert found.engine.merging.merge_seconds == pytest.approx(0.05 + 0.064)
    base, _ = e2e(replica(), asked(0, 60.0, 200))
    assert merged[60.0] == pytest.approx(base[60.0], rel=2e-3)
    assert merged[60.0] < plain[60.0]
    assert -(plain[60.0] - merged[60.0]) < merged[0.0] - plain[0.0] < 0.114, "steps went on unmerged meanwhile"
    assert found.executor.busy_seconds == pytest.approx(merged[0.0] + merged[60.0], rel=0.05)
    found.engine.check_integrity()


def test_a_shadow_takes_its_pages_from_the_arena():
    """It has those of the matrices that the adapters change, and is not made where there is no room for it."""
    change = {"merge": terms(base=0.01)}
    found = replica(change=change, **always("a"))
    e2e(found, asked(0, 0.0, 100, "a"))
    stats, geometry = found.engine.stats(), PROFILE.geometry
    elems = geometry.projections.num_weights
    page = found.executor.layout.page_bytes // geometry.itemsize
    assert elems / page <= stats.num_shadow_pages < elems / page + 4 * geometry.num_layers
    assert stats.num_free_pages <= stats.num_pages - stats.num_shadow_pages
    small = replica(change=change, pages=1000, **always("a"))
    e2e(small, asked(0, 0.0, 100, "a"))
    assert small.engine.stats().num_shadow_pages == small.engine.merging.num_merges == 0


def test_others_run_beside_a_merged_adapter():
    """They add their own part and take away the merged one's."""
    change = {"merge": terms(base=1e-9)}
    requests = [asked(0, 0.0, 300, "a"), asked(1, 0.0, 300, "b")]
    plain = simulate(requests, [replica(change=change)]).column("e2e").max()
    found = replica(change=change, **always("a"))
    mixed = simulate(requests, [found]).column("e2e").max()
    assert found.engine.stats().merged_adapter == "a"
    assert mixed == pytest.approx(plain, rel=2e-3)  # a's own row costs no LoRA, b's pays for taking away a's part


def test_nothing_is_merged_where_a_merge_has_no_price():
    found = replica(**always("a"))
    e2e(found, asked(0, 0.0, 50, "a"))
    assert found.engine.modes is None
    fields = {"profile": "a100-llama2-7b", "engine": {"mode_policy": "fastest"}, "workload": WORKLOAD}
    with pytest.raises(StudyError, match=r"a100-llama2-7b has no merge cost; set terms merge\.base"):
        run_serving(Setup.model_validate(fields))


@pytest.mark.parametrize("mode", [{"mode": "merged-only"}, *({"engine": {"mode_policy": name}} for name in POLICIES)])
def test_policies_of_modes_serve_all_that_comes(mode):
    workload = {**WORKLOAD, "requests": 30, "adapters": {"count": 3, "ranks": {"kind": "fixed", "rank": 8}}}
    workload["popularity"] = {"kind": "power_law", "exponent": 2.0}
    fields = {"profile": "a100-llama2-7b", "terms": {"merge.base": 0.02, "step.lora": 0.004}, "workload": workload}
    found = run_serving(Setup.model_validate({**fields, **mode}))
    assert (found["requests"], found["failed"]) == (30, 0)
    assert found["merged_share"] > 0


def test_the_cpu_assists_where_that_is_faster_than_to_wait():
    slow = {"link": terms(per_byte=2e-10)}  # about 64 ms for rank 64
    waits, _ = e2e(replica(change=slow), asked(0, 0.0, 1, "b"))
    found = replica(change={**slow, "cpu_lora": terms(base=0.01, per_token_rank=5e-6)})
    assisted, records = e2e(found, asked(0, 0.0, 1, "b"))
    assert found.executor.cold_starts.num_offloaded == 1
    computing = found.executor.costs.prefill_seconds(20, 64)
    back = 20 * found.executor.costs.link.seconds(1) * 32 * 2 * (4 * 4096 + 2 * 11008 + 4096)
    assert records.column("cold")[0] == pytest.approx(0.01 + 20 * 64 * 5e-6 + back - computing, rel=0.01)
    assert waits[0.0] > assisted[0.0] + 0.03
    found = replica(change={**slow, "cpu_lora": terms(base=100.0)})
    assert e2e(found, asked(0, 0.0, 1, "b"))[0][0.0] == waits[0.0]
    assert found.executor.cold_starts.num_offloaded == 0


def preempting(preemption, per_byte, host_pages=1000):
    """Two requests that outgrow the arena together: when the last one ends, and its replica."""
    change = {"link": terms(per_byte=per_byte), "disk": terms(per_byte=0.0)}
    host = host_pages * PROFILE.geometry.page_layout(16).page_bytes
    found = replica(change=change, pages=60, preemption=preemption, host_cache_bytes=host)
    records = simulate([asked(0, 0.0, 120, prompt=400), asked(1, 0.0, 120, prompt=400)], [found])
    found.engine.check_integrity()
    assert found.engine.stats().num_preemptions == 1
    return records.column("e2e").max(), found


@pytest.mark.parametrize("slow", [False, True])
def test_a_swapped_request_comes_back_over_the_link(slow):
    """KV of preempted requests is computed again, or swapped out and in, as chosen; auto takes the faster one."""
    per_byte = 1e-8 if slow else 1e-11
    (again, _), (back, found), (chosen, auto) = (preempting(each, per_byte) for each in ("recompute", "swap", "auto"))
    stats = found.engine.stats()
    assert (stats.num_swaps_out, stats.num_swaps_in, stats.num_swapped) == (1, 1, 0)
    assert stats.swapped_bytes_out == stats.swapped_bytes_in > 25 * found.executor.layout.page_bytes
    tokens = stats.swapped_bytes_out // found.executor.layout.page_bytes * 16
    prefill, one = (PROFILE.costs().prefill_seconds(count) for count in (tokens, 1))
    more = back - again - (one - prefill)
    # one way at least is waited for: out, while the other request needs its pages, or back
    seconds = stats.swapped_bytes_in * per_byte
    assert seconds - 0.02 < more < 2 * seconds + 0.03
    assert (back > again) == slow
    assert chosen == (again if slow else back)
    assert auto.engine.stats().num_swaps_out == (not slow)


def test_swapped_kv_has_no_more_host_memory_than_there_is():
    without, _ = preempting("recompute", 1e-11)
    short, found = preempting("swap", 1e-11, host_pages=20)
    assert (short, found.engine.stats().num_swaps_out) == (without, 0)
