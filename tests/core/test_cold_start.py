"""Modes of starting a prompt whose adapter is loading, and the cost of each."""

from __future__ import annotations

import pytest

from chorus.core.cold_start import Arrival, ColdStart, CpuLoraCost, link_tokens, stalls
from chorus.core.costs.profile import load_profile


def test_tokens_from_which_the_products_are_more_to_bring_than_the_adapter():
    table = load_profile("a100-llama2-7b").geometry.projections
    assert link_tokens(64, [each.dims for each in table]) / 64 == pytest.approx(1.84, abs=0.005)
    assert link_tokens(64, [table[name].dims for name in ("q_proj", "k_proj", "v_proj")]) == 128


def test_an_adapter_that_is_there_stalls_nothing():
    found = stalls(Arrival(4, 0.0, 0.0, ahead=4), 0.1, cpu=1.0)
    assert (found.wait, found.stream, found.offload, found.offloaded_layers) == (0.0, 0.0, 0.0, 0)


def test_a_stream_waits_for_the_first_or_for_the_last_layer():
    assert stalls(Arrival(10, 1.0, 10.0), prefill=5.0, cpu=0.0).stream == pytest.approx(5.5)  # the last, then half
    assert stalls(Arrival(10, 1.0, 10.0), prefill=50.0, cpu=0.0).stream == pytest.approx(1.0)


def test_offload_workers_serve_until_a_layer_is_there():
    """They take 2 s a layer, the base model 1 s, and all layers come after 5 s: three layers are offloaded."""
    found = stalls(Arrival(10, 5.0, 5.0), prefill=10.0, cpu=20.0)
    assert (found.offloaded_layers, found.offload, found.stream, found.wait) == (3, 3.0, 5.0, 5.0)
    assert found.best is ColdStart.OFFLOAD
    assert found.regret(ColdStart.STREAM) == 2.0


def test_products_that_come_over_the_link_hold_up_the_adapter():
    free = stalls(Arrival(10, 1.0, 10.0), prefill=1.0, cpu=5.0)
    taken = stalls(Arrival(10, 1.0, 10.0), prefill=1.0, cpu=5.0, returned=5.0)
    assert taken.offload > free.offload
    assert taken.offloaded_layers == 10


def test_from_so_many_tokens_on_a_stream_is_no_worse_on_any_processor():
    """With processors that take no time, on a link that is all that matters."""
    dims, rank, per_byte = [(4096, 4096)] * 3, 64, 1e-9
    layers, out = 32, 2 * 3 * 4096
    load = rank * 2 * out * per_byte * layers
    for share, better in ((0.9, True), (1.1, False)):
        tokens = share * link_tokens(rank, dims)
        found = stalls(Arrival(layers, load / layers, load), 0.0, 0.0, returned=tokens * out * per_byte * layers)
        assert (found.offload < found.stream) is better


def test_tokens_are_split_over_cores_while_another_one_pays():
    cost = CpuLoraCost(base=1.0, per_rank=0.1, per_token=0.01, per_token_rank=1.0, cores=4, tokens_each=10)
    assert cost.seconds(10, 2) == pytest.approx(1 + 0.1 + 2 * (0.1 + 10))
    assert cost.seconds(20, 2) == pytest.approx(1 + 0.2 + 2 * (0.1 + 10))
    assert cost.seconds(80, 2) == pytest.approx(1 + 0.8 + 2 * (0.1 + 20))
