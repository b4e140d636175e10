"""The table of a model's projections, alike in every layer or not."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from chorus.core.model.specs.recurrent import GatedDeltaSpec
from chorus.core.model.specs.selective_scan import SelectiveScanSpec
from chorus.memory.pages.adapter_layout import AdapterLayout, uniform_parts
from chorus.memory.pages.layer_projections import attention_projections, dense_projections
from chorus.memory.pages.layout import SlabLayout
from chorus.memory.pages.projections import Projection, Projections, Role

from ...tables import DELTA, TINY, hybrid_table, mixer_projections

LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


def test_ids_of_a_model_of_equal_layers_are_those_that_slabs_and_content_hashes_have():
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert TINY.names == names
    assert [TINY.id(name) for name in names] == list(range(7))
    assert [TINY[name].dims for name in names] == [(16, 16), (16, 8), (16, 8), (16, 16), (16, 24), (16, 24), (24, 16)]
    assert TINY["down_proj"].path == "mlp.down_proj" and TINY["o_proj"].path == "self_attn.o_proj"
    assert all(TINY.layers_of(name) == (0, 1, 2) for name in names)


def test_a_product_has_its_outputs_side_by_side():
    assert [(each.is_row_parallel, each.inputs, each.outputs, each.modules) for each in TINY.gemm_shapes] == [
        (False, 16, 32, ((0, 0, 16), (1, 16, 8), (2, 24, 8))),
        (True, 16, 16, ((3, 0, 16),)),
        (False, 16, 48, ((4, 0, 24), (5, 24, 24))),
        (True, 24, 16, ((6, 0, 16),)),
    ]
    assert TINY.gemm_shape_of == ({"qkv": 0, "o": 1, "gate_up": 2, "down": 3},) * 3


def test_layers_of_two_kinds_share_the_products_that_are_equal():
    table = hybrid_table("LLAL")
    assert table.names == (
        *LINEAR[:4],
        "q_proj",
        "k_proj",
        "v_proj",
        "out_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    assert table.layers_of("q_proj") == (2,) and table.layers_of("in_proj_z") == (0, 1, 3)
    assert table.layers_of("gate_proj") == (0, 1, 2, 3)
    assert len(table.gemm_shapes) == 6
    linear, full = (0, 1, 2, 3), (4, 5, 2, 3)
    assert [tuple(each.values()) for each in table.gemm_shape_of] == [linear, linear, full, linear]
    assert table.gemm_shapes[0].modules == ((0, 0, 32), (1, 32, 16), (2, 48, 4), (3, 52, 4))
    assert table.gemm_shapes[full[0]].modules == ((4, 0, 16), (5, 16, 8), (6, 24, 8))


@pytest.mark.parametrize("is_first", [True, False])
def test_outputs_stand_in_the_order_of_a_layer_whatever_the_order_of_layers(is_first):
    """Of two kinds of layers that have some modules in common, such as Ling 2.6's."""
    delta = mixer_projections(GatedDeltaSpec(2, 2, 12, 12, 1e-6, gate_rank=0), 16)
    latent = (
        Projection("self_attn.q_proj", "qkv", 16, 16, 2),
        Projection("self_attn.kv_a_proj_with_mqa", "qkv", 16, 14, 1),
        Projection("self_attn.kv_b_proj", Role.KV_UP, 12, 20, 2),
        Projection("self_attn.o_proj", "o", 8, 16, 2, is_row_parallel=True),
    )
    gate = Projection("self_attn.g_proj", "qkv", 16, 2, 2)
    table = Projections((delta, (*latent, gate)) if is_first else ((*latent, gate), delta))
    for layer, projections in enumerate(table.layers):
        own = [(table.id(each.name), each.outputs) for each in projections if each.product == "qkv"]
        assert own == [(module, width) for module, _, width in table.columns(layer, "qkv")]


