"""Compares random geometries of families with transformers + peft: `python -m tests.core.random_geometries NAME…`."""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.choice import open_executor
from chorus.core.model.program.native_decoder import why_unsupported
from chorus.core.model.read_config import read_model_config
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.perf.inline_reads import InlineReads

from ..conftest import quiet
from ..greedy import logprobs_of
from .tiny_families import ADAPTERS, SMALL_WEIGHTS, Tiny, load_peft, save_tiny

Fields = dict[str, Any]
COUNT = 6
"""Tokens of an answer."""
TOLERANCE = 2e-3
"""Differences of log-probabilities that are not found."""


def _square(rng: random.Random) -> Fields:
    """A residual stream as wide as all heads; as many heads of keys and values as of queries."""
    heads, head_dim = rng.choice((1, 2, 3, 4, 5, 6, 8, 12)), rng.choice((8, 12, 16, 20))
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": heads * head_dim}
    return {**_common(rng), **shape}


def _grouped(rng: random.Random) -> Fields:
    """Heads of any size, which share keys and values."""
    kv_heads, head_dim = rng.choice((1, 2, 3)), rng.choice((8, 12, 16, 24))
    return {
        **_common(rng),
        "num_attention_heads": kv_heads * rng.choice((1, 2, 3)),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": rng.choice((40, 48, 64, 72)),
        "attention_bias": rng.random() < 0.3,
    }


def _common(rng: random.Random) -> Fields:
    return {
        "vocab_size": rng.randint(150, 230),
        "num_hidden_layers": rng.randint(1, 4),
        "intermediate_size": rng.choice((40, 64, 80, 112)),
        "tie_word_embeddings": rng.random() < 0.5,
    }


def _bloom(rng: random.Random) -> Fields:
    return {**_square(rng), "layer_norm_epsilon": rng.choice((1e-6, 1e-5, 1e-2))}


def _mpt(rng: random.Random) -> Fields:
    own: Fields = {"clip_qkv": rng.choice((None, 0.4, 1.5)), "softmax_scale": rng.choice((None, 0.1, 0.4))}
    return {**_square(rng), "attn_config": own, "layer_norm_epsilon": rng.choice((1e-5, 1e-2))}


def _persimmon(rng: random.Random) -> Fields:
    return {
        **_square(rng),
        "qk_layernorm": rng.random() < 0.7,
        "partial_rotary_factor": rng.choice((0.5, 1.0)),
        "layer_norm_eps": rng.choice((1e-5, 1e-2)),
    }


def _types(rng: random.Random, count: int, kinds: tuple[str, ...]) -> list[str]:
    return [rng.choice(kinds) for _ in range(count)]


ATTENDS = ("full_attention", "sliding_attention")


def _compass(rng: random.Random) -> Fields:
    found = _square(rng)
    heads = found["num_attention_heads"]
    rope = {"rope_type": "default", "rope_theta": rng.choice((100.0, 10000.0)), "mrope_section": [2, 1, 1]}
    return {
        **found,
        "num_key_value_heads": rng.choice([each for each in (1, 2, 3, heads) if heads % each == 0]),
        "layer_types": _types(rng, found["num_hidden_layers"], ATTENDS),
        "sliding_window": rng.choice((5, 16, 40)),
        "logit_scale": rng.choice((None, 0.3)),
        "rope_parameters": {kind: rng.choice((None, rope)) for kind in ATTENDS},
    }


