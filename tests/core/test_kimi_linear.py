"""Kimi Linear, whose layers are of Kimi Delta Attention or of latent attention, over the paths of an engine."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.config import UnsupportedModel
from chorus.core.model.decoder import DecoderModel
from chorus.core.model.native_decoder import NativeDecoderModel
from chorus.core.model.read_config import read_model_config
from chorus.core.model.recurrent import GatedDeltaSpec
from chorus.core.model.shard import Shard
from chorus.core.policies import Policies
from chorus.graphs.runner import StepMode
from chorus.ops import native_library

from .merging.test_merged import merge
from .speculation.stand_ins import Drawn, Free, Right, Wrong
from .test_family_paths import answers, told
from .test_hybrids import BF16_ERROR, whole_logits
from .tiny_families import make_all_linear, make_tiny, save_family

pytestmark = [pytest.mark.numerics, pytest.mark.wide]

PLAIN, Q_LATENTS = "kimi-linear", "kimi-linear-q-latents"
every_family = pytest.mark.parametrize("family", [PLAIN, Q_LATENTS])
on_ranks = pytest.mark.parametrize(
    "ranks",
    [
        1,
        pytest.param(
            2,
            marks=pytest.mark.skipif(
                not native_library.available(torch.float32), reason="ranks add up by the native library"
            ),
        ),
    ],
)


@pytest.fixture(params=[pytest.param("native", marks=pytest.mark.native), "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    return request.param


@every_family
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_of_any_size(tiny, drive, kernels, family, chunk):
    it = tiny(family)
    driver = drive(it, max_num_seqs=min(4, chunk), max_num_batched_tokens=chunk, block_tokens=8)
    assert isinstance(driver.executor.rank.decoder, NativeDecoderModel if kernels == "native" else DecoderModel)
    want = answers(it, driver, 5, seed=1)
    assert told(driver, want) == want


@every_family
@on_ranks
@pytest.mark.parametrize("is_merged", [False, True], ids=["lora", "merged"])
def test_adapters_on_layers_of_both_kinds(tiny, drive, family, ranks, is_merged):
    it = tiny(family)
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24, max_model_len=128, tensor_parallel_size=ranks)
    if is_merged:
        merge(driver, "r3-all")
    want = answers(it, driver, 8, seed=5)
    assert told(driver, want) == want
    assert (StepMode.MERGED in {plan.mode for plan in driver.plans}) == is_merged


@on_ranks
def test_prefixes_begin_at_checkpoints(tiny, drive, ranks):
    it = tiny(PLAIN)
    limits = {"max_num_batched_tokens": 40, "max_num_seqs": 8, "state_checkpoint_tokens": 32}
    driver = drive(it, tensor_parallel_size=ranks, **limits)
    for _ in range(2):
        want = answers(it, driver, 8, seed=2)
        assert told(driver, want) == want
        driver.answers.clear()
    assert driver.engine.stats().num_prefix_hit_tokens > 40


@every_family
def test_preempted_requests_swap_and_go_on(tiny, drive_crowded, family):
    it = tiny(family)
    driver = drive_crowded(it)
    want = answers(it, driver, 8, seed=3, lengths=(5, 20), tokens=24)
    assert told(driver, want) == want
    assert driver.engine.stats().num_swaps_out > 0


@pytest.mark.parametrize("proposer", [Right, Wrong, Drawn])
def test_rejected_drafts_leave_no_trace_in_a_state(tiny, drive, proposer):
    it, want = tiny(PLAIN), {}

    def answer(request):
        return want.get(request.id, [])

    random_draws = (random.Random(0),) if proposer is Drawn else ()
    policies = Policies(proposer=proposer(answer, *random_draws))
    driver = drive(it, speculation="ngram", policies=policies, max_num_seqs=4, max_num_batched_tokens=40)
    driver.engine.speculation.cost = Free()
    want |= answers(it, driver, 6, seed=6, tokens=24)
    assert told(driver, want) == want
    stats = driver.engine.stats()
    assert stats.num_proposed_tokens > 0
    assert (stats.num_accepted_tokens > 0) == (proposer is not Wrong)


def test_what_all_linear_reaches(drive):
    """Each low-rank projection of gates, and those of both kinds of attention."""
    it = make_all_linear(PLAIN)
    driver = drive(it, max_num_seqs=4, max_num_batched_tokens=24, max_model_len=128)
    want = answers(it, driver, 4, seed=1, adapters=("all", None))
    assert told(driver, want) == want
    gates, delta = ["f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj"], [f"{each}_proj@linear" for each in "qkvo"]
    latents, shared = ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"], ("gate_proj", "up_proj", "down_proj")
    found = set(driver.engine.store.get("all").manifest.targets)
    assert found == {*gates, *delta, "b_proj", *latents, *shared, *(f"shared_expert.{each}" for each in shared)}


def test_names_of_modules_of_the_published_code(drive, tmp_path):
    it = make_all_linear(PLAIN)
    shutil.copytree(it.adapters["all"], tmp_path / "all")
    file = tmp_path / "all" / "adapter_model.safetensors"
    tensors = load_file(file)
    names = {".forget_gate.": ".", ".mlp.shared_experts.": ".block_sparse_moe.shared_experts."}
    for name, other in names.items():
        assert any(name in tensor for tensor in tensors)
        tensors = {tensor.replace(name, other): value for tensor, value in tensors.items()}
    save_file(tensors, file)
    driver = drive(it, max_num_seqs=4, adapters={"all": tmp_path / "all"})
    want = answers(it, driver, 2, seed=1, adapters=("all", None))
    assert told(driver, want) == want


@pytest.mark.parametrize("is_merged", [False, True], ids=["lora", "merged"])
def test_dora(drive, is_merged):
    """Its scales are of outputs of every projection, those from latents of gates, too."""
    it = make_tiny(PLAIN, use_dora=True, exclude_modules=r".*\.(mlp)\..*")
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24)
    if is_merged:
        merge(driver, "r3-all")
    want = answers(it, driver, 8, seed=5, adapters=(None, "r3-all", "r8-qv"))
    assert told(driver, want) == want
    assert (StepMode.MERGED in {plan.mode for plan in driver.plans}) == is_merged


def test_bfloat16_is_float32_within_rounding(tmp_path):
    """Without experts, of which a rounded router chooses others."""
    types = {"mlp_layer_types": ["dense"] * 4}
    save_family(PLAIN, tmp_path, torch.bfloat16, initializer_range=0.1, **types)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 150, (length,), generator=generator).tolist() for length in (5, 17, 40, 90)]
    want = whole_logits(tmp_path, prompts, dtype="float32")
    errors = (whole_logits(tmp_path, prompts) - want).norm(dim=-1) / want.norm(dim=-1)
    assert float(errors.max()) < BF16_ERROR


# -- configurations

#: Of moonshotai/Kimi-Linear-48B-A3B-Instruct.
PUBLISHED = {
    "architectures": ["KimiLinearForCausalLM"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def read(path, without=(), **changes):
    raw = {name: value for name, value in PUBLISHED.items() if name not in without}
    (path / "config.json").write_text(json.dumps({**raw, **changes}))
    return read_model_config(path)


def test_the_published_configuration(tmp_path):
    config = read(tmp_path)
    full = [index + 1 for index, layer in enumerate(config.layers) if layer.attention is not None]
    assert full == PUBLISHED["linear_attn_config"]["full_attn_layers"]
    assert config.recurrent == GatedDeltaSpec(32, 32, 128, 128, 1e-5, gate_rank=128)
    assert "with a decay of each channel" in config.recurrent.described()
    attention, experts = config.attention, config.layers[1].experts
    assert (attention.rope, attention.scale, attention.head_dim) == (None, 192**-0.5, 576)
    assert (experts.count, experts.routing.per_token, experts.shared_size) == (256, 8, 1024)
    assert config.layers[0].experts is None
    assert config.max_position_embeddings == 1048576
    assert len(config.projections) - len(config.projections.mixture) == 16, "what tables of adapters hold"


def test_by_default_every_fourth_layer_after_the_first_has_attention(tmp_path):
    config = read(tmp_path, without=["linear_attn_config"], num_hidden_layers=9)
    assert [index for index, layer in enumerate(config.layers) if layer.attention is not None] == [4, 8]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu': .* with silu alone"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax': .*supported: sigmoid"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2: only experts in every layer after the dense ones"),
        ({"mla_use_nope": False}, "mla_use_nope is False: transformers rotates no queries and keys"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True: transformers does not tie them"),
        (
            {"linear_attn_config": {**PUBLISHED["linear_attn_config"], "kda_layers": [1, 2]}},
            r"linear_attn_config\.kda_layers is \[1, 2\]: it and full_attn_layers must have each of the layers 1 to 27",
        ),
        ({"layer_types": ["sliding_attention"] * 27}, "layer_types is .*: sliding_attention is not supported"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8: latents serve all heads"),
        ({"attention_bias": True}, "attention_bias is True: biases are not supported where queries have no latents"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path, changes, why):
    with pytest.raises(UnsupportedModel, match=why):
        read(tmp_path, **changes)


def test_ranks_share_heads(tmp_path):
    config = read(tmp_path, without=["linear_attn_config"], linear_num_heads=6)
    with pytest.raises(UnsupportedModel, match=r"linear_num_heads 6 is not divisible by it; set it to one of 1, 2$"):
        Shard(0, 4).config(config)
    share = Shard(0, 2).config(config)
    assert share.recurrent is not None
    assert (share.recurrent.in_size, share.recurrent.draft_size) == (5 * 3 * 128 + 3, 4 * 3 * 128 + 3)
    assert [each.outputs for each in share.projections.layers[0] if each.path.endswith("_a_proj")] == [128, 128]
