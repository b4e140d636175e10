"""Recurrent mixers as published configurations have them, what they can't be, and the shares of ranks."""

from __future__ import annotations

import json

import pytest
import torch

from chorus.core.model.families.recurrent_gemma.rg_lru import RgLruSpec
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.norms import NormSpec
from chorus.core.model.specs.recurrent import MambaSpec, ShortConvSpec
from chorus.core.model.specs.selective_scan import SelectiveScanSpec
from chorus.core.model.weights.narrow_bytes import kept_bytes
from chorus.core.model.weights.shard import Shard
from chorus.core.model.weights.tensor_parts import parts_of, sources, tensor_shapes

pytestmark = pytest.mark.wide

LFM2_1_2B = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}
MAMBA_CODESTRAL = {
    "architectures": ["Mamba2ForCausalLM"],
    "bos_token_id": 0,
    "chunk_size": 256,
    "conv_kernel": 4,
    "eos_token_id": 0,
    "expand": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "layer_norm_epsilon": 1e-05,
    "model_type": "mamba2",
    "n_groups": 8,
    "norm_before_gate": True,
    "num_heads": 128,
    "num_hidden_layers": 64,
    "residual_in_fp32": True,
    "rms_norm": True,
    "state_size": 128,
    "tie_word_embeddings": False,
    "time_step_limit": [0.0, float("inf")],
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 32768,
}
RECURRENT_GEMMA_2B = {
    "architectures": ["RecurrentGemmaForCausalLM"],
    "attention_bias": False,
    "attention_window_size": 2048,
    "block_types": ["recurrent", "recurrent", "attention"],
    "bos_token_id": 2,
    "conv1d_width": 4,
    "eos_token_id": 1,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2560,
    "intermediate_size": 15360,
    "logits_soft_cap": 30.0,
    "lru_width": 2560,
    "model_type": "recurrent_gemma",
    "num_attention_heads": 10,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
FALCON_MAMBA_7B = {
    "architectures": ["FalconMambaForCausalLM"],
    "bos_token_id": 0,
    "conv_kernel": 4,
    "eos_token_id": 11,
    "expand": 16,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "layer_norm_epsilon": 1e-05,
    "mixer_rms_eps": 1e-06,
    "model_type": "falcon_mamba",
    "num_hidden_layers": 64,
    "residual_in_fp32": True,
    "state_size": 16,
    "tie_word_embeddings": False,
    "time_step_rank": 256,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 65024,
}
JAMBA = {
    "architectures": ["JambaForCausalLM"],
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "model_type": "jamba",
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}
ATTENTION_OF_GRANITE = (5, 15, 25, 35)
GRANITE_4_H_TINY = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "bos_token_id": 100257,
    "embedding_multiplier": 12,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 512,
    "layer_types": ["attention" if index in ATTENTION_OF_GRANITE else "mamba" for index in range(40)],
    "logits_scaling": 6,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 100352,
}
MAMBA = MambaSpec(48, 64, 1, 128, eps=1e-5)


@pytest.fixture
def read(tmp_path):
    """`read(raw, field=value, …)`: a configuration with changes."""

    def make(raw, **changes):
        (tmp_path / "config.json").write_text(json.dumps({**raw, **changes}))
        return read_model_config(tmp_path)

    return make


def billions(config):
    return round(sum(torch.Size(shape).numel() for shape in tensor_shapes(config).values()) / 1e9, 2)


def test_lfm2_as_it_is_published(read):
    config = read(LFM2_1_2B)
    assert config.recurrent == ShortConvSpec(2048)
    assert [index for index, layer in enumerate(config.layers) if layer.attention] == [2, 5, 8, 10, 12, 14]
    assert (config.intermediate_size, config.attention.rope.theta, config.tie_word_embeddings) == (8192, 1e6, True)
    assert billions(config) == 1.17
    names = {part: source.name for part, source in sources(config, ()).items()}
    at = "model.layers.{}."
    assert names["model.norm.weight"] == "model.embedding_norm.weight"
    assert names[f"{at.format(0)}conv.conv.weight"] == f"{at.format(0)}conv.conv.weight"
    assert names[f"{at.format(2)}self_attn.o_proj.weight"] == f"{at.format(2)}self_attn.out_proj.weight"
    assert names[f"{at.format(2)}self_attn.q_norm.weight"] == f"{at.format(2)}self_attn.q_layernorm.weight"
    assert names[f"{at.format(2)}mlp.up_proj.weight"] == f"{at.format(2)}feed_forward.w3.weight"