def _experts(rng: random.Random) -> Fields:
    count = rng.choice((4, 6, 8, 12))
    return {"num_experts": count, "num_experts_per_tok": rng.randint(1, count // 2), "moe_intermediate_size": 24}


def _laguna(rng: random.Random) -> Fields:
    found = {**_grouped(rng), **_experts(rng)}
    count = found["num_hidden_layers"]
    return {
        **found,
        "layer_types": _types(rng, count, ATTENDS),
        "mlp_layer_types": _types(rng, count, ("dense", "sparse")),
        "sliding_window": rng.choice((5, 16, 40)),
        "num_attention_heads_per_layer": [  # ADAPTERS are on the first layer
            found["num_attention_heads"],
            *(found["num_key_value_heads"] * rng.randint(1, 3) for _ in range(count - 1)),
        ],
        "gating": rng.choice((True, "per-head", "per-element")),
        "shared_expert_intermediate_size": rng.choice((16, 40)),
        "moe_routed_scaling_factor": rng.choice((1.0, 2.5)),
    }


def _aria(rng: random.Random) -> Fields:
    found = _grouped(rng)
    found["hidden_size"] = found["num_attention_heads"] * rng.choice((8, 16, 20))
    own = _experts(rng)
    experts = {"moe_num_experts": own["num_experts"], "moe_topk": own["num_experts_per_tok"]}
    return {**found, **experts, "moe_num_shared_experts": rng.randint(1, 3), "intermediate_size": rng.choice((24, 40))}


def _latent(rng: random.Random) -> Fields:
    heads = rng.choice((1, 2, 3, 4))
    count = rng.choice((4, 8, 12))
    groups = rng.choice((2, 4) if count > 4 else (2,))  # a group has at least two experts
    return {
        **_common(rng),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": rng.choice((40, 48, 64)),
        "q_lora_rank": rng.choice((16, 24)),
        "kv_lora_rank": rng.choice((16, 32, 40)),
        "qk_nope_head_dim": rng.choice((8, 16)),
        "qk_rope_head_dim": rng.choice((4, 8)),
        "v_head_dim": rng.choice((8, 16, 24)),
        "n_routed_experts": count,
        "num_experts_per_tok": rng.randint(1, count // groups // 2 or 1),
        "n_group": groups,
        "topk_group": rng.randint(1, groups - 1),
        "moe_intermediate_size": 24,
        "n_shared_experts": rng.randint(1, 2),
        "routed_scaling_factor": rng.choice((1.0, 2.5)),
        "attention_bias": rng.random() < 0.3,
    }


def _ax(rng: random.Random) -> Fields:
    found = _latent(rng)
    return {**found, "mlp_layer_types": _types(rng, found["num_hidden_layers"], ("dense", "sparse", "sparse"))}


def _longcat(rng: random.Random) -> Fields:
    found, count, idle = _latent(rng), rng.choice((2, 3, 6, 8)), rng.choice((0, 1, 2, 4))
    return {
        **found,
        "num_hidden_layers": 2 * rng.randint(1, 3),
        "head_dim": found["qk_rope_head_dim"],
        "n_routed_experts": count,
        "zero_expert_num": idle,
        "num_experts_per_tok": rng.randint(2, count + idle),
        "moe_intermediate_size": rng.choice((16, 24)),
        "n_group": None,
        "topk_group": None,
        "hidden_act": rng.choice(("silu", "gelu_pytorch_tanh")),
    }


def _indexer(rng: random.Random) -> Fields:
    found = _ax(rng)
    return {
        **found,
        "index_topk": rng.choice((3, 8, 17, 60)),
        "index_head_dim": rng.choice((8, 12, 16, 24)),
        "index_n_heads": rng.choice((6, 9, 12)),
        "mlp_layer_types": _types(rng, found["num_hidden_layers"], ("dense", "sparse")),
    }


def _glm_5(rng: random.Random) -> Fields:
    found = _indexer(rng)
    count = found["num_hidden_layers"] = rng.randint(1, 5)
    schedules: list[Fields] = [
        {"indexer_types": ["full", *_types(rng, count - 1, ("full", "shared"))]},
        {"index_topk_pattern": "F" + "".join(_types(rng, count - 1, ("F", "S", "S")))},
        {"index_topk_freq": rng.randint(1, 3), "index_skip_topk_offset": rng.randint(1, 3)},
    ]
    return {
        **found,
        "indexer_types": None,
        **rng.choice(schedules),
        "mlp_layer_types": _types(rng, count, ("dense", "sparse")),
    }


def _ax_2(rng: random.Random) -> Fields:
    found = _indexer(rng)
    groups = rng.random() < 0.5
    return {
        **found,
        "n_group": found["n_group"] if groups else None,
        "topk_group": found["topk_group"] if groups else None,
        "gated_norm_rank": rng.choice((1, 3, 4, 8, 16)),
    }


def _dots_3(rng: random.Random) -> Fields:
    found = _indexer(rng)
    count = found["num_hidden_layers"] = rng.randint(1, 4)
    heads, key, rotated = rng.choice((1, 2, 3)), rng.choice((8, 12, 16)), rng.choice((4, 8, 16))
    whole = rng.choice(("indexed_attention", "indexed_attention", "full_attention"))
    return {
        **found,
        "index_head_dim": max(found["index_head_dim"], found["qk_rope_head_dim"]),
        "layer_types": _types(rng, count, (whole, "sliding_attention")),
        "use_dsa": whole == "indexed_attention",
        "mlp_layer_types": _types(rng, count, ("dense", "sparse")),
        "shared_experts_intermediate_size": rng.choice((16, 40)),
        "sliding_window": rng.choice((5, 16, 40)),
        "head_dim": 4 * found["qk_rope_head_dim"],
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": heads,
        "swa_q_lora_rank": rng.choice((8, 16, 24)),
        "swa_kv_lora_rank": rng.choice((16, 24, 40)),
        "swa_qk_nope_head_dim": key,
        "swa_head_dim": key + rotated,
        "swa_v_head_dim": rng.choice((8, 16, 24)),
        "initializer_range": 0.1,
    }


def _minimax_3(rng: random.Random) -> Fields:
    found, own, head_dim = _grouped(rng), _experts(rng), rng.choice((12, 16, 24, 32))
    count, top = found["num_hidden_layers"], rng.choice((1, 2, 3, 5))
    return {
        **found,
        "head_dim": head_dim,
        "partial_rotary_factor": 0.5 if head_dim % 8 else rng.choice((0.25, 0.5, 0.5)),  # of 12 elements 3 would rotate
        "layer_types": _types(rng, count, ("full_attention", "minimax_m3_sparse", "minimax_m3_sparse")),
        "mlp_layer_types": _types(rng, count, ("dense", "sparse")),
        "num_local_experts": own["num_experts"],
        "num_experts_per_tok": own["num_experts_per_tok"],
        "intermediate_size": own["moe_intermediate_size"],
        "dense_intermediate_size": rng.choice((40, 64)),
        "shared_intermediate_size": rng.choice((16, 40)),
        "routed_scaling_factor": rng.choice((1.0, 1.5)),
        "swiglu_limit": rng.choice((0.5, 7.0)),
        "index_n_heads": found["num_key_value_heads"],
        "index_head_dim": rng.choice((16, 18, 24)),
        "index_block_size": rng.choice((1, 3, 4, 8, 16)),
        "index_topk_blocks": top,
        "index_local_blocks": min(top, rng.choice((0, 1, 1, 2))),
        "initializer_range": 0.1,
    }


def _hy_v4(rng: random.Random) -> Fields:
    found = _indexer(rng)
    count = found["num_hidden_layers"] = rng.randint(1, 4)
    return {
        **found,
        "indexer_types": rng.choice((None, ["full", *_types(rng, count - 1, ("full", "shared"))])),
        "mlp_layer_types": _types(rng, count, ("dense", "sparse")),
        "hc_mult": rng.randint(1, 5),
        "hc_magnitude": rng.choice((0.7, 2.0)),
        "hc_eps": rng.choice((1e-6, 0.05)),
        "swiglu_limit": rng.choice((0.3, 1.0, 10.0)),
        "rms_norm_eps": rng.choice((1e-5, 0.01)),
    }


def _glm_next(rng: random.Random) -> Fields:
    found = _indexer(rng)
    pool, count = rng.choice((1, 2, 4, 5)), rng.randint(2, 5)
    types = [
        "linear_attention",
        "indexed_attention",
        *_types(rng, count - 2, ("linear_attention", "indexed_attention")),
    ]
    rng.shuffle(types)
    kinds = _types(rng, count, ("full", "shared"))
    for at, kind in enumerate(types):
        is_behind = at and types[at - 1] == kind and kinds[at - 1] == "full"
        kinds[at] = kinds[at] if is_behind or kind == "linear_attention" else "full"
    return {
        **found,
        "num_hidden_layers": count,
        "layer_types": types,
        "indexer_types": kinds,
        "mlp_layer_types": _types(rng, count, ("dense", "sparse")),
        "qk_rope_head_dim": 0,
        "kv_lora_rank": rng.choice((32, 40)),  # a page takes parts of states
        "index_kpool": pool,
        "index_topk": pool * rng.choice((1, 3, 8, 20)),
        "linear_head_dim": rng.choice((8, 16)),
        "linear_num_heads": rng.choice((1, 2, 4)),
        "linear_conv_kernel_dim": rng.choice((2, 3, 4)),
        "linear_lower_bound": rng.choice((None, -5.0, -0.5)),
        "hc_mult": rng.randint(1, 5),
        "hc_sinkhorn_iters": rng.choice((1, 2, 20)),
        "hc_eps": rng.choice((1e-6, 0.05)),
        "swiglu_limit": rng.choice((0.3, 1.0, 10.0)),
        "rms_norm_eps": rng.choice((1e-5, 0.01)),
    }


def _lara(rng: random.Random) -> Fields:
    found = {**_grouped(rng), **_experts(rng)}
    count = found["num_hidden_layers"] = rng.randint(2, 4)
    k_heads = rng.choice((1, 2))
    types = ["full_attention", *_types(rng, count - 1, (*ATTENDS, "linear_attention"))]
    rng.shuffle(types)
    return {
        **found,
        "layer_types": types,
        "sliding_window": rng.choice((5, 16, 40)),
        "linear_num_key_heads": k_heads,
        "linear_num_value_heads": k_heads * rng.choice((1, 2)),
        "linear_key_head_dim": rng.choice((8, 16)),
        "linear_value_head_dim": rng.choice((8, 16)),
        "shared_expert_intermediate_size": rng.choice((16, 40)),
        "norm_topk_prob": rng.random() < 0.5,
    }


def _vision(rng: random.Random) -> Fields:
    found = _square(rng)
    heads, count = found["num_attention_heads"], rng.randint(2, 5)
    skipped = sorted(rng.sample(range(count), rng.randint(0, count - 1)))
    return {
        **found,
        "num_hidden_layers": count,
        "cross_attention_layers": skipped,
        "num_key_value_heads": rng.choice([each for each in (1, 2, 3, heads) if heads % each == 0]),
        "tie_word_embeddings": False,
    }


def _apertus(rng: random.Random) -> Fields:
    found = _square(rng)
    further = rng.randint(0, 30)
    return {
        **found,
        "output_vocab_size": found["vocab_size"],
        "vocab_size": found["vocab_size"] + further,
        "tie_word_embeddings": not further and found["tie_word_embeddings"],
    }


def _japanese(rng: random.Random) -> Fields:
    return {**_square(rng), "rotary_pct": rng.choice((0.5, 1.0)), "intermediate_multiple_size": rng.choice((1, 2, 4))}


def _emu(rng: random.Random) -> Fields:
    found = _square(rng)
    heads = found["num_attention_heads"]
    return {**found, "num_key_value_heads": rng.choice([each for each in (1, 2, 3, heads) if heads % each == 0])}


def _mamba_2(rng: random.Random) -> Fields:
    groups, head_dim, expand = rng.choice((1, 2, 3)), rng.choice((4, 8, 12, 16)), rng.choice((1, 2, 3))
    heads = groups * rng.choice((1, 2, 3, 4)) * expand
    return {
        **_common(rng),
        "num_heads": heads,
        "head_dim": head_dim,
        "hidden_size": heads * head_dim // expand,
        "expand": expand,
        "n_groups": groups,
        "state_size": rng.choice((4, 8, 16, 24, 40)),
        "conv_kernel": rng.choice((2, 3, 4)),
        "use_bias": rng.random() < 0.5,
        "use_conv_bias": rng.random() < 0.5,
        "layer_norm_epsilon": rng.choice((1e-6, 1e-5, 1e-2)),
    }


def _recurrent_gemma(rng: random.Random) -> Fields:
    found = _square(rng)
    heads = found["num_attention_heads"]
    types = rng.choice((["recurrent", "recurrent", "attention"], ["attention", "recurrent"]))
    return {
        **found,
        "num_hidden_layers": max(found["num_hidden_layers"], len(types)),  # transformers counts tokens by attention
        "num_key_value_heads": rng.choice([each for each in (1, 2, 3, heads) if heads % each == 0]),
        "lru_width": heads * rng.choice((8, 12, 16, 20, 24)),
        "block_types": types,
        "attention_window_size": rng.choice((5, 16, 40)),
        "attention_bias": rng.random() < 0.3,
        "conv1d_width": rng.choice((2, 3, 4)),
        "logits_soft_cap": rng.choice((30.0, 300.0)),  # near the cap, all logits are alike
        "w_init_variance_scale": 0.1,
    }


def _mamba_1(rng: random.Random) -> Fields:
    return {
        **_common(rng),
        "hidden_size": rng.choice((40, 48, 64)),
        "intermediate_size": rng.choice((48, 64, 80, 96, 130)),
        "state_size": rng.choice((4, 8, 16, 24)),
        "time_step_rank": rng.choice(("auto", 2, 6, 10)),
        "conv_kernel": rng.choice((2, 3, 4)),
        "use_bias": rng.random() < 0.5,
        "use_conv_bias": rng.random() < 0.5,
        "layer_norm_epsilon": rng.choice((1e-6, 1e-5, 1e-2)),
    }


def _falcon_mamba(rng: random.Random) -> Fields:
    return {**_mamba_1(rng), "mixer_rms_eps": rng.choice((1e-6, 1e-3))}


def _jamba(rng: random.Random) -> Fields:
    found = _square(rng)
    heads, period, every = found["num_attention_heads"], rng.choice((2, 3)), rng.choice((1, 2))
    return {
        **found,
        "num_key_value_heads": rng.choice([each for each in (1, 2, 3, heads) if heads % each == 0]),
        "num_hidden_layers": max(found["num_hidden_layers"], period),  # so that one layer attends
        "attn_layer_period": period,
        "attn_layer_offset": rng.randrange(period),
        "expert_layer_period": every,
        "expert_layer_offset": rng.randrange(every),
        "num_experts": rng.choice((1, 4, 6)),
        "num_experts_per_tok": rng.choice((1, 2)),
        "mamba_expand": rng.choice((1, 2)),
        "mamba_d_state": rng.choice((4, 8, 16)),
        "mamba_dt_rank": rng.choice(("auto", 2, 6)),
        "mamba_d_conv": rng.choice((2, 3, 4)),
        "mamba_conv_bias": rng.random() < 0.5,
        "mamba_proj_bias": rng.random() < 0.5,
    }


def _zamba(rng: random.Random) -> Fields:
    found = _zamba_2(rng)
    while found["layers_block_type"].count("hybrid") < 2:  # transformers fails to tie one block to no other
        found = _zamba_2(rng)
    del found["mamba_ngroups"]
    for name in ("use_shared_attention_adapter", "adapter_rank", "use_mem_rope", "add_bias_linear", "num_mem_blocks"):
        del found[name]
    return {
        **found,
        "mamba_dt_rank": rng.choice(("auto", 2, 6)),
        "mamba_conv_bias": rng.random() < 0.5,
        "mamba_proj_bias": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.5,
    }


def _zamba_2(rng: random.Random) -> Fields:
    heads, mamba_heads, groups = rng.choice((1, 2, 3, 4, 6)), rng.choice((1, 2, 4)), rng.choice((1, 2))
    count, has_pairs = rng.choice((2, 3, 5, 6)), rng.random() < 0.5
    types = [rng.choice(("linear_attention", "hybrid")) for _ in range(count - 1)]
    fewer = [each for each in (1, 2, 3, heads) if heads % each == 0]
    return {
        **_common(rng),
        "num_hidden_layers": count,
        "layers_block_type": [*types, "hybrid"] if rng.random() < 0.5 else ["hybrid", *types],
        "hidden_size": heads * rng.choice((4, 8, 12)) * (8 if heads == 1 else 4 if heads < 4 else 2),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if has_pairs else rng.choice(fewer),
        "n_mamba_heads": mamba_heads * groups,
        "mamba_ngroups": groups,
        "mamba_expand": rng.choice((1, 2)),
        "mamba_d_state": rng.choice((4, 8, 16)),
        "mamba_d_conv": rng.choice((2, 3, 4)),
        "num_mem_blocks": rng.choice((1, 2, 3)),
        "use_shared_attention_adapter": has_pairs,
        "adapter_rank": rng.choice((2, 6, 10, 16)),
        "use_mem_rope": rng.random() < 0.5,
        "add_bias_linear": rng.random() < 0.5,
        "hidden_act": rng.choice(("gelu", "silu", "gelu_pytorch_tanh")),
        "tie_word_embeddings": True,  # by which transformers ties blocks, too
        **SMALL_WEIGHTS,
    }


def _nemotron(rng: random.Random) -> Fields:
    found, own, groups = _grouped(rng), _experts(rng), rng.choice((1, 2))
    pattern = ["M", "E", "*", *rng.choices("ME*-", k=rng.randint(0, 3))]
    rng.shuffle(pattern)
    parts = rng.choice((1, 2))
    return {
        **found,
        "hybrid_override_pattern": "".join(pattern),
        "head_dim": rng.choice((16, 24)),  # a page takes parts of states
        "mamba_num_heads": groups * rng.choice((1, 2, 4)),
        "mamba_head_dim": rng.choice((8, 12, 16)),
        "n_groups": groups,
        "ssm_state_size": rng.choice((4, 8, 16)),
        "conv_kernel": rng.choice((2, 3, 4)),
        "use_conv_bias": rng.random() < 0.5,
        "use_bias": rng.random() < 0.5,
        "attention_bias": False,
        "n_routed_experts": own["num_experts"],
        "num_experts_per_tok": own["num_experts_per_tok"] // parts or 1,
        "n_group": parts,
        "topk_group": 1,
        "moe_intermediate_size": own["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": rng.choice((16, 40)),
        "moe_latent_size": rng.choice((None, 16, 24, 40)),
        "mlp_hidden_act": rng.choice(("relu2", "gelu_pytorch_tanh")),
        "norm_topk_prob": rng.random() < 0.7,
        "routed_scaling_factor": rng.choice((1.0, 2.5)),
        "time_step_min": rng.choice((0.001, 0.3)),
        "layer_norm_epsilon": rng.choice((1e-6, 1e-5, 1e-2)),
    }


def _mimo(rng: random.Random) -> Fields:
    found, own, head_dim = _grouped(rng), _experts(rng), rng.choice((12, 16, 24, 32))
    count = found["num_hidden_layers"]
    return {
        **found,
        "num_attention_heads": 2 * found["num_key_value_heads"] * rng.choice((1, 2, 3)),
        "head_dim": head_dim,
        "v_head_dim": rng.choice((4, 8, 10, head_dim)),
        "layer_types": ["sliding_attention", *_types(rng, count - 1, ATTENDS)],  # ADAPTERS are on these layers
        "mlp_layer_types": _types(rng, count, ("dense", "sparse")),
        "sliding_window": rng.choice((5, 16, 40)),
        "n_routed_experts": own["num_experts"],
        "num_experts_per_tok": own["num_experts_per_tok"],
        "moe_intermediate_size": own["moe_intermediate_size"],
        "attention_value_scale": rng.choice((None, 0.707, 2.0)),
        "norm_topk_prob": rng.random() < 0.5,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": rng.choice((100.0, 10000.0)), "partial_rotary_factor": 0.5}
            for kind in ATTENDS
        },
    }


def _step(rng: random.Random) -> Fields:
    found, own = _grouped(rng), _experts(rng)
    count, kv_heads = found["num_hidden_layers"], found["num_key_value_heads"]
    return {
        **found,
        "head_dim": rng.choice((8, 16, 24)),
        "layer_types": ["full_attention", *_types(rng, count - 1, ATTENDS)],  # ADAPTERS are on these layers
        "mlp_layer_types": _types(rng, count, ("dense", "sparse", "sparse")),
        "num_sliding_attention_heads": kv_heads * rng.choice((1, 2, 3)),
        "sliding_window": rng.choice((5, 16, 40)),
        "n_routed_experts": own["num_experts"],
        "num_experts_per_tok": own["num_experts_per_tok"],
        "moe_intermediate_size": own["moe_intermediate_size"],
        "share_expert_dim": rng.choice((16, 40)),
        "moe_router_scaling_factor": rng.choice((1.0, 2.5)),
        "attention_bias": rng.random() < 0.3,
        **{
            f"swiglu_limits{end}": [rng.choice((None, 0.0, 0.3, 0.7)) for _ in range(count)]
            for end in ("", "_shared")
        },
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": rng.choice((100.0, 10000.0)), "partial_rotary_factor": share}
            for kind, share in zip(ATTENDS, (0.5, 1.0), strict=True)
        },
    }  # fmt: skip


def _ling(rng: random.Random) -> Fields:
    found = _ax(rng)
    count = found["num_hidden_layers"] = max(2, found["num_hidden_layers"])
    return {
        **{name: value for name, value in found.items() if name not in ("n_routed_experts", "q_lora_rank")},
        "num_experts": found["n_routed_experts"],
        "q_lora_rank": 24 if found["attention_bias"] else rng.choice((None, 16)),
        "head_dim": rng.choice((8, 12, 16)),
        "kv_lora_rank": rng.choice((32, 40)),  # a page takes parts of states
        "layer_types": [
            "linear_attention",
            *_types(rng, count - 2, ("linear_attention", "full_attention")),
            "full_attention",  # one layer attends
        ],
        "mlp_layer_types": _types(rng, count, ("dense", "sparse", "sparse")),
        "short_conv_kernel_size": rng.choice((2, 3, 4)),
        "kda_safe_gate": rng.random() < 0.7,
        "kda_lower_bound": rng.choice((-5.0, -1.0)),
        "tie_word_embeddings": False,
        "norm_topk_prob": rng.random() < 0.5,
    }


def _muse(rng: random.Random) -> Fields:
    found, own = _grouped(rng), _experts(rng)
    count = found["num_hidden_layers"]
    heads = rng.choice((2, 4, 8))
    return {
        **found,
        "hidden_size": 64,  # the towers give as many elements
        "tie_word_embeddings": False,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([each for each in (1, 2, 4) if heads % each == 0]),
        "layer_types": _types(rng, count, ATTENDS),
        "layer_rope_theta": [rng.choice((0, 500000.0)) for _ in range(count)],
        "mlp_layer_types": _types(rng, count, ("dense", "sparse", "sparse")),
        "sliding_window": rng.choice((5, 16, 40)),
        "num_local_experts": own["num_experts"],
        "num_experts_per_tok": own["num_experts_per_tok"],
        "moe_intermediate_size": own["moe_intermediate_size"],
        "moe_hidden_size": rng.choice((16, 24, 40)),
        "routed_scaling_factor": rng.choice((1.0, 2.5)),
        "residual_gate_temperature": rng.choice((0.1, 0.3, 1.0)),
        "initializer_range": 0.1,
    }


def _bitnet(rng: random.Random) -> Fields:
    found = _square(rng)
    heads = found["num_attention_heads"]
    return {
        **found,
        "num_key_value_heads": rng.choice([each for each in (1, 2, 3, heads) if heads % each == 0]),
        "attention_bias": rng.random() < 0.3,
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-2)),
    }


