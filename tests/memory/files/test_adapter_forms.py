"""Adapters in other forms than PEFT's are read as PEFT's own."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from chorus.memory.adapters.image import ImageForm, read_image
from chorus.memory.files.directory import AdapterDirectory
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter, is_adapter_dir, weights_path
from chorus.memory.files.identity import with_content, with_effect
from chorus.memory.files.mlx_form import MlxForm
from chorus.memory.files.module_paths import ModulePaths
from chorus.memory.host.buffers import HostBuffers
from chorus.memory.host.image import HostImage
from chorus.memory.pages.adapter_layout import AdapterLayout

from ...tables import TINY, TINY_PATHS
from ..conftest import DIMS, module_key
from .loading import CONFIG, WEIGHTS, load, refusal

pytestmark = pytest.mark.wide

PREFIX = "base_model.model."
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
FUSED = ModulePaths(
    TINY,
    fused=tuple(
        (path, tuple((name, TINY[name].outputs) for name in names))
        for path, names in (("self_attn.qkv_proj", QKV), ("mlp.gate_up_proj", GATE_UP))
    ),
)


def image_of(path, modules=TINY_PATHS):
    """The manifest and the image of an adapter, and its rank-rows by PEFT's names."""
    manifest = inspect_adapter(path, modules)
    layout = AdapterLayout.build(manifest.parts, TINY, 1024, 4, vectors=manifest.vectors)
    image = HostImage()
    read_image(manifest, ImageForm(layout, TINY, 1024, torch.float32), image, HostBuffers())
    return manifest, image.data


def same(path, other, modules=TINY_PATHS):
    """Both adapters have the same ranks, scales and weights."""
    (one, ones), (two, twos) = image_of(path, modules), image_of(other, modules)
    assert one.parts == two.parts
    assert torch.equal(ones, twos)
    return one


# -- MLX