def test_lfm2_in_other_spellings(read):
    config = read(LFM2_1_2B, tie_embedding=False, block_auto_adjust_ff_dim=False)
    assert (config.intermediate_size, config.tie_word_embeddings) == (12288, False)
    with pytest.raises(UnsupportedModel, match="block_ffn_dim_multiplier is None: transformers takes no null here"):
        read(LFM2_1_2B, block_ffn_dim_multiplier=None)
    types = ["conv", "full_attention"] * 8
    config = read(LFM2_1_2B, full_attn_idxs=None, layer_types=types, block_ff_dim=6656)
    assert (config.intermediate_size, len(config.attention_layers)) == (4608, 8)


def test_granite_4_as_it_is_published(read):
    config = read(GRANITE_4_H_TINY)
    assert config.recurrent == MAMBA
    assert (MAMBA.channels, MAMBA.in_size, MAMBA.draft_size) == (3328, 6448, 3376)
    assert tuple(i for i, layer in enumerate(config.layers) if layer.attention) == ATTENTION_OF_GRANITE
    assert config.attention.rope is None
    assert (config.experts.count, config.experts.size, config.experts.shared_size) == (64, 512, 1024)
    assert billions(config) == 6.94
    at = "model.layers.0."
    stacked = f"{at}block_sparse_moe.input_linear.weight"
    names = {part: (source.name, source.first) for part, source in sources(config, {stacked}).items()}
    assert names[f"{at}mamba.A_log"] == (f"{at}mamba.A_log", 0)
    assert names[f"{at}mamba.D"] == (f"{at}mamba.D", 0)
    assert names[f"{at}mlp.experts.3.up_proj.weight"] == (stacked, 512)
    assert names[f"{at}mlp.shared_expert.up_proj.weight"] == (f"{at}shared_mlp.input_linear.weight", 1024)
    assert names[f"{at}mlp.shared_expert.down_proj.weight"] == (f"{at}shared_mlp.output_linear.weight", 0)


def test_granite_4_in_other_spellings(read):
    types = ["linear_attention", "full_attention"] * 20
    config = read(GRANITE_4_H_TINY, layer_types=types, mamba_d_head="auto", time_step_limit=[0.0, float("inf")])
    assert config.recurrent == MAMBA
    assert len(config.attention_layers) == 20
    dense = read(GRANITE_4_H_TINY, num_local_experts=0, num_experts_per_tok=0)
    assert (dense.experts, dense.intermediate_size) == (None, 1024)


NEMOTRON_3_NANO = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_min": 0.001,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}
NEMOTRON_NANO_9B = {
    **NEMOTRON_3_NANO,
    "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "intermediate_size": 15680,
    "mamba_head_dim": 80,
    "mamba_num_heads": 128,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "time_step_limit": [0.0, float("inf")],
}


def test_nemotrons(read):
    """NVIDIA-Nemotron-3-Nano-30B-A3B and NVIDIA-Nemotron-Nano-9B-v2."""
    config = read(NEMOTRON_3_NANO)
    kinds = [(layer.recurrent, layer.attention, layer.experts) for layer in config.layers]
    assert [sum(each is not None for each in kind) for kind in zip(*kinds, strict=True)] == [23, 6, 23]
    assert config.recurrent == MambaSpec(64, 64, 8, 128, eps=1e-5, dt_min=0.001)
    assert (config.attention.num_kv_heads, config.attention.rope) == (2, None)
    experts = config.experts
    assert (experts.count, experts.size, experts.shared_size, experts.is_gated) == (128, 1856, 3712, False)
    assert (experts.routing.per_token, experts.routing.factor, experts.routing.corrected) == (6, 2.5, True)
    assert kept_bytes(config, 1) == pytest.approx(31.6e9, rel=0.01), "of the model card"
    config = read(NEMOTRON_NANO_9B)
    kinds = [(layer.recurrent, layer.attention, layer.dense) for layer in config.layers]
    assert [sum(each is not None for each in kind) for kind in zip(*kinds, strict=True)] == [27, 4, 25]
    assert kept_bytes(config, 1) == pytest.approx(8.9e9, rel=0.01)
    share = Shard(0, 8).config(config)
    assert share.recurrent == MambaSpec(16, 80, 1, 128, eps=1e-5, dt_min=0.001)