def _dbrx(rng: random.Random) -> Fields:
    found, own = _square(rng), _experts(rng)
    heads = found["num_attention_heads"]
    kv_heads = rng.choice([each for each in (1, 2, 3, heads) if heads % each == 0])
    return {
        **found,
        "d_model": found["hidden_size"],
        "tie_word_embeddings": False,
        "attn_config": {"kv_n_heads": kv_heads, "clip_qkv": rng.choice((0.4, 1.5, 9.0)), "rope_theta": 10000.0},
        "ffn_config": {
            "moe_num_experts": own["num_experts"],
            "moe_top_k": own["num_experts_per_tok"],
            "ffn_hidden_size": rng.choice((16, 24, 40)),
            "moe_normalize_expert_weights": rng.choice((None, 1.0)),
        },
    }


def _jetmoe(rng: random.Random) -> Fields:
    own = _experts(rng)
    return {
        **_common(rng),
        "hidden_size": rng.choice((40, 48, 64)),
        "intermediate_size": rng.choice((16, 24, 40)),
        "num_key_value_heads": rng.choice((1, 2, 3, 4)),
        "kv_channels": rng.choice((8, 12, 16, 24)),
        "num_local_experts": own["num_experts"],
        "num_experts_per_tok": own["num_experts_per_tok"],
        "activation_function": rng.choice(("silu", "gelu_pytorch_tanh")),
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-2)),
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice((100.0, 10000.0))},
    }