def write_mlx(it, path, **fields):
    """The adapter of a draft as `mlx_lm.lora` saves it."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in it.tensors.items():
        module, side = name.removeprefix(PREFIX).rsplit(".lora_", 1)
        end = "m" if side.startswith("magnitude") else f"lora_{side[0].lower()}"
        tensors[f"{module}.{end}"] = tensor.T.contiguous() if tensor.ndim == 2 else tensor
    save_file(tensors, path / "adapters.safetensors", metadata={"format": "mlx"})
    save_file(tensors, path / "0000100_adapters.safetensors")
    config = {
        "fine_tune_type": "dora" if it.config.get("use_dora") else "lora",
        "model": "mlx-community/Tiny-4bit",
        "num_layers": 3,
        "lora_parameters": {"rank": it.config["r"], "dropout": 0.0, "scale": it.config["lora_alpha"] / it.config["r"]},
        "iters": 600,
        "seed": 0,
        "train": True,
    }
    (path / CONFIG).write_text(json.dumps({**config, **fields}))
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mlx(adapter_draft, tmp_path, dtype):
    it = adapter_draft(rank=5, dtype=dtype, lora_alpha=100)
    manifest = same(write_mlx(it, tmp_path / "mlx"), it.write(tmp_path / "peft"))
    assert manifest.base_model == "mlx-community/Tiny-4bit"
    assert {part.scale for part in manifest.parts} == {20.0}
    assert weights_path(tmp_path / "mlx").name == "adapters.safetensors"


def test_mlx_of_the_last_layers(adapter_draft, tmp_path):
    it = adapter_draft(("q_proj", "down_proj"), layers=(1, 2), layers_to_transform=[1, 2])
    same(write_mlx(it, tmp_path / "mlx", num_layers=2), it.write(tmp_path / "peft"))
    for count in (-1, 0, 99):
        same(write_mlx(it, tmp_path / f"all {count}", num_layers=count), tmp_path / "peft")


def test_mlx_layers_are_checked_before_any_tensor_was_read(adapter_draft, tmp_path):
    path = write_mlx(adapter_draft(("q_proj",)), tmp_path / "mlx", num_layers=1)
    with AdapterDirectory(path) as directory, pytest.raises(AdapterFormatError, match=r"num_layers is 1: .* layer 0"):
        MlxForm().config(directory, ["model.layers.0.self_attn.q_proj"], TINY_PATHS)


def test_mlx_content(adapter_draft, tmp_path):
    """Its hash is of the content; another content has another hash, and transposed bytes mean something else."""
    one = with_content(inspect_adapter(write_mlx(adapter_draft(seed=1), tmp_path / "1"), TINY_PATHS))
    again = with_content(inspect_adapter(write_mlx(adapter_draft(seed=1), tmp_path / "2"), TINY_PATHS))
    other = with_content(inspect_adapter(write_mlx(adapter_draft(seed=2), tmp_path / "3"), TINY_PATHS))
    assert one.content_hash == again.content_hash != other.content_hash
    assert not one.no_effect
    zero = adapter_draft()
    zero.tensors = {name: tensor * ("lora_A" in name) for name, tensor in zero.tensors.items()}
    assert with_effect(inspect_adapter(write_mlx(zero, tmp_path / "4"), TINY_PATHS)).no_effect


def with_magnitudes(it):
    """As DoRA, with a magnitude for each output."""
    it.config["use_dora"] = True
    it.tensors |= {
        name.replace("lora_B.weight", "lora_magnitude_vector"): torch.rand(tensor.shape[0]) + 0.5
        for name, tensor in it.tensors.items()
        if name.endswith("lora_B.weight")
    }
    return it


def test_mlx_dora(adapter_draft, tmp_path):
    it = with_magnitudes(adapter_draft(("q_proj", "up_proj")))
    one = same(write_mlx(it, tmp_path / "mlx"), it.write(tmp_path / "peft"))
    assert one.vectors == inspect_adapter(tmp_path / "peft", TINY_PATHS).vectors != ()


def test_mlx_dora_refused(adapter_draft, tmp_path):
    """Magnitudes and the kind of training that the configuration tells must be of one another."""
    it = with_magnitudes(adapter_draft(("q_proj",)))
    message = refusal(write_mlx(it, tmp_path / "a", fine_tune_type="lora"))
    assert "q_proj.m' is unexpected" in message
    message = refusal(write_mlx(adapter_draft(("q_proj",)), tmp_path / "b", fine_tune_type="dora"))
    assert "q_proj.lora_magnitude_vector is missing" in message


MLX_REFUSED = {
    "all weights": ({"fine_tune_type": "full"}, "fine_tune_type is 'full'", "only lora and dora", "mlx_lm.fuse"),
    "no parameters": ({"lora_parameters": None}, "lora_parameters is None", "rank and scale"),
    "no rank": ({"lora_parameters": {"scale": 1}}, "lora_parameters.rank is None"),
    "no scale": ({"lora_parameters": {"rank": 4}}, "lora_parameters.scale is None"),
    "alpha": ({"lora_parameters": {"rank": 4, "alpha": 16, "scale": 10.0}}, "lora_parameters.alpha is 16", "remove"),
    "another rank": ({"lora_parameters": {"rank": 3, "scale": 1.0}}, "[4, 16]", "[3, 16]"),
    "fewer layers": ({"num_layers": 1}, "num_layers is 1", "layer 0"),
    "no number of layers": ({"num_layers": "all"}, "num_layers is 'all'"),
    "infinite scale": ({"lora_parameters": {"rank": 4, "scale": float("inf")}}, "lora_alpha is inf"),
}


@pytest.mark.parametrize("case", MLX_REFUSED)
def test_mlx_refused(adapter_draft, tmp_path, case):
    fields, *words = MLX_REFUSED[case]
    message = refusal(write_mlx(adapter_draft(), tmp_path / "a", **fields))
    assert message.startswith(str(tmp_path / "a"))
    assert [word for word in words if word not in message] == []


def test_mlx_tensors_refused(adapter_draft, tmp_path):
    it = adapter_draft()
    it.tensors[f"{PREFIX}model.embed_tokens.lora_A.weight"] = torch.ones(4, 40)
    assert "embed_tokens" in refusal(write_mlx(it, tmp_path / "a"))
    it = adapter_draft()
    del it.tensors[f"{PREFIX}model.layers.1.mlp.up_proj.lora_B.weight"]
    assert "missing" in refusal(write_mlx(it, tmp_path / "b"))


# -- GGUF

LLAMA_CPP = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "qkv_proj": "attn_qkv",
    "gate_up_proj": "ffn_up",
}


def permuted(tensor, heads):
    """As `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


HEADS = {"q_proj": 2, "k_proj": 1}


def write_gguf(it, path, architecture="llama", *, outtype=np.float32, name="lora.gguf", heads=HEADS, **fields):
    """The adapter of a draft as `convert_lora_to_gguf.py` saves it. fields: further ones, or others' values."""
    path.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path / name, architecture)
    known = {"general.type": "adapter", "adapter.type": "lora", **fields}
    alpha = known.pop("adapter.lora.alpha", float(it.config["lora_alpha"]))
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for key, value in known.items():
        writer.add_array(key, value) if isinstance(value, list) else writer.add_string(key, value)
    for key, tensor in it.tensors.items():
        *_, layer, _, module, side, _ = key.split(".")
        values = tensor.float().numpy()
        if architecture == "llama" and module in heads and side == "lora_B":
            values = permuted(values, heads[module])
        writer.add_tensor(f"blk.{layer}.{LLAMA_CPP[module]}.weight.{side.lower()}", values.astype(outtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("outtype", [np.float32, np.float16])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_gguf(adapter_draft, tmp_path, architecture, outtype):
    it = adapter_draft(rank=5, dtype=torch.float16 if outtype is np.float16 else torch.float32)
    path = write_gguf(it, tmp_path / "gguf", architecture, outtype=outtype)
    assert is_adapter_dir(path)
    same(path, it.write(tmp_path / "peft"))
    same(path / "lora.gguf", tmp_path / "peft")
    assert inspect_adapter(path / "lora.gguf", TINY_PATHS, [tmp_path]).path == path / "lora.gguf"


def test_gguf_outside_the_roots(adapter_draft, tmp_path):
    path = write_gguf(adapter_draft(), tmp_path / "gguf")
    (tmp_path / "roots").mkdir()
    (tmp_path / "roots" / "a.gguf").symlink_to(path / "lora.gguf")
    with pytest.raises(AdapterFormatError, match="outside the directories"):
        inspect_adapter(tmp_path / "roots" / "a.gguf", TINY_PATHS, [tmp_path / "roots"])


def test_gguf_of_several_ranks(adapter_draft, tmp_path):
    """The scale is alpha / rank of each tensor, as with PEFT's rank_pattern."""
    it = adapter_draft(
        ranks=lambda layer, module: 7 if module == "q_proj" else 4, rank_pattern={"q_proj": 7}, lora_alpha=6
    )
    same(write_gguf(it, tmp_path / "gguf"), it.write(tmp_path / "peft"))


def test_gguf_activated(adapter_draft, tmp_path):
    path = write_gguf(adapter_draft(), tmp_path / "a", **{"adapter.alora.invocation_tokens": [5, 6]})
    assert inspect_adapter(path, TINY_PATHS).invocation_tokens == (5, 6)


def test_gguf_of_fused_projections(adapter_draft, tmp_path):
    it = fused(adapter_draft())
    path = write_gguf(it, tmp_path / "gguf", "phi3")
    same(path, it.write(tmp_path / "peft"), FUSED)


GGUF_REFUSED = {
    "a model": ({"general.type": "model"}, "general.type is 'model'", "'adapter' is needed"),
    "a control vector": ({"adapter.type": "control"}, "adapter.type is 'control'", "'lora' is needed"),
    "no alpha": ({"adapter.lora.alpha": None}, "adapter.lora.alpha is None", "convert_lora_to_gguf"),
    "alpha of 0": ({"adapter.lora.alpha": 0.0}, "adapter.lora.alpha is 0.0"),
    "NaN": ({"adapter.lora.alpha": float("nan")}, "adapter.lora.alpha is nan"),
}


@pytest.mark.parametrize("case", GGUF_REFUSED)
def test_gguf_refused(adapter_draft, tmp_path, case):
    fields, *words = GGUF_REFUSED[case]
    message = refusal(write_gguf(adapter_draft(), tmp_path / "a", **fields))
    assert message.startswith(str(tmp_path / "a" / "lora.gguf"))
    assert [word for word in words if word not in message] == []


def test_gguf_of_an_unknown_architecture(adapter_draft, tmp_path):
    message = refusal(write_gguf(adapter_draft(), tmp_path / "a", "falcon"))
    assert "general.architecture is 'falcon'" in message and "llama" in message


def test_gguf_tensors_refused(adapter_draft, tmp_path):
    it = adapter_draft()
    it.tensors[f"{PREFIX}model.layers.3.mlp.up_proj.lora_A.weight"] = torch.ones(4, 16)
    assert "layer 3" in refusal(write_gguf(it, tmp_path / "a"))
    it = adapter_draft()
    del it.tensors[f"{PREFIX}model.layers.1.mlp.up_proj.lora_B.weight"]
    assert "missing" in refusal(write_gguf(it, tmp_path / "b"))


def test_two_gguf_files_are_no_adapter(adapter_draft, tmp_path):
    path = write_gguf(adapter_draft(), tmp_path / "a")
    write_gguf(adapter_draft(), path, name="other.gguf")
    assert not is_adapter_dir(path)
    assert "not found" in refusal(path)
    load(path / "other.gguf")


# -- projections in one matrix


def fused(it, *paths):
    """The adapter of a base that has q, k and v in one matrix, and gate and up: equal A, B one above another."""
    it = it.copy()
    for path, names in (("self_attn.qkv_proj", QKV), ("mlp.gate_up_proj", GATE_UP)):
        if paths and path not in paths:
            continue
        for layer in range(3):
            own = [f"{PREFIX}model.layers.{layer}.{path.split('.')[0]}.{name}" for name in names]
            a = [it.tensors.pop(f"{each}.lora_A.weight") for each in own]
            b = [it.tensors.pop(f"{each}.lora_B.weight") for each in own]
            key = f"{PREFIX}model.layers.{layer}.{path}"
            it.tensors[f"{key}.lora_A.weight"], it.tensors[f"{key}.lora_B.weight"] = a[0], torch.cat(b)
        module = path.split(".")[1]
        it.config["target_modules"] = [name for name in it.config["target_modules"] if name not in names] + [module]
    return it


def shared(it):
    """With the same A for projections that a base may have in one matrix."""
    for layer in range(3):
        for part, names in (("self_attn", QKV), ("mlp", GATE_UP)):
            keys = [f"{PREFIX}model.layers.{layer}.{part}.{name}.lora_A.weight" for name in names]
            it.tensors |= {key: it.tensors[keys[0]].clone() for key in keys[1:]}
    return it


@pytest.mark.parametrize("paths", [(), ("self_attn.qkv_proj",), ("mlp.gate_up_proj",)])
@pytest.mark.parametrize("modules", [TINY_PATHS, FUSED])
def test_fused_or_separate_adapters_on_fused_or_separate_bases(adapter_draft, tmp_path, paths, modules):
    it = shared(adapter_draft())
    (one, ones) = image_of(fused(it, *paths).write(tmp_path / "fused"), modules)
    (two, twos) = image_of(it.write(tmp_path / "separate"))
    assert one.parts == two.parts
    assert torch.equal(ones, twos)


def test_separate_adapters_on_a_fused_base(adapter_draft, tmp_path):
    """Of any of them, with an A of its own each and ranks by PEFT's names."""
    it = adapter_draft(("q_proj", "up_proj"), ranks=lambda _, name: 3 if name == "q_proj" else 4)
    it.config["rank_pattern"] = {"q_proj": 3}
    same(it.write(tmp_path / "a"), it.write(tmp_path / "b"))
    (one, ones), (two, twos) = image_of(tmp_path / "a", FUSED), image_of(tmp_path / "a")
    assert one.parts == two.parts and torch.equal(ones, twos)


def test_fused_and_separate_at_once_is_refused(adapter_draft, tmp_path):
    it = adapter_draft()
    it.tensors |= fused(it).tensors
    it.config["target_modules"].append("qkv_proj")
    for modules in (TINY_PATHS, FUSED):
        with pytest.raises(AdapterFormatError, match=r"_proj\.lora_A\.weight, which is there a second time"):
            inspect_adapter(it.write(tmp_path / "a"), modules)


def test_a_fused_matrix_of_other_rows_is_refused(adapter_draft, tmp_path):
    it = fused(adapter_draft())
    key = f"{PREFIX}model.layers.0.self_attn.qkv_proj.lora_B.weight"
    it.tensors[key] = it.tensors[key][:-1]
    message = refusal(it.write(tmp_path / "a"))
    assert key in message and "32 rows are needed" in message


# -- names that trainers give

RENAMED = {
    "no prefix": lambda name: name.removeprefix(PREFIX),
    "a headless model's": lambda name: name.removeprefix(f"{PREFIX}model."),
    "the adapter's name": lambda name: name.replace(".weight", ".default.weight"),
    "another adapter's name": lambda name: name.replace(".weight", ".my-lora_2.weight"),
    "both": lambda name: name.removeprefix(PREFIX).replace(".weight", ".default.weight"),
    "data parallel": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "sharded": lambda name: f"module._fsdp_wrapped_module.{name}",
}


@pytest.mark.parametrize("case", RENAMED)
def test_names_that_trainers_give(adapter_draft, tmp_path, case):
    it, other = adapter_draft(), adapter_draft()
    other.tensors = {RENAMED[case](name): tensor for name, tensor in it.tensors.items()}
    same(other.write(tmp_path / "other"), it.write(tmp_path / "peft"))


def test_two_adapters_in_one_file_are_refused(adapter_draft, tmp_path):
    it = adapter_draft()
    it.tensors = {
        name.replace(".weight", ".first.weight" if "layers.0" in name else ".second.weight"): tensor
        for name, tensor in it.tensors.items()
    }
    message = refusal(it.write(tmp_path / "a"))
    assert "several adapters ('first', 'second')" in message and WEIGHTS in message


AUTO_MAPPING = {
    "base_model_class": "LlamaForCausalLM",
    "parent_library": "transformers.models.llama.modeling_llama",
    "unsloth_fixed": True,
}

#: Further files and fields as trainers write them, none of which changes what the adapter computes.
TRAINERS = {
    "unsloth": (
        {"unsloth_fixed": True, "auto_mapping": AUTO_MAPPING, "runtime_config": {"ephemeral_gpu_offload": False}},
        ("README.md", "tokenizer.json", "special_tokens_map.json"),
    ),
    "axolotl": ({"peft_version": "0.17.1", "corda_config": None}, ("README.md", "config.json", "trainer_state.json")),
    "llama-factory": ({"modules_to_save": None}, ("all_results.json", "trainer_log.jsonl", "training_loss.png")),
    "ms-swift": (
        {"lora_dtype": None, "lorap_lr_ratio": None, "lorap_emb_lr": 1e-6},
        ("additional_config.json", "args.json"),
    ),
    "tinker": ({"lora_dropout": 0, "inference_mode": True}, ("checkpoint_complete",)),
    "trl": ({"trainable_token_indices": None, "target_parameters": None}, ("training_args.bin", "optimizer.pt")),
    "nemo": (
        {"megatron_config": None, "megatron_core": "megatron.core", "task_type": None, "bias": "none"},
        ("run_config.yaml", "automodel_peft_config.json"),
    ),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_further_files_and_fields(adapter_draft, tmp_path, trainer):
    fields, files = TRAINERS[trainer]
    path = adapter_draft(**fields).write(tmp_path / "a")
    for name in files:
        (path / name).write_bytes(b"{}")
    same(path, adapter_draft().write(tmp_path / "peft"))


#: Modules as trainers name them, of an adapter of all projections.
NAMED = {
    "tinker": "all-linear",
    "nemo": [module_key(layer, module) for layer in range(3) for module in DIMS],
    "unsloth": r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|"
    r"attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)))",
    "ms-swift": r"^(model(?=\.).*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj))$",
}


@pytest.mark.parametrize("trainer", NAMED)
def test_modules_as_trainers_name_them(adapter_draft, tmp_path, trainer):
    it = adapter_draft()
    it.config["target_modules"] = NAMED[trainer]
    same(it.write(tmp_path / "a"), adapter_draft().write(tmp_path / "peft"))


def test_a_pattern_of_more_than_linear_modules_is_refused(adapter_draft, tmp_path):
    """Of older ms-swift, which changes PEFT so that others are passed over; PEFT itself refuses it, too."""
    it = adapter_draft()
    it.config["target_modules"] = r"^(model)(?!.*(lm_head|output|emb|wte|shared)).*"
    message = refusal(it.write(tmp_path / "a"))
    assert f"{CONFIG}: target_modules matches model.layers; only" in message and "exclude_modules" in message


def test_earlier_steps_and_further_adapters_beside_it(adapter_draft, tmp_path):
    """Directories of checkpoints, logs and TRL's reference adapter, each with files of the same names."""
    path = adapter_draft().write(tmp_path / "a")
    for name in ("checkpoint-500", "reference"):
        adapter_draft(rank=1).write(path / name)
    (path / "runs" / "Jan01_00-00-00").mkdir(parents=True)
    same(path, adapter_draft().write(tmp_path / "peft"))


BASE_CHANGING = {
    "pissa": "path_initial_model_for_weight_conversion=INITIAL",
    "pissa_niter_16": "path_initial_model_for_weight_conversion=INITIAL",
    "olora": "path_initial_model_for_weight_conversion=INITIAL",
    "OLoRA": "path_initial_model_for_weight_conversion=INITIAL",
    "corda": "path_initial_model_for_weight_conversion=INITIAL",
    "lora_ga": "path_initial_model_for_weight_conversion=INITIAL",
    "loftq": "serve the base model that was saved with it",
}


@pytest.mark.parametrize("value", BASE_CHANGING)
def test_initialisations_that_change_the_base(adapter_draft, tmp_path, value):
    message = refusal(adapter_draft(init_lora_weights=value).write(tmp_path / "a"))
    assert f"{CONFIG}: init_lora_weights is {value!r}" in message
    assert BASE_CHANGING[value] in message


def test_the_conversion_that_the_message_names(tiny_base, tmp_path):
    """PEFT's own call makes an adapter that is served, and adds what the trained one did."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_base)
    before = base.model.layers[0].self_attn.q_proj.weight.detach().clone()
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=4, init_lora_weights="olora")
    model = get_peft_model(base, config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "initial")
    layer: Any = next(module for name, module in model.named_modules() if name.endswith("layers.0.self_attn.q_proj"))
    with torch.no_grad():
        layer.get_submodule("lora_B.default").weight.add_(1)
    model.peft_config["default"].init_lora_weights = "olora"
    model.save_pretrained(tmp_path / "raw")
    assert "path_initial_model_for_weight_conversion" in refusal(tmp_path / "raw")
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    manifest, _ = image_of(tmp_path / "plain")
    assert manifest.rank == 8
    again = AutoModelForCausalLM.from_pretrained(tiny_base)
    from peft import PeftModel

    plain = PeftModel.from_pretrained(again, tmp_path / "plain").merge_and_unload()
    trained = layer.base_layer.weight + layer.get_delta_weight("default")
    assert torch.allclose(plain.model.layers[0].self_attn.q_proj.weight, trained, atol=1e-5)
    assert not torch.allclose(before, trained)


def test_forms_share_what_is_equal(adapter_draft, tmp_path):
    paths = [fused(adapter_draft(seed=seed)).write(tmp_path / str(seed)) for seed in range(3)]
    first, *others = [inspect_adapter(path, TINY_PATHS) for path in paths]
    assert all(other.modules is first.modules and other.parts is first.parts for other in others)
    assert dataclasses.replace(first, path=others[0].path).targets == TINY.names
