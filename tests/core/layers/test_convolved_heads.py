"""ZAYA, with convolved queries and keys, delayed values and routers that go over layers: names, products, refusals. For
paths, see `paths`.
"""

from __future__ import annotations

import pytest
import torch

from chorus.core.model.batch import GemmBackend
from chorus.core.model.decoder import GemmUse
from chorus.core.model.families.zaya.ops import AddScaled, CarryRouterState
from chorus.core.model.program.native_decoder import why_unsupported
from chorus.core.model.program.ops.moe import Moe
from chorus.core.model.program.text import program_lines
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.shard import Shard
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter

from ..test_families import executor_of
from ..tiny_families import load_model, save_family
from .test_hybrids import Runner
from .test_narrow_values import changed

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


@pytest.fixture
def model(tmp_path):
    save_family("zaya", tmp_path)
    return tmp_path


def test_shapes_and_slots(model):
    config = read_model_config(model)
    convolved = config.layers[0].recurrent
    assert (convolved.channels, convolved.in_size, convolved.conv_size) == (112, 128, 3)
    assert config.recurrent == convolved
    assert [each.is_first for each in config.layers] == [True, False, False]
    own = [{slot.name: slot for slot in config.composed(layer).slots} for layer in config.layers]
    assert "router_state_scale" not in own[0]
    assert own[1]["router_state_scale"].tensors[0].shape == (24,)
    assert own[1]["experts.router"].tensors[0].shape == (9, 24), "one expert more gives nothing"
    assert [each.path.rpartition(".")[2] for each in own[1]["qkv"].tensors] == ["weight"] * 4
    assert {"router_down_bias", "router_first_bias", "router_second_bias"} <= own[0].keys()


def test_the_program_and_its_text(model):
    config = read_model_config(model)
    first, second = (config.composed(layer).program for layer in config.layers[:2])
    assert [len(each.segments) for each in (first, second)] == [2, 2], "convolutions and attention are apart"
    assert {each.name for each in second.segments[0].mixed} == {"qkv"}
    carried = [next(op for op in program.ops if isinstance(op, CarryRouterState)) for program in (first, second)]
    assert [op.before for op in carried] == [None, "router_state"]
    assert sum(isinstance(op, AddScaled) for op in first.ops) == 2
    text = "\n".join(program_lines(config))
    assert "convolutions of queries and keys, over 2 and 2 tokens" in text
    assert "scale_embeddings" in text


def test_states_take_pages_beside_keys_and_values(model):
    layout = executor_of(model, dtype="float32").layout
    assert layout.states.shape.num_layers == 3
    assert layout.states.shape.conv_elems == 2 * 112
    assert layout.num_layers == 3


def test_a_mixture_runs_alone_whatever_its_router_takes(model):
    """As a GPU times experts at its start."""
    decoder = Runner(model).decoder
    config, rows = decoder.config, torch.randn(5, decoder.config.hidden_size)
    op = next(op for op in config.composed(config.layers[0]).program.ops if isinstance(op, Moe))
    assert op.spec.router_inputs(config.hidden_size) != config.hidden_size
    use = GemmUse("EXPERTS", rows, mixture=(0, op))
    assert decoder.run_gemm(use, GemmBackend.LIBRARY, rows).shape == rows.shape


def test_a_bias_of_late_values_is_refused(model, tmp_path_factory):
    from peft import LoraConfig, get_peft_model

    path = tmp_path_factory.mktemp("adapter")
    lora = LoraConfig(r=2, target_modules=["v_proj_delayed"], lora_bias=True, task_type="CAUSAL_LM")
    get_peft_model(load_model(model), lora).save_pretrained(path)
    with pytest.raises(AdapterFormatError, match=r"lora_bias.*v_proj_delayed, which would give a first token its bias"):
        inspect_adapter(path, read_model_config(model).module_paths)


def test_small_networks_of_routers_are_never_merged(model):
    table = read_model_config(model).projections
    assert {table[name].product for name in table.unmerged if name.startswith("router.")} == {
        "router_down", "router_first", "router_second",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok"),
        ({"layer_types": ["hybrid", "full_attention", "hybrid"]}, "layer_types"),
        ({"layer_types": ["hybrid"]}, "layer_types"),
        ({"layer_types": ["hybrid_sliding"] * 3, "sliding_window": None}, "sliding_window"),
        ({"cca_time0": 0}, "cca_time0"),
    ],
)
def test_refusals(model, fields, why):
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config(changed(model, **fields))


def test_ranks_and_the_native_decoder_are_refused_by_name(model):
    config = read_model_config(model)
    with pytest.raises(UnsupportedModel, match="values are those of the token before"):
        Shard(0, 2).config(config)
    assert why_unsupported(config, torch.float32) == ("it has no learned factor of embeddings, and this model has it")