def _qwen4_exp(rng: random.Random) -> Fields:
    found, layers = _grouped(rng), rng.randint(2, 4)
    head_dim, size, ratio = 16, rng.choice((2, 3, 4)), rng.choice((2, 3, 5))
    types = [rng.choice(("linear_attention", "indexed_attention")) for _ in range(layers - 1)]
    types.insert(rng.randrange(layers), "linear_attention")
    linear = [at + 1 for at, kind in enumerate(types) if kind == "linear_attention"]
    heads, key_heads = (size - 1) * (per := rng.choice((1, 2))), rng.choice((1, 2))
    return {
        **found,
        "intermediate_size": None,
        "num_hidden_layers": layers,
        "layer_types": types,
        "head_dim": head_dim,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * rng.choice((1, 2)),
        "linear_key_head_dim": rng.choice((8, 16)),
        "linear_value_head_dim": rng.choice((8, 12)),
        "linear_conv_kernel_dim": rng.choice((2, 4)),
        "num_experts": rng.choice((3, 8)),
        "num_experts_per_tok": rng.choice((1, 2)),
        "hc_count": 2,
        "hc_lowrank": rng.choice((6, 12)),
        "ple_layer_ids": sorted(rng.sample(linear, rng.randint(0, len(linear)))),
        "ple_embed_dim": heads * rng.choice((4, 6)),
        "ple_conv_kernel_size": 2,  # pages have room for its states
        "ngram_size": size,
        "heads_per_ngram": per,
        "ngram_vocab_size_base": rng.choice((7, 60)),
        "split_ngram_parts": rng.choice((1, 2, 4)),
        "seed": rng.choice((0, 77)),
        "indexer_n_heads": rng.choice((6, 8)),  # of few, many scores are 0, and transformers takes any of equal ones
        "indexer_head_dim": rng.choice((16, 24)),
        "indexer_budget": ratio * rng.choice((1, 3, 6)),
        "indexer_compress_ratio": ratio,
        "norm_topk_prob": rng.choice((True, False)),
        "output_gate_type": rng.choice((None, "sigmoid")),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rng.choice((100.0, 10000.0)),
            "partial_rotary_factor": rng.choice((0.5, 1.0)),
        },
    }