def test_mamba_2_as_it_is_published(read):
    config = read(MAMBA_CODESTRAL)
    assert {layer.mixer for layer in config.layers} == {MambaSpec(128, 64, 8, 128, eps=1e-5)}
    assert not config.attention_layers
    assert (config.num_kv_heads, config.head_dim, config.intermediate_size) == (0, 0, 0)
    assert config.norm.eps == 1e-5
    assert not config.norm.wide
    assert (config.max_context, config.eos_token_ids) == (1 << 20, (0,))
    assert kept_bytes(config, 2) == pytest.approx(2 * 7.29e9, rel=0.01), "of the model card"
    assert Shard(0, 2).config(config).recurrent == MambaSpec(64, 64, 4, 128, eps=1e-5)


def test_mamba_1_as_it_is_published(read):
    config = read(FALCON_MAMBA_7B)
    inner = NormSpec(1e-6, wide=True, weightless=True)
    assert {layer.mixer for layer in config.layers} == {SelectiveScanSpec(8192, 16, 256, norm=inner)}
    assert kept_bytes(config, 2) == pytest.approx(2 * 7.27e9, rel=0.01), "of the model card"


def test_jamba_as_it_is_published(read):
    config = read(JAMBA)
    kinds = [(layer.recurrent, layer.attention, layer.experts) for layer in config.layers]
    assert [sum(each is not None for each in kind) for kind in zip(*kinds, strict=True)] == [28, 4, 16]
    assert config.recurrent == SelectiveScanSpec(8192, 16, 256, norm=config.norm)
    assert config.attention.rope is None
    assert kept_bytes(config, 2) == pytest.approx(2 * 51.6e9, rel=0.01), "of the model card"
    share = Shard(1, 8).config(config)
    assert share.recurrent.recurrent_shape == (16, 16, 64)
    assert parts_of(config)["model.layers.0.mamba.A_log"].share(1, 8) == ((slice(1024, 2048),),)
    assert parts_of(config)["model.layers.0.mamba.x_proj.weight"].share(1, 8) == ((slice(None), slice(1024, 2048)),)
    blocks = "the number of Mamba's blocks of 64 channels, 128,"
    assert (config.recurrent.why_not(8), config.recurrent.why_not(3)) == (None, blocks)


def test_recurrent_gemma_as_it_is_published(read):
    config = read(RECURRENT_GEMMA_2B)
    kinds = [(layer.recurrent, layer.attention) for layer in config.layers]
    assert [sum(each is not None for each in kind) for kind in zip(*kinds, strict=True)] == [18, 8]
    assert config.recurrent == RgLruSpec(10, 256)
    assert (config.attention.window, config.attention.rope.dim, config.attention.o_bias) == (2048, 128, True)
    assert (config.intermediate_size, config.logits_softcap, config.tie_word_embeddings) == (7680, 30.0, True)
    assert config.embedding_multiplier == 50.5, "in bfloat16"
    assert kept_bytes(config, 2) == pytest.approx(2 * 2.68e9, rel=0.01), "of the model card"
    assert Shard(1, 5).config(config).recurrent == RgLruSpec(2, 256)
    own = parts_of(config)["model.layers.0.temporal.rg_lru.input_gate_weight"]
    assert own.share(1, 5) == ((slice(2, 4),),)
    assert (config.recurrent.why_not(5), config.recurrent.why_not(4)) == (None, "the number of heads of units, 10,")


@pytest.mark.parametrize(
    ("raw", "changes"),
    [
        (LFM2_1_2B, {"full_attn_idxs": []}),
        (GRANITE_4_H_TINY, {"layer_types": None}),
    ],
)
def test_a_hybrid_may_have_no_attention(read, raw, changes):
    config = read(raw, **changes)
    assert config.num_recurrent_layers == config.num_layers


