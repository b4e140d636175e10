"""MiniMax-M2: experts chosen by sigmoids with a learned correction, and one norm of all heads."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.tensor_names import CORRECTION, LETTERS, LLAMA_NORMS, TensorNames, gated_names
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    own = _with_partial_factor(fields, reading.heads(fields).head_dim)
    attention = rotary.attention(own, bias=False, head_norm=HeadNorm.ALL)
    experts = reading.experts(fields, reading.sigmoid_routing(fields), size="intermediate_size")
    return reading.decoder(fields, attention, experts)


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
            **gated_names("mlp.experts.{}", "block_sparse_moe.experts.{}", LETTERS),
        }
    ),
)