def _zaya(rng: random.Random) -> Fields:
    found = _grouped(rng)
    layers = rng.randint(1, 4)
    sizes = rng.choice(((1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 4), (4, 3)))
    return {
        **found,
        "num_hidden_layers": layers,
        "head_dim": rng.choice((8, 12, 16)),
        "layer_types": rng.choices(("hybrid", "hybrid_sliding"), k=layers),
        "sliding_window": rng.choice((5, 16, 33)),
        "cca_time0": sizes[0],
        "cca_time1": sizes[1],
        "num_experts": rng.choice((1, 2, 5, 8)),
        "moe_intermediate_size": rng.choice((16, 24)),
        "router_hidden_size": rng.choice((8, 12, 20)),
        "attention_bias": False,
        "lm_head_bias": rng.choice((True, False)),
        "hidden_act": rng.choice(("silu", "gelu_pytorch_tanh")),
        "rope_parameters": {
            kind: {
                "rope_type": "default",
                "rope_theta": rng.choice((100.0, 10000.0)),
                "partial_rotary_factor": rng.choice((0.5, 1.0)),
            }
            for kind in ("hybrid", "hybrid_sliding")
        },
    }


def _diffllama(rng: random.Random) -> Fields:
    found = _grouped(rng)
    kv_heads = found["num_key_value_heads"] * 2
    heads = kv_heads * rng.choice((1, 2, 3))
    return {
        **found,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "lambda_std_dev": rng.choice((0.1, 0.3)),
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-2)),
    }


