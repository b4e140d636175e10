"""Families whose layers are a mixer or a feed-forward part alone: adapters, names and refusals."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.module_paths import ExpertForm

from ...conftest import quiet
from ...kept import KeptAnswers, kept_files
from ..adapters.model_module_forms import Alone
from ..paths.asked import answers, told
from ..test_families import executor_of
from ..tiny_families import ATTENTION, load_peft, save_family

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

#: name → arguments of `LoraConfig`: all that PEFT can target of Nemotron 3, and rows of embeddings.
FORMS = {
    "all": {
        "target_modules": [*ATTENTION, "in_proj", "up_proj", "down_proj", "embeddings"],
        "target_parameters": ["mixer.experts.up_proj", "mixer.experts.down_proj"],
    },
    "rows": {"target_modules": ["in_proj"], "trainable_token_indices": {"embeddings": [3, 149, 22, 23]}},
}


@pytest.fixture
def kernels():
    """The native decoder computes those without experts."""
    return "auto"


@quiet()
def save_forms(root):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    save_family("nemotron-3", root / "model")
    for name, arguments in FORMS.items():
        torch.manual_seed(len(name))
        lora = LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **arguments)
        peft = get_peft_model(AutoModelForCausalLM.from_pretrained(root / "model"), lora)
        with torch.no_grad():
            for path, parameter in peft.named_parameters():
                if "trainable_tokens_delta" in path:
                    parameter.add_(torch.randn_like(parameter))
        peft.save_pretrained(root / name)


@pytest.fixture(scope="module")
def it():
    root = kept_files("forms nemotron-3", save_forms)
    return Alone(root / "model", {name: root / name for name in FORMS}, load_peft, KeptAnswers(root))


def test_experts_and_embeddings_by_the_names_that_peft_writes(it, drive):
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24)
    want = answers(it, driver, 6, seed=4, adapters=(None, *FORMS))
    assert told(driver, want) == want
    targets = driver.engine.store.get("all").manifest.targets
    assert {"embed_tokens", "experts.up_proj", "experts.down_proj", "shared_expert.up_proj", "in_proj"} <= set(targets)


def test_a_tensor_of_each_expert(it, drive, tmp_path):
    """As PEFT has them where experts are modules, in NVIDIA's code: the same deltas give the same tokens."""
    count, tensors = read_model_config(it.model).experts.count, {}
    for name, tensor in load_file(it.adapters["all"] / "adapter_model.safetensors").items():
        begin, found, end = name.partition(".experts.")
        if not found:
            tensors[name] = tensor
            continue
        is_a = end.endswith("lora_A.weight")
        twin = name.replace("lora_A", "lora_B") if is_a else name
        outputs = load_file(it.adapters["all"] / "adapter_model.safetensors")[twin].shape[0]
        matrix = "down_proj" if outputs == 64 else "up_proj"
        rows = tensor.view(count, -1, tensor.shape[1]) if is_a else tensor.view(len(tensor), -1, count).permute(2, 0, 1)
        for number, own in enumerate(rows):
            tensors[f"{begin}.experts.{number}.{matrix}.{end.removeprefix('base_layer.')}"] = own.contiguous()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = json.loads((it.adapters["all"] / "adapter_config.json").read_text())
    assert config.pop("target_parameters")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    driver = drive(it, adapters={"all": tmp_path}, max_num_seqs=8, max_num_batched_tokens=24)
    assert driver.engine.store.get("all").manifest.modules.experts is ExpertForm.EACH
    want = answers(it, driver, 4, seed=4, adapters=(None, "all"))
    assert told(driver, want) == want


def test_names_of_nvidias_code(it, drive, tmp_path):
    """Layers are in `backbone`, as in published checkpoints, or in `model`; types may be letters."""
    shutil.copytree(it.model, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    assert sum(name.startswith("backbone.layers.") for name in tensors) > 50
    save_file({name.replace("backbone.", "model."): tensor for name, tensor in tensors.items()}, path)
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    types = [letters[kind] for kind in config.pop("layers_block_type")]
    path.write_text(json.dumps({**config, "hybrid_override_pattern": "".join(types)}))
    shutil.copytree(it.adapters["rows"], tmp_path / "rows")
    path = tmp_path / "rows" / "adapter_model.safetensors"
    own = {name.replace(".model.model.", ".model.backbone."): tensor for name, tensor in load_file(path).items()}
    save_file(own, path)
    driver = drive(Alone(tmp_path / "model", {"rows": tmp_path / "rows"}, load_peft))
    prompt, want = it.case("rows", 20, seed=7)
    driver.add("rows", "rows", prompt, max_tokens=8)
    assert told(driver, {"rows": want}) == {"rows": want}


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"layers_block_type": ["moe", "ssm"]}, "layers_block_type"),
        ({"n_groups": 3}, "n_groups"),
        ({"layers_block_type": ["mlp", "mlp"]}, "no layer has attention or a recurrent mixer"),
    ],
)
def test_what_is_not_computed_is_refused(it, tmp_path, values, match):
    config = json.loads((it.model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(UnsupportedModel, match=match):
        read_model_config(tmp_path)


def test_nulls_are_read_or_refused_as_in_transformers(it, tmp_path):
    config = json.loads((it.model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "moe_latent_size": None}))
    assert read_model_config(tmp_path) == read_model_config(it.model)
    for name in ("use_bias", "mlp_bias"):
        (tmp_path / "config.json").write_text(json.dumps({**config, name: None}))
        with pytest.raises(UnsupportedModel, match=f"{name} is None: transformers takes no null here"):
            read_model_config(tmp_path)


def test_pages_are_of_the_layers_that_have_them(tiny):
    """KV of layers with attention, states of those with Mamba 2."""
    config = read_model_config(tiny("nemotron-3").model)
    assert (config.num_layers, len(config.kv_layers), config.num_recurrent_layers) == (7, 1, 2)
    layout = executor_of(tiny("nemotron-3").model, dtype="float32").layout
    assert (layout.num_layers, layout.states.shape.num_layers) == (1, 2)
    targets = inspect_adapter(tiny("nemotron-3").adapters["r3-all"], config.module_paths).parts
    assert {layer for part in targets for layer in part.layers} == {0, 2, 3, 5}
