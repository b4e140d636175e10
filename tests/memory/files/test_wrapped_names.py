"""Adapters trained on a model around the base model, such as one that sees: their layers are the base model's."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModel

from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter

from ...tables import TINY_PATHS
from ..fakes import acquire_whole

pytestmark = pytest.mark.wide

STEMS = ["model.language_model", "language_model.model", "model.text_model", "language_model", ""]


def wrapped(draft, stem):
    level = f"{stem}." if stem else ""
    names = {name: name.replace("base_model.model.model.", f"base_model.model.{level}") for name in draft.tensors}
    draft.tensors = {names[name]: tensor for name, tensor in draft.tensors.items()}
    return draft


def inspect(path):
    return inspect_adapter(path, TINY_PATHS)


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize(
    "targets", [["q_proj", "v_proj"], r"(.*(language_model|text_model))?.*\.(q|v)_proj", r".*\.(q_proj|v_proj)$"]
)
def test_layers_within_a_wrapper_are_mapped(adapter_draft, tiny_engine, resident_weights, tmp_path, stem, targets):
    it = adapter_draft(("q_proj", "v_proj"), target_modules=targets)
    path = wrapped(it.copy(), stem).write(tmp_path / "wrapped")
    assert inspect(path).stem == stem
    plain = it.copy()
    plain.config["target_modules"] = ["q_proj", "v_proj"]
    assert inspect(path).parts == inspect(plain.write(tmp_path / "plain")).parts
    engine = tiny_engine()
    found = []
    for name in ("plain", "wrapped"):
        acquire_whole(engine.store, engine.store.register(name, tmp_path / name))
        found.append(resident_weights(engine, name))
    assert found[0].keys() == found[1].keys()
    for key, (a, b, scale) in found[0].items():
        assert torch.equal(found[1][key][0], a)
        assert torch.equal(found[1][key][1], b)
        assert found[1][key][2] == scale


def test_patterns_see_the_names_that_the_wrapper_has(adapter_draft, tmp_path):
    it = adapter_draft(
        ("q_proj",),
        4,
        ranks=lambda layer, module: 2 if layer == 1 else 4,
        rank_pattern={"model.language_model.layers.1.self_attn.q_proj": 2},
    )
    manifest = inspect(wrapped(it, "model.language_model").write(tmp_path / "a"))
    assert {layer: part.rank for part in manifest.parts for layer in part.layers} == {0: 4, 1: 2, 2: 4}


@pytest.mark.parametrize(
    "options",
    [
        {"task_type": "FEATURE_EXTRACTION", "target_modules": ["q_proj", "down_proj"]},
        {"target_modules": r"layers\.[02]\.self_attn\.(q|k)_proj", "rank_pattern": {"layers.2.self_attn.k_proj": 2}},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    ],
    ids=lambda options: str(options["target_modules"]),
)
def test_what_peft_saves_of_a_model_without_a_head(tiny_base, tiny_engine, resident_weights, tmp_path, options):
    """Keys are `base_model.model.layers.…`: they were refused as if no projection were meant."""
    model = get_peft_model(AutoModel.from_pretrained(tiny_base), LoraConfig(r=4, init_lora_weights=False, **options))
    model.save_pretrained(tmp_path / "headless")
    saved = load_file(tmp_path / "headless" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.layers.") for name in saved)
    it = inspect(tmp_path / "headless")
    assert it.stem == ""
    engine = tiny_engine()
    acquire_whole(engine.store, engine.store.register("headless", tmp_path / "headless"))
    resident = resident_weights(engine, "headless")
    assert 2 * len(resident) == len(saved)
    for (layer, module), (a, b, _) in resident.items():
        block = "self_attn" if module in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
        key = f"base_model.model.layers.{layer}.{block}.{module}"
        assert torch.equal(a, saved[f"{key}.lora_A.weight"])
        assert torch.equal(b, saved[f"{key}.lora_B.weight"])


def test_what_lies_in_two_places_is_refused(adapter_draft, tmp_path):
    it = adapter_draft(("q_proj",))
    both = wrapped(it.copy(), "model.language_model")
    both.tensors |= it.tensors
    with pytest.raises(AdapterFormatError, match="twice, once under another prefix or name: 'base_model"):
        inspect(both.write(tmp_path / "a"))
    first = adapter_draft(("q_proj",), layers=(0,))
    rest = wrapped(adapter_draft(("q_proj",), layers=(1, 2)), "language_model.model")
    mixed = wrapped(first, "model.language_model")
    mixed.tensors |= rest.tensors
    with pytest.raises(AdapterFormatError, match=r"has layers in language_model\.model, model\.language_model"):
        inspect(mixed.write(tmp_path / "b"))


def test_parts_of_the_wrapper_itself_are_refused(adapter_draft, tmp_path):
    it = wrapped(adapter_draft(("q_proj",)), "model.language_model")
    it.tensors["base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"] = torch.ones(4, 16)
    with pytest.raises(AdapterFormatError, match="visual"):
        inspect(it.write(tmp_path / "a"))