def _openai(rng: random.Random) -> Fields:
    found = _square(rng)
    own = {
        "n_embd": found["hidden_size"],
        "n_head": found["num_attention_heads"],
        "n_layer": found["num_hidden_layers"],
    }
    return {**found, **own, "afn": rng.choice(("gelu", "relu")), "layer_norm_epsilon": rng.choice((1e-5, 1e-2))}


def _wide_heads(rng: random.Random) -> Fields:
    """Heads of keys that are wide enough for a page to have room for a layer's convolutions."""
    kv_heads, head_dim = rng.choice(((1, 24), (2, 16), (3, 12), (2, 24)))
    heads = {"num_attention_heads": kv_heads * rng.choice((1, 2, 3)), "num_key_value_heads": kv_heads}
    return {**heads, "head_dim": head_dim}


def _inkling(rng: random.Random) -> Fields:
    found, own, same = _common(rng), _experts(rng), rng.random() < 0.3
    del found["tie_word_embeddings"]
    full = _wide_heads(rng)
    windows = {f"swa_{name}": value for name, value in (full if same else _wide_heads(rng)).items()}
    layers = found["num_hidden_layers"]
    return {
        **found,
        **full,
        **windows,
        "hidden_size": rng.choice((40, 48, 64)),
        "layer_types": [rng.choice(("hybrid", "hybrid_sliding")) for _ in range(layers)],
        "mlp_layer_types": [rng.choice(("sparse", "sparse", "dense")) for _ in range(layers)],
        "sliding_window_size": rng.choice((4, 9, 20, 200)),
        "d_rel": rng.choice((1, 4, 6)),
        "rel_extent": rng.choice((1, 7, 30, 300)),
        "log_scaling_n_floor": rng.choice((None, 1, 12, 1000)),
        "log_scaling_alpha": rng.choice((0.1, 0.7)),
        "conv_kernel_size": rng.choice((2, 3, 4)),
        "n_routed_experts": own["num_experts"],
        "num_experts_per_tok": own["num_experts_per_tok"],
        "n_shared_experts": rng.choice((1, 2, 3)),
        "moe_intermediate_size": rng.choice((16, 24, 40)),
        "route_scale": rng.choice((1.0, 2.5)),
        "hidden_act": rng.choice(("silu", "gelu_pytorch_tanh")),
        "unpadded_vocab_size": rng.choice((None, found["vocab_size"], max(150, found["vocab_size"] - 7))),
        "logits_mup_width_multiplier": rng.choice((1.0, 3.0)),
        "rms_norm_eps": rng.choice((1e-6, 1e-2)),
    }


