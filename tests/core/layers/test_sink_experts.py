"""Inkling's experts of all tokens, which its router weighs with those that it chooses. For paths, see `paths`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chorus.core.model.families.inkling.experts import SinkExperts
from chorus.core.model.families.inkling.mixture import choose_with_sinks, mix_with_sinks
from chorus.core.model.families.inkling.ops import MoeWithSinks
from chorus.core.model.moe.listed_experts import ListedExperts
from chorus.core.model.program.native_decoder import why_unsupported
from chorus.core.model.program.text import program_lines
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.feed_forward import Routing, Scoring
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.ops.moe.expert_gemms import pack

from ..tiny_families import load_model, save_family
from .test_narrow_values import changed

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

SPEC = SinkExperts(8, 12, Routing(3, Scoring.SIGMOID, renormalised=True, factor=1.5, corrected=True), sinks=2)


@pytest.fixture
def mixture():
    """transformers' module, and the same as ours."""
    from transformers import InklingTextConfig
    from transformers.models.inkling.modeling_inkling import InklingMoE

    torch.manual_seed(3)
    module = InklingMoE(
        InklingTextConfig(
            hidden_size=16, moe_intermediate_size=12, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2,
            route_scale=1.5,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5)
        module.gate.e_score_correction_bias.normal_(0, 0.5)
    state = {name: each.detach().clone() for name, each in module.state_dict().items()}
    router = state["gate.weight"].split((8, 2))
    own = ListedExperts(
        router=router[0],
        gate_up=[*map(pack, state["experts.gate_up_proj"])],
        down=[*map(pack, state["experts.down_proj"])],
        correction=state["gate.e_score_correction_bias"],
        scale=state["gate.global_scale"],
    )
    further = torch.cat((state["shared_experts.gate_proj"], state["shared_experts.up_proj"]), 1)
    down = [*map(pack, state["shared_experts.down_proj"])]
    sinks = ListedExperts(router=router[1], gate_up=[*map(pack, further)], down=down)
    return module.eval(), *(each.packed(torch.float32) for each in (own, sinks))


def test_the_mixture_is_transformers_own(mixture):
    module, own, sinks = mixture
    x = torch.randn(21, 16)
    with torch.no_grad():
        want = module(x[None])[0]
        _, weights, chosen, further = module.gate(x[None])
    found = choose_with_sinks(x, own, sinks, SPEC)
    order = chosen.argsort(1)
    assert torch.equal(found.experts.sort(1).values, chosen.gather(1, order))
    torch.testing.assert_close(
        found.weights[:, :3].gather(1, found.experts.argsort(1)), weights.gather(1, order), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(found.weights[:, 3:], further, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mix_with_sinks(x, own, sinks, SPEC), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "routing", "why"),
    [
        ({"shared_size": 12, "biased": True}, {}, "has shared_size, biased of others"),
        ({}, {"groups": 2, "kept_groups": 1, "epsilon": 1e-20}, "has routing.epsilon, routing.groups of others"),
        ({}, {"renormalised": False}, r"routing\.renormalised"),
        ({}, {"scoring": Scoring.SOFTMAX}, r"routing\.scoring"),
    ],
    ids=str,
)
def test_what_such_a_mixture_does_not_compute_is_refused(fields, routing, why):
    with pytest.raises(UnsupportedModel, match=why):
        replace(SPEC, **fields, routing=replace(SPEC.routing, **routing))


def test_a_rows_bits_do_not_depend_on_other_rows(mixture):
    _, own, sinks = mixture
    x = torch.randn(40, 16)
    every = mix_with_sinks(x, own, sinks, SPEC)
    for row in (0, 23, 39):
        assert torch.equal(mix_with_sinks(x[row : row + 1], own, sinks, SPEC)[0], every[row])


@pytest.fixture
def model(tmp_path):
    save_family("inkling", tmp_path)
    return tmp_path


def test_slots_program_and_text(model):
    config = read_model_config(model)
    assert config.experts.sinks == 2
    assert (config.experts.active_size, config.experts.of_sinks.count) == (5 * 40, 2)
    own = {slot.name: slot for slot in config.composed(config.layers[1]).slots}
    assert [each.path for each in own["sink_experts.down"].tensors] == [
        "mlp.sink_experts.0.down_proj.weight",
        "mlp.sink_experts.1.down_proj.weight",
    ]
    assert (own["experts.router"].tensors[0].shape, own["sink_experts.router"].tensors[0].shape) == ((8, 64), (2, 64))
    assert "mlp_scale" in {slot.name for slot in config.composed(config.layers[0]).slots}, "a dense part has a factor"
    assert MoeWithSinks in map(type, config.composed(config.layers[1]).program.ops)
    assert "8 experts of 40, 3 for each token by sigmoid, and 2 for all, which the router weighs, too" in "\n".join(
        program_lines(config)
    )


def test_the_native_decoder_refuses_the_family_by_name(model):
    assert why_unsupported(read_model_config(model), torch.float32) == (
        "it has no short convolution of a stream, and this model has it"
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n_shared_experts": 0}, "n_shared_experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok.*can't be more than that"),
    ],
    ids=str,
)
def test_what_is_refused(model, fields, why):
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config(changed(model, **fields))


def test_adapters_on_experts_of_all_tokens_are_refused(model, tmp_path_factory):
    from peft import LoraConfig, get_peft_model

    path = tmp_path_factory.mktemp("adapter")
    lora = LoraConfig(r=2, target_parameters=["mlp.shared_experts.gate_proj"], target_modules=[], task_type="CAUSAL_LM")
    get_peft_model(load_model(model), lora).save_pretrained(path)
    with pytest.raises(AdapterFormatError, match="shared_experts"):
        inspect_adapter(path, read_model_config(model).module_paths)
