"""Products by the numbers that files of earlier versions have in place of names.

Content hashes of adapters cover their weights in this order, too, whatever the order of a model's modules.

Tests: tests/core/costs/test_costs.py, tests/memory/files/test_adapter_identity.py
"""

from __future__ import annotations

#: The product of each number; empty: one that no module of a layer had.
NUMBERED = (
    "qkv", "o", "gate_up", "down", "", "", "", "", "experts.router", "experts.shared_gate_up", "experts.shared_down",
    "experts.shared_gate", "experts.gate_up", "experts.down", "q_up", "kv_up", "input_gate", "input_projection", "",
    "mixer_in", "mixer_out", "low_rank_down", "low_rank_up", "decay_up", "output_gate_up", "scan_in", "index_up",
    "mixer_gates_down", "mixer_gates_up", "mlp_gates_down", "mlp_gates_up", "invocation_heads_down",
    "invocation_query_up", "invocation_key_up", "invocation_value_up", "invocation_mlp_down", "invocation_mlp_up",
    "block_out", "router_down", "router_first", "router_second", "streams_mixer_streams_down",
    "streams_mixer_streams_up", "streams_mlp_streams_down", "streams_mlp_streams_up", "streams_join_down",
    "streams_join_up", "lookup_in",
)  # fmt: skip

_NUMBERS = {product: number for number, product in enumerate(NUMBERED) if product}


def number_of(product: str) -> int:
    """The number of a product; the next one for all that earlier versions did not have."""
    return _NUMBERS.get(product, len(NUMBERED))