@pytest.mark.parametrize(
    ("raw", "changes", "message"),
    [
        (LFM2_1_2B, {"conv_L_cache": 1}, "conv_L_cache is 1: a whole number of at least 2 is needed"),
        (LFM2_1_2B, {"layer_types": ["mamba"] * 16}, "mamba is not supported; supported: full_attention, conv"),
        (GRANITE_4_H_TINY, {"mamba_d_head": 32}, "mamba_d_head is 32: mamba_n_heads 48 times it must be"),
        (GRANITE_4_H_TINY, {"mamba_n_groups": 5}, "mamba_n_groups is 5: mamba_n_heads, 48, must be a multiple"),
        (GRANITE_4_H_TINY, {"time_step_limit": [0.001, 0.1]}, "limits of time steps are not supported"),
        (GRANITE_4_H_TINY, {"hidden_act": "gelu_pytorch_tanh"}, "Mamba layers are supported with silu alone"),
        (GRANITE_4_H_TINY, {"layer_types": ["conv"] * 40}, "conv is not supported; supported: attention, full_"),
        (GRANITE_4_H_TINY, {"layer_types": ["mamba"]}, "1 types for num_hidden_layers, 40"),
        (FALCON_MAMBA_7B, {"time_step_rank": 0}, "time_step_rank is 0: a whole number of at least 1 is needed"),
        (JAMBA, {"attn_layer_offset": 8}, "attn_layer_offset is 8: it must be less than attn_layer_period, 8"),
        (RECURRENT_GEMMA_2B, {"hidden_activation": "silu"}, "supported: gelu_pytorch_tanh"),
        (
            RECURRENT_GEMMA_2B,
            {"lru_width": 2564},
            "lru_width is 2564: it must be a multiple of num_attention_heads, 10",
        ),
        (RECURRENT_GEMMA_2B, {"block_types": ["lstm"]}, "lstm is not supported; supported: attention, recurrent"),
        (RECURRENT_GEMMA_2B, {"intermediate_size": 15361}, "it is that of gate and up together, and must be even"),
        (RECURRENT_GEMMA_2B, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "no linear rope of this family"),
        (MAMBA_CODESTRAL, {"num_heads": 64}, "head_dim is 64: num_heads 64 times it must be expand"),
        (MAMBA_CODESTRAL, {"n_groups": 5}, "n_groups is 5: num_heads, 128, must be a multiple of it"),
        (MAMBA_CODESTRAL, {"time_step_limit": [0.0, 0.1]}, "limits of time steps are not supported"),
        (MAMBA_CODESTRAL, {"hidden_act": "gelu"}, "Mamba layers are supported with silu alone"),
        (MAMBA_CODESTRAL, {"conv_kernel": 1}, "conv_kernel is 1: a whole number of at least 2 is needed"),
    ],
)
def test_what_they_cannot_be_is_refused(read, raw, changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        read(raw, **changes)


def test_ranks_share_heads_and_what_a_group_has_for_all(read):
    whole = read(GRANITE_4_H_TINY)
    share = Shard(1, 4).config(whole)
    assert share.recurrent == MambaSpec(12, 64, 1, 128, eps=1e-5, group_ranks=4)
    assert share.projections["in_proj"].outputs == share.recurrent.in_size
    heads, z, x = slice(12, 24), slice(768, 1536), slice(3840, 4608)
    b, c, dt = slice(6144, 6272), slice(6272, 6400), slice(6412, 6424)
    at = "model.layers.0.mamba."
    for name, parts in {
        "in_proj.weight": tuple((each,) for each in (z, x, b, c, dt)),
        "conv1d.weight": ((z,), (slice(3072, 3200),), (slice(3200, 3328),)),
        "conv1d.bias": ((z,), (slice(3072, 3200),), (slice(3200, 3328),)),
        "dt_bias": ((heads,),),
        "D": ((heads,),),
        "norm.weight": ((z,),),
        "out_proj.weight": ((slice(None), z),),
    }.items():
        assert parts_of(whole)[at + name].share(1, 4) == parts, name
    with pytest.raises(UnsupportedModel, match=r"num_attention_heads 12 is not divisible by it; set .* 1, 2, 4$"):
        Shard(0, 8).config(whole)
    two_groups = read(GRANITE_4_H_TINY, mamba_n_groups=2)
    assert Shard(0, 2).config(two_groups).recurrent == MambaSpec(24, 64, 1, 128, eps=1e-5)
    assert share.recurrent.native_shape().group_ranks == 4
    assert Shard(0, 2).config(two_groups).recurrent.native_shape().group_ranks == 1
    with pytest.raises(UnsupportedModel, match="the number of Mamba's groups of heads, 2, is not divisible by it"):
        Shard(0, 4).config(two_groups)


def test_ranks_share_channels_of_a_convolution(read):
    whole = read(LFM2_1_2B)
    own = slice(1024, 2048)
    at = "model.layers.0.conv."
    assert Shard(1, 2).config(whole).recurrent == ShortConvSpec(1024)
    assert parts_of(whole)[f"{at}conv.weight"].share(1, 2) == ((own,),)
    rows = (own, slice(3072, 4096), slice(5120, 6144))
    assert parts_of(whole)[f"{at}in_proj.weight"].share(1, 2) == tuple((each,) for each in rows)
    assert parts_of(whole)[f"{at}out_proj.weight"].share(1, 2) == ((slice(None), own),)
