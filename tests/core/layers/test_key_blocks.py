"""MiniMax-M3, whose queries attend to blocks of keys: configuration, pages, ranks and refusals. For paths, see
`paths`.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.costs.machine import geometry_of
from chorus.core.model.program.op import CHOSEN
from chorus.core.model.program.ops.attend import Attend
from chorus.core.model.program.ops.indexers import ChooseBlocks, IndexBlocks
from chorus.core.model.program.text import program_lines
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.feed_forward import ClampedSwiglu
from chorus.core.model.weights.shard import Shard
from chorus.memory.pages.layout import KvShape

from ..model.checkpoints.quantization.twins import weights
from ..paths.asked import answers, told
from ..tiny_families import save_family
from .test_narrow_values import changed

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

by_torch = pytest.mark.parametrize("kernels", ["torch"])


@pytest.fixture
def model(tmp_path):
    save_family("minimax-m3", tmp_path)
    return tmp_path


@by_torch
def test_pages_keep_parts_of_the_indexers_key_behind_keys_and_values(tiny, drive):
    driver = drive(tiny("minimax-m3"), adapters={}, block_tokens=8)
    executor, config = driver.executor.rank, driver.executor.rank.config
    assert [shape[:2] for shape in executor.layout.layer_shapes] == [(2, 16), (2, 16 + 3), (2, 16 + 3)]
    geometry = geometry_of(config, executor)
    assert geometry.page_layout(8).layer_shapes == executor.layout.layer_shapes


def test_a_layer_attends_to_the_blocks_that_its_indexer_chose(model):
    config = read_model_config(model)
    kinds = [[type(op) for op in config.composed(layer).program.ops] for layer in config.layers]
    assert [(IndexBlocks in own, ChooseBlocks in own) for own in kinds] == [(False, False), (True, True), (True, True)]
    attends = [op for layer in config.layers for op in config.composed(layer).program.ops if type(op) is Attend]
    assert [op.chosen for op in attends] == [None, CHOSEN, CHOSEN]
    assert config.layers[0].dense.activation == ClampedSwiglu(1.702, 7.0)
    text = "\n".join(program_lines(config))
    assert "2 heads of 12, each normalised, rotated by a default rope of base 5e+06; writes a key for all heads" in text
    assert "3 blocks of 4 tokens by the highest score of each, first the last 1" in text
    assert "sees the 12 tokens that were chosen" in text


def test_ranks_share_the_indexers_heads_and_have_its_key(model):
    share = Shard(1, 2).config(read_model_config(model))
    mixer = share.attention_layers[1]
    assert (mixer.block_indexer.heads, mixer.kv_shape) == (1, KvShape(1, 16 + 6))
    own = {each.path: each for each in share.composed(share.layers[1]).projections}
    assert (own["self_attn.indexer.q_proj"].outputs, own["self_attn.indexer.k_proj"].is_replicated) == (12, True)


@pytest.mark.parametrize("family", ["minimax-m3", "minimax-m3-plain"])
@by_torch
def test_all_tokens_are_attended_to_where_no_request_has_more(tiny, drive, family):
    it = tiny(family)
    driver = drive(it, max_model_len=10, block_tokens=4, max_num_batched_tokens=64)
    want = answers(it, driver, 4, seed=4, lengths=(3, 5), tokens=4)
    assert told(driver, want) == want


def test_older_names_of_fields_come_first(model):
    want = read_model_config(model)
    older = {"sparse_num_index_heads": 2, "sparse_index_dim": 12, "sparse_block_size": 4, "sparse_topk_blocks": 3}
    older |= {"sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1]}
    fields = dict.fromkeys(("index_n_heads", "index_head_dim", "index_block_size", "layer_types", "mlp_layer_types"))
    found = read_model_config(
        changed(model, sparse_attention_config=older, moe_layer_freq=[0, 1, 1], index_topk_blocks=9, **fields)
    )
    assert found.layers == want.layers


def test_published_names_are_the_same_weights(model):
    """Experts, gates and ups apart, in parts of other names."""
    file = model / "model.safetensors"
    want = list(weights(model, torch.float32))
    found = {}
    for name, tensor in load_file(file).items():
        new = f"language_model.{name}".replace(".indexer.", ".index_")
        is_sparse = ".mlp." in new and ".layers.0." not in new
        new = new.replace(".mlp.", ".block_sparse_moe.") if is_sparse else new
        new = new.replace("gate.e_score", "e_score")
        if new.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(part.chunk(2) for part in tensor):
                found[new.replace("gate_up_proj", f"{expert}.w1.weight")] = gate.contiguous()
                found[new.replace("gate_up_proj", f"{expert}.w3.weight")] = up.contiguous()
        elif new.endswith("experts.down_proj"):
            for expert, part in enumerate(tensor.clone()):
                found[new.replace("down_proj", f"{expert}.w2.weight")] = part
        elif "gate_up_proj" in new:
            gate, up = tensor.chunk(2)
            found |= {new.replace("gate_up", part): each.contiguous() for part, each in (("gate", gate), ("up", up))}
        else:
            found[new] = tensor
    save_file(found, file)
    for own, other in zip(weights(model, torch.float32), want, strict=True):
        assert own is other is None or torch.equal(own, other)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"index_n_heads": 4}, "index_n_heads is 4: each of num_key_value_heads, 2, needs one"),
        ({"index_head_dim": 6}, "index_head_dim is 6: 8 of its elements rotate"),
        ({"index_local_blocks": 4}, "index_local_blocks is 4: index_topk_blocks is 3; any of so many would be chosen"),
        ({"index_topk_blocks": 0}, "index_topk_blocks is 0: a whole number of at least 1 is needed"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention is not supported; supported: full_attention"),
        ({"layer_types": ["full_attention"]}, "1 types for num_hidden_layers, 3"),
        ({"mlp_layer_types": None, "moe_layer_freq": [1]}, "1 numbers for num_hidden_layers, 3"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_field(model, fields, why):
    with pytest.raises(UnsupportedModel) as error:
        read_model_config(changed(model, **fields))
    assert why in str(error.value)


@by_torch
def test_float8_is_refused_by_name(tiny, drive):
    with pytest.raises(UnsupportedModel, match="is 'fp8', but the model's layers keep keys of an indexer"):
        drive(tiny("minimax-m3"), kv_cache_dtype="fp8")