DRAWS: Mapping[str, Callable[[random.Random], Fields]] = {
    "bloom": _bloom,
    "mpt": _mpt,
    "persimmon": _persimmon,
    "gpt-neox-japanese": _japanese,
    "emu-3": _emu,
    "cohere-compass": _compass,
    "apertus-1.5": _apertus,
    "llama-3.2-vision": _vision,
    "laguna": _laguna,
    "aria": _aria,
    "ax-k1": _ax,
    "mistral-4": _latent,
    "deepseek-v3.2": _indexer,
    "glm-5": _glm_5,
    "ax-k2": _ax_2,
    "longcat-flash": _longcat,
    "dots-3-note": _dots_3,
    "minimax-m3": _minimax_3,
    "hy-v4": _hy_v4,
    "glm-5.3-flash": _glm_next,
    "lara-mini": _lara,
    "mamba-2": _mamba_2,
    "mamba-1": _mamba_1,
    "falcon-mamba": _falcon_mamba,
    "jamba": _jamba,
    "zamba": _zamba,
    "zamba-2": _zamba_2,
    "nemotron-3-super": _nemotron,
    "recurrent-gemma": _recurrent_gemma,
    "mimo-v2-flash": _mimo,
    "step-3.7": _step,
    "ling-2.6": _ling,
    "muse-spark": _muse,
    "bitnet": _bitnet,
    "dbrx": _dbrx,
    "jetmoe": _jetmoe,
    "zaya": _zaya,
    "qwen4-exp": _qwen4_exp,
    "inkling": _inkling,
    "diffllama": _diffllama,
    "openai-gpt": _openai,
}
"""A tiny family → fields of its configuration, at random."""


