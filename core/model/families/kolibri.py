"""Kolibri 1: EXAONE 4's attention, norms around each part, and experts chosen by logits with a learned correction.

The chosen experts' weights are sigmoids of the logits alone.

Tests: tests/core/test_experts.py
"""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing, Scoring
from ..specs.norms import Norms
from ..specs.tensor_names import CORRECTION, TensorNames
from . import exaone, glm, glm_moe, reading
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    if fields.is_null("sliding_window"):
        raise fields.refuse("sliding_window", "transformers takes no null here; leave the field out for its default")
    routing = Routing(1, Scoring.SIGMOID_OF_CHOSEN, renormalised=fields.boolean("norm_topk_prob"), corrected=True)
    experts = reading.experts(fields, routing, shared=fields.integer("shared_expert_intermediate_size"))
    return reading.decoder(fields, exaone.attentions(fields, 5), experts, norms=Norms.AROUND)


KOLIBRI_1 = Family(
    "Kolibri 1",
    ("Kolibri1ForCausalLM",),
    _read,
    Defaults("Kolibri1Config"),
    TensorNames(
        names={
            **glm_moe.NAMES,
            "attention_out_norm": "post_attn_norm",
            "mlp_out_norm": "post_ffn_norm",
            CORRECTION: "moe.router.expert_bias",
        },
        older={**glm.OUT_NORMS, CORRECTION: "mlp.gate.e_score_correction_bias"},
    ),
)
