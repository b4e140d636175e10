"""Widths of a decoder layer's linear modules."""

from __future__ import annotations


def module_dims(hidden: int, q: int, kv: int, ffn: int) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each module that adapters may target.

    `q` and `kv` are widths: heads times head size.
    """
    attention = {"q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden)}
    return attention | {"gate_proj": (hidden, ffn), "up_proj": (hidden, ffn), "down_proj": (ffn, hidden)}
