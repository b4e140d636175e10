"""Families whose layers have attention of several shapes: adapters, checkpoints and pages. For paths, see `paths`."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.checkpoints.quantization.groups import plain
from chorus.core.model.checkpoints.quantization.round_to_nearest import quantiser_of
from chorus.core.model.read_config import read_model_config
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter

from ..adapters.test_added_tokens import save_added
from ..test_families import executor_of, logits_of
from ..tiny_families import SHAPES, make_all_linear, save_family

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


@pytest.fixture
def kernels():
    """The native decoder, where it is built."""
    return "auto"


NATIVE = ("gemma-4", "gemma-4-biased", "gemma-4-unified")
"""Those that the native decoder computes."""

every_family = pytest.mark.parametrize("family", SHAPES)


def test_adapters_are_on_inputs_of_layers():
    it = make_all_linear("gemma-4-inputs")
    found = inspect_adapter(it.adapters["all"], read_model_config(it.model).module_paths)
    assert {"per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"} <= {*found.targets}


def test_keys_that_layers_do_not_use_are_left_out(tiny, tmp_path):
    """Published checkpoints have them, and adapters that were trained with them as modules."""
    model = tmp_path / "model"
    shutil.copytree(tiny("gemma-4-inputs").model, model)
    index = json.loads((model / "model.safetensors.index.json").read_text())
    names = [f"model.layers.{layer}.self_attn.{name}.weight" for layer in (3, 5) for name in ("k_proj", "k_norm")]
    index["weight_map"] |= dict.fromkeys(names, "more.safetensors")
    save_file({name: torch.ones(4, 4) for name in names}, model / "more.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert logits_of(executor_of(model), [[3, 4, 5]]).isfinite().all()
    adapter, modules = tiny("gemma-4-inputs").adapters["r3-all"], read_model_config(model).module_paths
    shutil.copytree(adapter, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    more = {f"base_model.model.model.layers.4.self_attn.k_proj.lora_{side}.weight": torch.ones(3, 3) for side in "AB"}
    save_file(load_file(file) | more, file)
    found = inspect_adapter(tmp_path / "adapter", modules)
    assert found.num_left_out == 2
    assert found.parts == inspect_adapter(adapter, modules).parts


def test_added_tokens_have_no_inputs_of_layers(tiny, tmp_path):
    model = tiny("gemma-4-inputs").model
    save_added(model, tmp_path, 0, 153, target_modules=["q_proj"], trainable_token_indices=[3, 150, 151, 152])
    with pytest.raises(AdapterFormatError, match="adds token 150 to the vocabulary, for which the base model has no"):
        inspect_adapter(tmp_path, read_model_config(model).module_paths)


@every_family
def test_configuration_and_frequencies_are_transformers_own(tiny, family):
    import transformers

    it = tiny(family)
    config = read_model_config(it.model)
    want = transformers.AutoConfig.from_pretrained(it.model)
    rotary = it.reference.base_model.model.model.rotary_emb
    for index, (layer, kind) in enumerate(zip(config.layers, want.layer_types, strict=True)):
        its = (getattr(want, "per_layer_config", None) or [want] * config.num_layers)[index]
        own = layer.attention
        assert torch.equal(own.rope.inverse_frequencies(), getattr(rotary, f"{kind}_original_inv_freq"))
        assert (own.num_kv_heads, own.head_dim) == (its.num_key_value_heads, its.head_dim)
        assert own.window == (want.sliding_window if kind == "sliding_attention" else None)


def test_quantised_weights_are_transformers_own_rounded(tmp_path):
    """Those of layers' projections, of their inputs too; not the one that makes these."""
    from transformers import AutoModelForCausalLM

    save_family("gemma-4-inputs", tmp_path)
    reference, rounding = AutoModelForCausalLM.from_pretrained(tmp_path), quantiser_of("int8", False, None)
    assert rounding is not None
    with torch.inference_mode():
        for name, module in reference.named_modules():
            if isinstance(module, torch.nn.Linear) and ".layers." in name:
                module.weight.copy_(plain(rounding(module.weight.clone(), name, "cpu"), torch.float32))
        want = reference(torch.tensor([range(3, 43)]), use_cache=False).logits[0, -1]
    got = logits_of(executor_of(tmp_path, dtype="float32", quantization="int8"), [list(range(3, 43))])
    assert torch.allclose(got[0], want, rtol=1e-4, atol=1e-4)


def test_random_weights_need_no_checkpoint(tmp_path):
    save_family("gemma-4", tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    executor = executor_of(tmp_path, load_format="dummy")
    assert isinstance(executor, CpuExecutor)
    assert logits_of(executor, [[3, 4, 5]]).isfinite().all()


def test_a_page_has_as_many_layers_as_fit(tiny):
    """One layer with 2 heads of 32, or two with 2 heads of 16."""
    layout = executor_of(tiny("gemma-4-unified").model).layout
    assert [len(group.layers) for group in layout.groups] == [1, 2]
    assert layout.page_bytes == layout.block_tokens * 2 * 64 * 4
