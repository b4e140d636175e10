"""Names of slots: of each product's matrices, and of parts whose weights are one object.

Tests: tests/core/model/weights/test_slots.py
"""

from __future__ import annotations

from ....memory.pages.projections import SMALL_GROUPS, STREAM_GATES, Group

#: The slot of each group's matrix. That of its bias, `…_bias`, is a slot, too, if the model has one or an adapter that
#: is merged.
MATRICES = {
    Group.MIXER_IN: "qkv",
    Group.MIXER_OUT: "o",
    Group.GATE_UP: "gate_up",
    Group.DOWN: "down",
    Group.QUERY_UP: "q_up",
    Group.KV_UP: "kv_up",
    Group.INPUT_GATE: "input_gate",
    Group.INPUT_PROJECTION: "input_projection",
    Group.BESIDE_IN: "beside_in",
    Group.BESIDE_OUT: "beside_out",
    Group.LOW_RANK_DOWN: "low_rank_down",
    Group.LOW_RANK_UP: "low_rank_up",
    Group.DECAY_UP: "decay_up",
    Group.OUTPUT_GATE_UP: "output_gate_up",
    Group.SCAN_IN: "scan_in",
    Group.INDEX_UP: "index_up",
    Group.MIXER_GATES_DOWN: "mixer_gates_down",
    Group.MIXER_GATES_UP: "mixer_gates_up",
    Group.MLP_GATES_DOWN: "mlp_gates_down",
    Group.MLP_GATES_UP: "mlp_gates_up",
    Group.PLACE_HEADS_DOWN: "place_heads_down",
    Group.PLACE_QUERY_UP: "place_query_up",
    Group.PLACE_KEY_UP: "place_key_up",
    Group.PLACE_VALUE_UP: "place_value_up",
    Group.PLACE_MLP_DOWN: "place_mlp_down",
    Group.PLACE_MLP_UP: "place_mlp_up",
    Group.PLACE_OUT: "place_out",
    Group.ROUTER_DOWN: "router_down",
    Group.ROUTER_FIRST: "router_first",
    Group.ROUTER_SECOND: "router_second",
    **{group: f"streams_{group.name.lower()}" for groups in STREAM_GATES.values() for group in groups},
    Group.LOOKUP_IN: "lookup_in",
}

#: Those which adapters may be merged into.
MERGED_MATRICES = {int(group): name for group, name in MATRICES.items() if group not in SMALL_GROUPS}

#: Slots of parts whose weights are one object: slots `recurrent.…` are of a recurrent mixer, `experts.…` of a mixture,
#: `image_experts.…` of that of images' positions.
RECURRENT, EXPERTS, IMAGE_EXPERTS = "recurrent", "experts", "image_experts"

#: Likewise `lookup.…` of a table of n-grams, beside the table itself.
LOOKUP, LOOKUP_TABLE = "lookup", "lookup_table"
