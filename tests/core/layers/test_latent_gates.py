"""A.X K2, whose norms and latent attention have gates: programs, names, ranks and refusals. For paths, see `paths`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from chorus.core.model.moe.experts import choose
from chorus.core.model.program.ops.gates import GateOutput, TakeGates
from chorus.core.model.program.ops.indexers import Index
from chorus.core.model.program.ops.linear import Gemm
from chorus.core.model.program.text import program_lines
from chorus.core.model.program.torch_step import OpContext, Step, batch_of_parts
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.feed_forward import Routing, Scoring
from chorus.core.model.weights.shard import Shard

from ..tiny_families import save_family
from .test_narrow_values import changed

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

BOTH = ("attention_norm", "mlp_norm")


@pytest.fixture
def model(tmp_path):
    save_family("ax-k2", tmp_path)
    return tmp_path


def test_norms_before_experts_and_before_all_mixers_have_gates(model):
    config = read_model_config(model)
    layers = config.layers
    assert [(each.rank, each.gated) for each in layers] == [(6, BOTH[:1]), (6, BOTH), (6, BOTH)]
    own = {each.path: each for each in config.composed(layers[1]).projections}
    assert own["norm_gates.mlp_norm.fc1"].dims == (64, 6)
    assert own["norm_gates.mlp_norm.fc2"].dims == (6, 64)
    assert "norm_gates.mlp_norm.fc1" not in {each.path for each in config.composed(layers[0]).projections}


def test_queries_and_gates_are_one_product_of_both_latents(model):
    config = read_model_config(model)
    own = {each.path.rpartition(".")[2]: each for each in config.composed(config.layers[0]).projections}
    assert own["q_b_proj"].dims == (2 * 24, 4 * (24 + 24))
    assert (own["wq_b"].product, own["wq_b"].inputs) == ("index_up", 24)


def test_gates_are_what_follows_each_query():
    x = torch.arange(24.0).view(2, 12)
    step = Step(batch_of_parts(), [], {"qh": x})
    TakeGates("qh", "gates", heads=3, width=1).torch(OpContext(0, {}, None))(step)
    assert step.names["gates"].tolist() == [[3, 7, 11], [15, 19, 23]]


def test_a_program_says_where_gates_come_from(model):
    config = read_model_config(model)
    ops = config.composed(config.layers[1]).program.ops
    assert sum(isinstance(op, GateOutput) for op in ops) == 5  # two of each norm's, and attention's
    assert [op.weight for op in ops if isinstance(op, Gemm)][:4] == [
        "mixer_gates_down", "mixer_gates_up", "qkv", "index_up",
    ]  # fmt: skip
    assert next(op for op in ops if isinstance(op, Index)).x == "ih"
    text = "\n".join(program_lines(config))
    assert "64 → 6: fc1" in text
    assert "24 for each of 4 heads" in text


def test_ranks_share_heads_and_have_all_gates_of_norms(model):
    share = Shard(1, 2).config(read_model_config(model))
    own = share.composed(share.layers[1]).projections
    assert {"mlp_gates_up", "index_up"} < {each.product for each in own if each.is_replicated}
    assert next(each for each in own if each.path.endswith("q_b_proj")).outputs == 2 * (24 + 24)
    assert share.attention.gate_size == 2 * 24


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"mlp_layer_types": None}, [False, True, True]),
        ({"mlp_layer_types": None, "first_k_dense_replace": 0, "moe_layer_freq": 2}, [True, False, True]),
        ({"mlp_layer_types": ["sparse", "sparse", "dense"]}, [True, True, False]),
    ],
)
def test_layers_with_experts_are_transformers_own(model, fields, kinds):
    from transformers import AutoConfig

    config = read_model_config(changed(model, **fields))
    assert [each.experts is not None for each in config.layers] == kinds
    assert [each == "sparse" for each in AutoConfig.from_pretrained(model).mlp_layer_types] == kinds


def test_without_groups_all_experts_are_chosen_from(model):
    assert read_model_config(model).experts.routing.groups == 1
    assert read_model_config(changed(model, topk_group=None)).experts.routing.groups == 1
    assert read_model_config(changed(model, n_group=4, topk_group=2)).experts.routing.groups == 4
    with pytest.raises(UnsupportedModel, match="topk_group"):
        read_model_config(changed(model, n_group=4, topk_group=None))


def test_experts_of_other_groups_come_before_scores_below_zero():
    """As transformers chooses: scores of kept groups may be below those of the others, which are zero."""
    from transformers import AXK2Config
    from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter

    config = AXK2Config(hidden_size=8, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2)
    theirs, x = AXK2TopkRouter(config), torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    theirs.weight.data.normal_(generator=torch.Generator().manual_seed(2))
    ours = Routing(
        4, Scoring.SIGMOID, True, factor=config.routed_scaling_factor, corrected=True, groups=4, kept_groups=2,
        masked_score=0.0, epsilon=1e-20,
    )  # fmt: skip
    for shift in (0.0, -0.5, -2.0):
        theirs.e_score_correction_bias.normal_(shift, 0.3, generator=torch.Generator().manual_seed(3))
        logits, weights, experts = theirs(x)
        found = choose(logits.detach(), ours, theirs.e_score_correction_bias)
        dense = torch.zeros(2, 32, 16)
        dense[0].scatter_(1, experts, weights.detach())
        dense[1].scatter_(1, found.experts, found.weights)
        if shift > -2:  # else all of the others' scores are equal, and any of them may be chosen
            assert torch.allclose(dense[0], dense[1])
        else:
            kept = choose(logits.detach(), replace(ours, masked_score=-math.inf), theirs.e_score_correction_bias)
            assert not (dense[1].gather(1, kept.experts) > 0).any()
            assert not (dense[0].gather(1, kept.experts) > 0).any()
