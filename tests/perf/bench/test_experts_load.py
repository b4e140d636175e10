"""The benchmark of a load measures what the store does with the file, and judges by its bars."""

from __future__ import annotations

import json

import pytest
import torch

from chorus.core.costs.profile import load_profile
from chorus.core.model.read_config import read_model_config
from chorus.memory.adapters.adapter import Tier
from chorus.memory.files.module_paths import ExpertForm
from chorus.perf.bench import experts_load
from chorus.perf.bench.experts_load import NAME, FirstTokens, LoadOnly, main
from chorus.perf.bench.models.random_mixture import MixtureShape, write_adapter

SMALL = MixtureShape(layers=3, hidden=64, size=32, count=4, per_token=2, heads=2, kv_heads=1, head_dim=32, vocab=256)
FLAGS = "--layers 3 --hidden 64 --size 32 --count 4 --per-token 2 --heads 2 --kv-heads 1 --head-dim 32 --vocab 256"


@pytest.fixture
def files(tmp_path):
    model = SMALL.write_config(tmp_path / "model")
    return model, write_adapter(tmp_path / "adapter", SMALL, 2)


@pytest.mark.parametrize("form", ExpertForm)
def test_what_is_loaded_has_the_bytes_that_plans_count(tmp_path, form):
    """Pages and the host cache take what `chorus plan` says of an adapter on all experts."""
    model, adapter = SMALL.write_config(tmp_path / "model"), write_adapter(tmp_path / "adapter", SMALL, 2, form)
    with LoadOnly(model, 1 << 20) as place:
        loaded, page_bytes = place.load(adapter), place.arena.layout.page_bytes
    table = read_model_config(model).projections
    geometry = load_profile("h200-llama3.1-8b").geometry.model_copy(
        update={"num_layers": SMALL.layers, "num_kv_heads": SMALL.kv_heads, "head_dim": SMALL.head_dim}
    )
    targets = [*SMALL.attention, *(f"experts.{name}_proj" for name in ("gate", "up", "down"))]
    counted = geometry.with_projections(table).adapter_bytes(2, targets)
    assert loaded.pages_bytes == -(-counted // page_bytes) * page_bytes
    assert loaded.register > 0
    assert loaded.load > 0


def test_a_load_ends_in_pages_and_is_forgotten(files):
    model, adapter = files
    with LoadOnly(model, 1 << 20) as place:
        place.arena.pages.zero_()
        before = place.store.num_loads
        place.load(adapter)
        assert place.store.num_loads == before + 1
        assert NAME not in place.store
        assert place.arena.pages.any(), "the values are in pages"
        place.arena.pages.zero_()
        place.plain_seconds(adapter / "adapter_model.safetensors")
        assert place.arena.pages.any()


def test_a_first_token_reads_the_adapter_again(files):
    model, adapter = files
    with FirstTokens(model, 8, 1 << 20, 1) as tokens:
        store = tokens.engine.store
        assert tokens.load_seconds(adapter) > 0
        loads = store.num_loads
        tokens.seconds()
        assert store.num_loads == loads, "it is resident"
        assert store.tier(tokens.to_disk(adapter)) is Tier.DISK
        tokens.seconds()
        assert store.num_loads == loads + 1
        assert len(tokens.steps_beside(adapter, 5)) == 5


@pytest.mark.parametrize(("bar", "code"), [(0.0, 0), (1e9, 1)])
def test_shares_are_judged(monkeypatch, capsys, bar, code):
    monkeypatch.setattr(experts_load, "PLAIN_BAR", bar)
    monkeypatch.setattr(experts_load, "OVERLAP_BAR", -1e9)
    flags = [*FLAGS.split(), "--rank", "2", "--rounds", "1", "--prompt", "8", "--neighbours", "4", "--threads", "1"]
    assert main(flags) == code
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["met"] is (code == 0)
    assert result["load"]["pages_bytes"] > result["load"]["file_bytes"] / 2
    assert set(result["first_token"]) >= {"warm_seconds", "cold_seconds", "load_seconds", "overlap"}
    assert torch.get_num_threads() == 1
