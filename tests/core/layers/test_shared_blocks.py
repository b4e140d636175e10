"""Zamba and Zamba 2, whose layers share blocks: weights, names, adapters and refusals. For paths, see `paths`."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from chorus.core.model.families.zamba.layer import ZambaLayer
from chorus.core.model.program.native_decoder import NativeDecoderModel, why_unsupported
from chorus.core.model.program.ops.attend import Attend
from chorus.core.model.program.ops.mix import Mix
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.feed_forward import Activation
from chorus.core.model.weights.narrow_bytes import kept_bytes
from chorus.core.model.weights.open_weights import open_weights
from chorus.core.model.weights.tensor_parts import sources
from chorus.core.model.weights.weight_loader import WeightLoader
from chorus.core.model.weights.weight_plan import LEFT
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.tensor_uses import uses_of
from chorus.memory.pages.arena import Arena
from chorus.memory.pages.layout import PageLayout
from chorus.ops.library import native_library

from ..tiny_families import BLOCKS, make_all_linear, save_family
from .test_hybrids import Runner
from .test_narrow_values import changed

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

#: Slots of blocks; layers 1 and 4 of the tiny model have one, and layers 3 and 6 the other one.
SHARED = ("block_norm", "mlp_norm", "qkv", "o", "gate_up", "down")


@pytest.fixture
def model(tmp_path):
    save_family("zamba-2", tmp_path)
    return tmp_path


def shared_of(layers):
    """Slots with matrices of one memory in layers 1 and 4, and not in layer 3."""
    matrices = [name for name in SHARED if "norm" not in name]
    assert not any(layers[1][name] is layers[3][name] for name in matrices)
    return [name for name in matrices if layers[1][name] is layers[4][name] and layers[3][name] is layers[6][name]]


def test_weights_of_a_block_are_in_memory_once(model):
    assert shared_of(Runner(model).decoder.layers) == ["qkv", "o", "gate_up", "down"]


@pytest.mark.native
@pytest.mark.skipif(not native_library.available(torch.bfloat16), reason="needs the native library")
def test_the_native_decoder_packs_a_block_once(model):
    config = read_model_config(model)
    assert why_unsupported(config, torch.bfloat16) is None
    layout = PageLayout(config.num_layers, config.num_kv_heads, config.head_dim, 16, 2)
    arena = Arena(layout, 4, torch.bfloat16, "cpu")
    with open_weights(model, config, torch.bfloat16) as weights:
        decoder = NativeDecoderModel(config, weights, arena, 64, 1)
    assert shared_of(decoder.layers) == ["qkv", "o", "gate_up", "down"]
    decoder.close()


def test_bytes_of_a_block_are_counted_once(model):
    config = read_model_config(model)
    loader = WeightLoader(model, config, torch.float32)
    with safe_open(model / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118 - it is no dictionary
    assert kept_bytes(config, 4, LEFT) == stored == loader.num_bytes


def test_checkpoints_have_a_block_in_its_first_layer(model):
    config = read_model_config(model)
    names = sources(config, ())
    at = "model.layers.3.shared_transformer."
    assert names["model.layers.6.self_attn.q_proj.weight"].name == f"{at}self_attn.q_proj.weight"
    assert (
        names["model.layers.6.mlp.invocation_up.weight"].name
        == f"{at}feed_forward.gate_up_proj_adapter_list.3.1.weight"
    )
    assert names["model.layers.6.linear.weight"].name == "model.layers.6.linear.weight"
    loader = WeightLoader(model, config, torch.float32)
    first, last = (loader.projection(layer, "mlp.down_proj") for layer in (3, 6))
    assert torch.equal(first, last), "as DoRA reads it"
    assert not torch.equal(loader.projection(3, "mlp.invocation_up"), loader.projection(6, "mlp.invocation_up"))


def test_pieces_with_a_block_give_what_a_whole_step_gives(model):
    prompt = [*range(7, 29)]
    whole = Runner(model).greedy(prompt, 9, 5)
    assert Runner(model, piecewise=True).greedy(prompt, 9, 5) == whole


def test_a_layer_with_a_block_has_two_parts(model):
    config = read_model_config(model)
    first, second = config.composed(config.layers[1]).program.segments
    assert [type(op) for op in (*first.mixers, *second.mixers)] == [Attend, Mix]
    assert [each.name for each in (*first.reads, *first.mixed)] == ["q", "a"]
    assert [each.name for each in (*second.reads, *second.mixed)] == ["r", "m"]


def test_adapters_are_on_all_linear_modules_that_are_called():
    it = make_all_linear("zamba-2")
    config = read_model_config(it.model)
    found = inspect_adapter(it.adapters["all"], config.module_paths)
    block = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert {*found.targets} == {"in_proj", "out_proj", *BLOCKS, *block}
    assert not found.num_left_out, "transformers, too, computes nothing with those of other layers"
    uses = uses_of(found)
    # of four layers with a block, each has the low-rank pairs of two: its own are four pairs, as are the other's
    assert sum("never calls" in use for use in uses.values()) == 4 * 8 * 2
    assert set(config.projections.layers_of("invocation_up")) == {1, 3, 4, 6}


def test_small_matrices_of_another_layer_are_known_as_such(model):
    modules = read_model_config(model).module_paths
    path = "shared_transformer.feed_forward.gate_up_proj_adapter_list.{}.0"
    assert modules.without_number(4, path.format(2)) == path, "layer 4 is the third with a block"
    assert modules.without_number(4, path.format(0)) is None
    assert modules.without_number(0, path.format(0)) is None
    assert modules.in_layer(4)[path.format(2)] == ("invocation_down",)
    assert path.format(0) not in modules.in_layer(4)


def test_an_adapter_on_a_part_of_inputs_of_down_is_refused(tmp_path):
    """IA³ scales what `down_proj` reads, which is not what gate and up alone give."""
    from peft import IA3Config, get_peft_model
    from transformers import AutoModelForCausalLM

    save_family("zamba-2", tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    own = IA3Config(target_modules=["down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    get_peft_model(base, own).save_pretrained(tmp_path / "ia3")
    with pytest.raises(AdapterFormatError, match="down_proj"):
        inspect_adapter(tmp_path / "ia3", read_model_config(tmp_path / "model").module_paths)


def _firsts(config):
    """By layer the first one with the same block; None: the layer has none."""
    return [layer.first if isinstance(layer, ZambaLayer) else None for layer in config.layers]


def test_all_layers_of_zamba_have_one_block(tmp_path):
    save_family("zamba", tmp_path)
    config = read_model_config(tmp_path)
    assert _firsts(config) == [None, 1, None, 1, 1]
    names = sources(config, ())
    at = "model.layers.1.shared_transf."
    assert names["model.layers.4.mlp.gate_proj.weight"].name == f"{at}feed_forward.gate_proj.weight"
    layers = Runner(tmp_path).decoder.layers
    assert all(layers[1][name] is layers[3][name] is layers[4][name] for name in ("qkv", "o", "gate_up", "down"))


def test_layers_share_no_block_where_embeddings_are_not_tied(tmp_path):
    """transformers ties blocks by the same field."""
    save_family("zamba-biased", tmp_path)
    config = read_model_config(tmp_path)
    assert _firsts(config) == [None, None, 2, None, 4]
    assert not config.module_paths.is_shared(2, "down_proj")
    WeightLoader(tmp_path, config, torch.float32)


def test_layers_of_zamba_that_are_not_named_are_those_of_transformers(tmp_path):
    save_family("zamba-biased", tmp_path)
    config = read_model_config(changed(tmp_path, layers_block_type=None, num_hidden_layers=9))
    assert [index for index, layer in enumerate(config.layers) if layer.invocation is not None] == [2, 4, 6, 8]
    with pytest.raises(UnsupportedModel, match=r"num_hidden_layers is 2: without layers_block_type.*3 layers or more"):
        read_model_config(changed(tmp_path, layers_block_type=None, num_hidden_layers=2))
    with pytest.raises(UnsupportedModel, match="attention_hidden_size is 64: a block reads 2 · hidden_size elements"):
        read_model_config(changed(tmp_path, num_hidden_layers=5, attention_hidden_size=64))
    with pytest.raises(UnsupportedModel, match="hidden_mamba_act is 'gelu': Mamba layers are supported with silu"):
        read_model_config(changed(tmp_path, attention_hidden_size=None, hidden_mamba_act="gelu"))


def test_a_trained_bias_of_a_shared_block_is_refused(tmp_path):
    """PEFT would load it into the one tensor that all layers of the block read."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    save_family("zamba-2-biased", tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    own = LoraConfig(r=2, target_modules=["1.shared_transformer.feed_forward.down_proj"], bias="lora_only")
    get_peft_model(base, own).save_pretrained(tmp_path / "biased")
    with pytest.raises(AdapterFormatError, match="a bias of down_proj in layer 1, whose block other layers share"):
        inspect_adapter(tmp_path / "biased", read_model_config(tmp_path / "model").module_paths)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2: transformers' low-rank pairs give as many keys"),
        ({"layers_block_type": ["hybrid"]}, "num_hidden_layers is 7: layers_block_type has 1 layers"),
        ({"layers_block_type": ["attention"] * 7}, "attention is not supported; supported: linear_attention, mamba"),
        ({"n_mamba_heads": 7}, "n_mamba_heads is 7: mamba_expand"),
        ({"mamba_ngroups": 3}, "mamba_ngroups is 3: n_mamba_heads, 8, must be a multiple"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads is 3: 2 · hidden_size, 128"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu': not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False: transformers ties blocks by it, too"),
    ],
)
def test_what_can_not_be_computed_is_refused(model, changes, why):
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config(changed(model, **changes))


def test_fields_that_are_missing_have_the_values_of_transformers(model):
    config = read_model_config(changed(model, intermediate_size=None, hidden_act=None, use_long_context=True))
    assert config.layers[1].dense.size == 4 * 64 and config.layers[1].dense.activation is Activation.GELU
    assert config.max_position_embeddings == 16_384
    assert _firsts(config) == [None, 1, None, 3, 1, None, 3]
    assert [layer.invocation for layer in config.layers] == [None, 0, None, 1, 2, None, 3]
    config = read_model_config(changed(model, layers_block_type=["mamba"] * 7))
    assert not config.attention_layers and not any(_firsts(config))