def check(name: str, changes: Fields, root: Path, rng: random.Random) -> Iterator[str]:
    """Serve a geometry, with and without adapters, in mixed steps of chunks; yields what differs."""
    with quiet():
        save_tiny(name, root, changes)
    it = Tiny(root / "model", {adapter: root / adapter for adapter in ADAPTERS}, load_peft)
    adapter = rng.choice([*ADAPTERS])
    cases = {
        f"{each} {length}": (each, *it.case(each, length, rng.randrange(1 << 30), COUNT))
        for each, length in ((None, 5), (adapter, 31), (adapter, 2), (None, 44))
    }
    scores = {key: logprobs_of(it.use(of), prompt, want) for key, (of, prompt, want) in cases.items()}
    config = read_model_config(root / "model")
    native = ["native"] if why_unsupported(config, torch.float32) is None else []
    for kernels in (*native, "torch"):
        settings = EngineConfig(
            model=root / "model", dtype="float32", memory_bytes=8 << 20, threads=1, device="cpu", cpu_kernels=kernels,
            block_tokens=32, max_num_batched_tokens=rng.choice((7, 19, 64)), max_model_len=96, max_num_seqs=4,
        )  # fmt: skip
        engine = Engine(settings, open_executor(settings), reads=InlineReads())
        engine.store.register(adapter, root / adapter)
        found: dict[str, list[int]] = {key: [] for key in cases}
        logprobs: dict[str, list[float]] = {key: [] for key in cases}
        for key, (of, prompt, want) in cases.items():
            params = RequestParams(temperature=0.0, ignore_eos=True, max_tokens=len(want), logprobs=0)
            engine.add_request(Request(key, prompt, params, of))
        while engine.has_work():
            for output in engine.step():
                found[output.request_id] += output.token_ids
                logprobs[output.request_id] += [each.logprob for each in output.logprobs]
        engine.close()
        for key, (_, _, want) in cases.items():
            if found[key] != want:
                yield f"{kernels}, {key}: {found[key]}, and transformers {want}"
            elif any(abs(here - there) > TOLERANCE for here, there in zip(logprobs[key], scores[key], strict=True)):
                yield f"{kernels}, {key}: log-probabilities {logprobs[key]}, and transformers' {scores[key]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*DRAWS], metavar="NAME", help=", ".join(DRAWS))
    parser.add_argument("--count", type=int, default=50, help="geometries of each")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name in arguments.names:
        rng, faults = random.Random(f"{name} {arguments.seed}"), 0
        for number in range(arguments.count):
            changes, root = DRAWS[name](rng), Path(tempfile.mkdtemp(prefix="geometry"))
            for fault in check(name, changes, root, rng):
                faults += 1
                print(f"{name} {number}: {fault}\n  {changes}", flush=True)
            shutil.rmtree(root)
        print(f"{name}: {arguments.count} geometries, {faults} faults", flush=True)


if __name__ == "__main__":
    main()
