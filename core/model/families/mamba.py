"""Mamba 2 as Granite 4 and Bamba have it in `config.json`.

Tests: tests/core/layers/test_hybrids.py
"""

from __future__ import annotations

import math

from ..config_json import ConfigJson
from ..specs.feed_forward import Activation
from ..specs.recurrent import MambaSpec
from . import reading

#: Values of `time_step_limit` that limit nothing.
_UNLIMITED = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])


def mamba_2(fields: ConfigJson, size: int | None = None) -> MambaSpec:
    """Its specification. size: width of all heads; None: `mamba_expand` says it."""
    heads, groups = fields.integer("mamba_n_heads"), fields.integer("mamba_n_groups")
    needed = "mamba_expand · hidden_size" if size is None else "mamba_d_ssm"
    size = fields.integer("mamba_expand") * fields.integer("hidden_size") if size is None else size
    given = fields.raw.get("mamba_d_head")
    head_dim = size // heads if given in (None, "auto") else fields.integer("mamba_d_head")
    if heads * head_dim != size:
        raise fields.refuse("mamba_d_head", f"mamba_n_heads {heads} times it must be {needed}, {size}")
    if heads % groups:
        raise fields.refuse("mamba_n_groups", f"mamba_n_heads, {heads}, must be a multiple of it")
    check_time_steps(fields)
    return MambaSpec(
        heads,
        head_dim,
        groups,
        fields.integer("mamba_d_state"),
        eps=reading.rms_norm(fields).eps,
        conv_size=fields.integer("mamba_d_conv", least=2),
        conv_bias=fields.boolean("mamba_conv_bias"),
        bias=fields.boolean("mamba_proj_bias"),
    )


def check_time_steps(fields: ConfigJson) -> None:
    """Refuse limits of time steps, and other activations than Mamba's own."""
    if fields.raw.get("time_step_limit") not in _UNLIMITED:
        raise fields.refuse("time_step_limit", "limits of time steps are not supported; supported: [0, Infinity]")
    if fields.text("hidden_act", "silu") != Activation.SILU:
        raise fields.refuse("hidden_act", "Mamba layers are supported with silu alone")
