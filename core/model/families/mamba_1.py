"""Mamba and Falcon-Mamba: each layer is a selective scan alone. Falcon-Mamba has norms in it.

Tests: tests/core/layers/test_states_alone.py, tests/core/paths
"""

from __future__ import annotations

from math import ceil

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.norms import NormSpec
from ..specs.selective_scan import SelectiveScanSpec
from ..specs.tensor_names import TensorNames
from . import reading
from .defaults import Defaults
from .mamba import check_time_steps
from .mamba_2 import MIXER_NAMES, MOST_TOKENS


def _read(fields: ConfigJson) -> ModelConfig:
    return _model(fields, None)


def _read_falcon(fields: ConfigJson) -> ModelConfig:
    return _model(fields, NormSpec(fields.number("mixer_rms_eps"), weightless=True, wide=True))


def _model(fields: ConfigJson, inner: NormSpec | None) -> ModelConfig:
    check_time_steps(fields)
    size = fields.integer("expand") * fields.integer("hidden_size")
    mixer = SelectiveScanSpec(
        fields.integer("intermediate_size", size),  # transformers takes a given one, whatever `expand` is
        fields.integer("state_size"),
        time_step_rank(fields, "time_step_rank"),
        conv_size=fields.integer("conv_kernel", least=2),
        conv_bias=fields.boolean("use_conv_bias"),
        bias=fields.boolean("use_bias"),
        norm=inner,
    )
    most = fields.integer("max_position_embeddings", MOST_TOKENS)
    return reading.dense(
        fields.with_values({"max_position_embeddings": most}),
        [DecoderLayer(mixer, None)] * fields.integer("num_hidden_layers"),
        NormSpec(fields.number("layer_norm_epsilon")),
    )


def time_step_rank(fields: ConfigJson, name: str) -> int:
    """A field that is a number, or "auto"."""
    is_auto = fields.raw.get(name, "auto") == "auto"
    return ceil(fields.integer("hidden_size") / 16) if is_auto else fields.integer(name)


_NAMES = {**MIXER_NAMES, **{f"mamba.{each}": f"mixer.{each}" for each in ("x_proj", "dt_proj")}}
_TENSORS = TensorNames(prefixes=("backbone.", ""), norm="norm_f", embeddings="embeddings", names=_NAMES)
STEPS_NOTE = "adapters whose `dt_proj` is not zero are refused: transformers multiplies by its weight, past LoRA"
MAMBA = Family("Mamba", ("MambaForCausalLM",), _read, Defaults("MambaConfig"), _TENSORS, notes=STEPS_NOTE)
FALCON_MAMBA = Family(
    "Falcon-Mamba",
    ("FalconMambaForCausalLM",),
    _read_falcon,
    Defaults("FalconMambaConfig"),
    _TENSORS,
    notes=STEPS_NOTE,
)
