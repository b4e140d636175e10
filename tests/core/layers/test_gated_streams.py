"""Qwen4-Exp, whose parts take of several streams by gates, with tables of n-grams and an indexer of means: names,
products, pages and refusals. For paths, see `paths`.
"""

from __future__ import annotations

import json
from types import SimpleNamespace as Fake

import pytest
import torch

from chorus.core.model.families.qwen4_exp.ops import LookUp, MeanOfGated
from chorus.core.model.program.layer_program import Kept
from chorus.core.model.program.native_decoder import why_unsupported
from chorus.core.model.program.ops.indexers import ChooseBlocks
from chorus.core.model.program.text import program_lines
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.narrow_bytes import kept_bytes
from chorus.core.model.weights.open_weights import open_weights
from chorus.core.model.weights.shard import Shard

from ..tiny_families import save_family
from .test_narrow_values import changed

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


@pytest.fixture
def model(tmp_path):
    save_family("qwen4-exp", tmp_path)
    return tmp_path


def test_the_program_and_its_text(model):
    config = read_model_config(model)
    programs = [config.composed(layer).program for layer in config.layers]
    assert [len(each.segments) for each in programs] == [3, 1, 3, 1], "rows of tables, convolutions, mixers"
    assert [any(isinstance(op, LookUp) for op in each.ops) for each in programs] == [True, False, True, False]
    assert [sum(isinstance(op, MeanOfGated) for op in each.ops) for each in programs] == [2, 2, 2, 3]
    assert {each.name for each in programs[0].segments[1].reads} == {"gn", "gv"}, "what streams take lives on"
    chosen = next(op for op in programs[3].ops if isinstance(op, ChooseBlocks))
    assert (chosen.k_norm, chosen.attention.top_k) == ("index_k_norm", 15)
    text = "\n".join(program_lines(config))
    assert "3 blocks of 4 tokens by the mean of each, and those behind the last whole one" in text


def test_slots_and_names(model):
    config = read_model_config(model)
    own = [{slot.name: slot for slot in config.composed(layer).slots} for layer in config.layers]
    assert [("lookup_table" in each, "join_streams_norm" in each) for each in own] == [
        (True, False), (False, False), (True, False), (False, True),
    ]  # fmt: skip
    assert own[0]["lookup_table"].tensors[0].shape != own[2]["lookup_table"].tensors[0].shape
    assert not config.has_last_norm


def test_tables_are_not_copied_out_of_the_files(model):
    config = read_model_config(model)
    with open_weights(model, config, torch.float32) as weights:
        table = next(iter(weights.layers()))["lookup_table"]
        counted = weights.num_bytes_kept
    assert [len(part) for part in table.parts] == [60] * 4
    assert sum(map(len, table.parts)) == config.layers[0].lookup.table_shape[0]
    larger = read_model_config(changed(model, ngram_vocab_size_base=5000))
    assert larger.layers[0].lookup.table_shape[0] > 20_000
    assert kept_bytes(larger, 4) == counted, "which a device needs no memory for"


def test_factors_of_hashes_are_the_files(model):
    """transformers loads them, whatever seed made them."""
    config = read_model_config(model)
    found = []
    for own in (config, read_model_config(changed(model, seed=77))):
        with open_weights(model, own, torch.float32) as weights:
            found.append(next(iter(weights.layers()))["lookup"].first.factors)
    assert torch.equal(*found)
    assert found[0].dtype == torch.int64


@pytest.mark.parametrize("kernels", ["torch"])
def test_states_of_tables_are_beside_those_of_mixers(tiny, drive):
    driver = drive(tiny("qwen4-exp"), adapters={}, block_tokens=16)
    states = driver.executor.rank.layout.states
    assert (states.shape.num_layers, states.shape.further.num_layers) == (3, 2)
    assert states.shape.further.conv_elems == 2 * 3 * 3 * 64
    assert states.further.conv(0)[0] > states.head(2, 3)[0]


@pytest.mark.parametrize("kernels", ["torch"])
def test_the_longest_sequence_may_end_within_a_page(tiny, drive):
    """Places behind it have no position in the rope."""
    it = tiny("qwen4-exp-longer")
    driver = drive(it, adapters={}, block_tokens=16, max_model_len=100, max_num_batched_tokens=100)
    prompt, want = it.case(None, 92, seed=1, count=8)
    driver.add("a", None, prompt, max_tokens=8)
    assert driver.drain()["a"].tokens == want


def test_a_piece_of_a_wider_bucket_looks_up_the_steps_own_tokens(model):
    config, seen = read_model_config(model), list[int]()
    (op,) = [op for op in config.composed(config.layers[0]).program.ops if isinstance(op, LookUp)]

    def mix(index: int, rows: torch.Tensor, *_: object) -> torch.Tensor:
        seen.append(len(rows))
        return rows

    table = Fake(rows=lambda numbers, _: numbers.float().expand(-1, op.lookup.width))
    weights = {op.weights: Fake(first=None), op.table: table}
    kept = {Kept(op.out, (op.lookup.width,)): torch.zeros(4, op.lookup.width)}
    step = Fake(states=Fake(mix=mix), batch=Fake(token_ids=torch.arange(24)), kept=kept, names={})
    op.torch(Fake(index=0, model=Fake(dtype=torch.float32), weights=weights))(step)
    assert seen == [4]
    assert step.names[op.out][:, 0].tolist() == [0, 1, 2, 3]


def test_fields_of_an_indexer_are_read_where_a_layer_has_one(model):
    kinds = ["linear_attention"] * 4
    config = read_model_config(changed(model, layer_types=kinds, indexer_n_heads=None, indexer_head_dim=None))
    assert all(layer.attention is None for layer in config.layers)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hc_count": 1}, "hc_count"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ({"output_gate_type": "tanh"}, "output_gate_type"),
        ({"ple_layer_ids": [4]}, "only those of linear_attention have tables; 4 is not"),
        ({"ple_layer_ids": [9]}, "ple_layer_ids"),
        ({"ple_embed_dim": 23}, "ple_embed_dim"),
        ({"eos_token_id": None}, "eos_token_id"),
        ({"ngram_size": 1}, "ngram_size"),
        ({"ple_conv_kernel_size": 1}, "ple_conv_kernel_size"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads"),
        ({"indexer_budget": 13}, "indexer_budget"),
        ({"indexer_head_dim": 4}, "indexer_head_dim"),
        ({"indexer_n_heads": None}, "indexer_n_heads"),
        ({"layer_types": ["linear_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"vocab_size": 1 << 25}, "vocab_size"),
    ],
)
def test_refusals(model, fields, why):
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config(changed(model, **fields))


def test_layers_have_attention_by_interval_where_no_field_names_them(model):
    path = model / "config.json"
    raw = json.loads(path.read_text())
    del raw["layer_types"]
    path.write_text(json.dumps({**raw, "full_attention_interval": 2, "ple_layer_ids": None}))
    config = read_model_config(model)
    assert [layer.attention is not None for layer in config.layers] == [False, True, False, True]
    assert config.lookup is None


def test_ranks_and_the_native_decoder_are_refused_by_name(model):
    config = read_model_config(model)
    with pytest.raises(UnsupportedModel, match="tables of n-grams are made of all streams"):
        Shard(0, 2).config(config)
    assert why_unsupported(config, torch.float32) == "it has no table of n-grams, and this model has it"
