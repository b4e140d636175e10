"""Names of tensors in GGUF files, by what transformers calls them.

Most are those of the package `gguf` (`tensor_mapping.py`). Here are those of architectures that llama.cpp's converter
knows and the package doesn't, as of its version 0.19, and of tensors that transformers has renamed since.

Tests: tests/core/test_gguf.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gguf import TensorNameMap

#: The number of a layer in transformers' names, and what follows it.
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.(.+)")

#: Beginnings of names of the text part.
_BEGIN = re.compile(r"^(?:model\.|language_model\.|backbone\.|transformer\.)+")

#: Ends of the names of hyper-connections.
_HYPER = ("fn", "base", "scale")

#: Names of tensors that belong to no layer.
_ENDS = {
    "embed_tokens": "token_embd",
    "embeddings": "token_embd",
    "norm": "output_norm",
    "norm_f": "output_norm",
    "lm_head": "output",
    **{f"hc_pre.hc_head.hc_head_{end}": f"output_hc_{end}.weight" for end in _HYPER},
}

_LLAMA = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}

_MIXTURE = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}

_LATENTS = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}

_INDEXER = {
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}

_DEEPSEEK = {**_LLAMA, **_MIXTURE, **_LATENTS, **_INDEXER}

#: An architecture → names in its layers: of modules, or of parameters with the whole name of the file's tensor.
_OWN: dict[str, dict[str, str]] = {
    "dbrx": {f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
    "deepseek32": _DEEPSEEK,
    "dots3note": {
        **_DEEPSEEK,
        "self_attn.g_proj": "attn_gate",
        "self_attn.k_rope_only_layernorm": "attn_k_norm",
    },
    "glm5-next": {
        **_DEEPSEEK,
        "self_attn.b_proj": "ssm_beta",
        **{f"self_attn.forget_gate.f_{each}_proj": f"ssm_f_{each}" for each in "ab"},
        **{f"self_attn.g_{each}_proj": f"ssm_g_{each}" for each in "ab"},
        "self_attn.forget_gate.A_log": "ssm_a",
        "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
        "self_attn.o_norm": "ssm_norm",
        **{f"hc_{part}_{end}": f"hc_{part}_{end}.weight" for part in ("attn", "ffn") for end in _HYPER},
        **{
            f"self_attn.indexer.index_kpool_compress_{end}": f"indexer_compressor_{end}.weight"
            for end in ("ape", "gate")
        },
    },
    "hy_v3": {
        **_LLAMA,
        **_MIXTURE,
        "mlp.router.gate": "ffn_gate_inp",
        "mlp.expert_bias": "exp_probs_b",
        **{f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    },
    "hy_v4": {
        **_DEEPSEEK,
        "self_attn.gate_proj": "attn_gate",
        "self_attn.learnable_sink_param": "attn_sinks.weight",
        **{
            f"hc_pre.hc_{part}_layer.hc_{end}": f"hc_{own}_{end}.weight"
            for part, own in (("attn", "attn"), ("mlp", "ffn"))
            for end in _HYPER
        },
    },
    "laguna": {
        **_LLAMA,
        **_MIXTURE,
        "self_attn.g_proj": "attn_gate",
        "mlp.experts.e_score_correction_bias": "exp_probs_b.bias",
    },
    "mimo2": {"self_attn.attention_sink_bias": "attn_sinks.weight"},
    "minimax-m3": {
        **_LLAMA,
        **_MIXTURE,
        **{f"self_attn.indexer.{part}": f"indexer.{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm")},
    },
    "muse-glimmer": {
        **_LLAMA,
        "self_attn.gate_proj": "attn_gate",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "nemotron_h_moe": {
        **{f"mixer.experts.{part}_proj": f"ffn_{part}_exps" for part in ("up", "down")},
        "mixer.fc1_latent_proj": "ffn_latent_down",
        "mixer.fc2_latent_proj": "ffn_latent_up",
    },
    "step35": {**_LLAMA, **_MIXTURE, "self_attn.g_proj": "attn_gate"},
}  # fmt: skip


class GgufNames:
    """The names of the tensors of an architecture. Raises KeyError for one that neither this table nor the installed
    package `gguf` has.
    """

    def __init__(self, architecture: str, layers: int) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        by_name = {name: each for each, name in MODEL_ARCH_NAMES.items()}
        self._own: Mapping[str, str] = _OWN.get(architecture, {})
        self._table: TensorNameMap | None = None
        if architecture in by_name:
            self._table = get_tensor_name_map(by_name[architecture], layers)
        elif not self._own:
            raise KeyError(architecture)

    def find(self, name: str, *, again: str) -> str | None:
        """The file's name of a tensor; None: the architecture has none. again: the name as the package has it."""
        layer = _LAYER.search(name)
        if layer is not None and (own := _in(self._own, layer[2])) is not None:
            return f"blk.{layer[1]}.{own}"
        if self._table is None:
            return _in(_ENDS, _BEGIN.sub("", name)) if layer is None else None
        again = again.replace("language_model.", "")
        others = (again.removeprefix(each) for each in ("model.", "transformer."))
        given = (again, *others, again.replace("model.", "backbone.", 1))
        return next((found for each in given if (found := self._table.get_name(each, (".weight", ".bias")))), None)


def _in(table: Mapping[str, str], name: str) -> str | None:
    """A tensor's name by a table of modules and of parameters."""
    if name in table:
        return table[name]
    module, _, kind = name.rpartition(".")
    return f"{table[module]}.{kind}" if module in table else None
