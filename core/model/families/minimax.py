"""MiniMax-M2: experts chosen by sigmoids with a learned correction, and one norm of all heads."""

from __future__ import annotations

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing, Scoring
from ..specs.tensor_names import CORRECTION, LLAMA_NORMS, TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    heads = reading.heads(fields)
    attention = AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=rotary.rope(_with_partial_factor(fields, heads.head_dim), heads.head_dim),
        head_norm=HeadNorm.ALL,
    )
    routing = Routing(1, Scoring.SIGMOID, renormalised=True, corrected=True)
    layer = DecoderLayer(attention, reading.experts(fields, routing, size="intermediate_size"))
    return reading.dense(fields, [layer] * fields.integer("num_hidden_layers"), reading.rms_norm(fields))


def _with_partial_factor(fields: ConfigJson, head_dim: int) -> ConfigJson:
    """The same fields, with the part of a head that rotates as transformers has it: checkpoints say `rotary_dim`."""
    rotated = fields.optional("rotary_dim")
    if rotated is None or not fields.is_missing("partial_rotary_factor"):
        return fields
    return fields.with_values({"partial_rotary_factor": rotated / head_dim})


MINIMAX_M2 = Family(
    "MiniMax-M2",
    ("MiniMaxM2ForCausalLM",),
    _read,
    Defaults("MiniMaxM2Config", {"partial_rotary_factor": 1.0}),
    TensorNames(
        names={
            **LLAMA_NORMS,
            "mlp.gate": "block_sparse_moe.gate",
            CORRECTION: "block_sparse_moe.e_score_correction_bias",
            "mlp.experts.{}.gate_proj": "block_sparse_moe.experts.{}.w1",
            "mlp.experts.{}.up_proj": "block_sparse_moe.experts.{}.w3",
            "mlp.experts.{}.down_proj": "block_sparse_moe.experts.{}.w2",
        }
    ),
)