def test_sums_count_the_layers_that_have_a_projection():
    table = hybrid_table("LA")
    linear = 16 * (32 + 16 + 4 + 4) + 16 * 16
    full, feed_forward = 16 * (16 + 8 + 8) + 16 * 16, 3 * 16 * 24
    assert table.num_weights == linear + full + 2 * feed_forward
    assert table.rank_elems(["q_proj", "gate_proj"]) == 32 + 2 * 40
    assert table.rank_elems() == sum(sum(each.dims) for layer in table.layers for each in layer)


def test_projections_of_one_name_must_be_equal():
    with pytest.raises(ValueError, match="q_proj in two shapes"):
        Projections((attention_projections(16, 2, 1, 8), attention_projections(16, 4, 1, 8)))


def test_projections_of_a_product_must_have_one_input():
    layer = (*TINY.layers[0], Projection("mlp.down_2", "down", 6, 16, 1, is_row_parallel=True))
    with pytest.raises(ValueError, match="down have no common input"):
        _ = Projections((layer,)).gemm_shapes


def test_a_table_is_a_value():
    table = hybrid_table()
    assert table == hybrid_table() != TINY
    assert hash(table) == hash(hybrid_table())
    assert pickle.loads(pickle.dumps(table)) == table
    own = "import pickle, sys; table = pickle.load(sys.stdin.buffer); assert hash(table) == hash((table.layers, ()))"
    subprocess.run([sys.executable, "-c", own], input=pickle.dumps(table), check=True, timeout=60)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_share_units(size):
    table = dense_projections(1, hidden=16, ffn=24, heads=4, kv_heads=2, head_dim=8)
    for rank in range(size):
        inputs, outputs = table["q_proj"].share(rank, size)
        assert (inputs, outputs) == (slice(None), (slice(rank * 32 // size, (rank + 1) * 32 // size),))
        inputs, outputs = table["o_proj"].share(rank, size)
        assert (inputs, outputs) == (slice(rank * 32 // size, (rank + 1) * 32 // size), (slice(None),))
        inputs, outputs = table["down_proj"].share(rank, size)
        assert (inputs, outputs) == (slice(rank * 24 // size, (rank + 1) * 24 // size), (slice(None),))
    first = [table["k_proj"].share(rank, 4)[1][0] for rank in range(4)]
    assert first == [slice(0, 8), slice(0, 8), slice(8, 16), slice(8, 16)], "two ranks have each of two heads"


def test_ranks_add_up_what_is_wider_than_the_residual_stream():
    layer = mixer_projections(SelectiveScanSpec(32, state_size=20, rank=4, head_dim=16), 16)
    assert Projections((layer,)).summed == {16, 44}


def test_an_adapter_on_everything_is_a_part_for_each_set_of_layers():
    assert [(part.layers, part.targets) for part in uniform_parts(TINY, 4)] == [((0, 1, 2), TINY.names)]
    table = hybrid_table("LLAL")
    parts = uniform_parts(table, 4)
    assert [(part.layers, part.targets) for part in parts] == [
        ((0, 1, 2, 3), ("gate_proj", "up_proj", "down_proj")),
        ((0, 1, 3), LINEAR),
        ((2,), ("q_proj", "k_proj", "v_proj", "o_proj")),
    ]
    assert all(set(part.layers) <= set(table.layers_of(name)) for part in parts for name in part.targets)
    assert [part.targets for part in uniform_parts(table, 4, targets=["v_proj", "q_proj"])] == [("q_proj", "v_proj")]


def test_slabs_of_a_layer_hold_only_what_it_has():
    table = hybrid_table("LA")
    slab = SlabLayout.build(table, LINEAR, 4)
    assert len(slab.a_offset) == len(table)
    assert [name for name in table.names if slab.a_offset[table.id(name)] >= 0] == [*LINEAR]
    layout = AdapterLayout.build(uniform_parts(table, 3), table, 1, 4)
    assert layout.num_elems == 3 * table.rank_elems(), "all widths are multiples of 16 bytes"
    assert [len(layout.layer_ranges(layer)) for layer in range(2)] == [2, 2]


def test_linear_attention_is_one_product_of_four():
    table = Projections((mixer_projections(DELTA, 16) + TINY.layers[0][4:],))
    assert [len(each.modules) for each in table.gemm_shapes] == [4, 1, 2, 1]
