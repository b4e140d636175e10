"""What becomes of each tensor, in words: of every form of files, by the files' own names."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.tensor_uses import form_in_words, uses_of

from ...tables import TINY_PATHS
from .loading import WEIGHTS
from .methods.test_methods import PATHS
from .methods.test_methods import Draft as MethodDraft
from .test_adapter_forms import FUSED, fused, shared, with_magnitudes, write_gguf, write_mlx

pytestmark = pytest.mark.wide

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def told(path, modules=TINY_PATHS):
    manifest = inspect_adapter(path, modules)
    return form_in_words(manifest), uses_of(manifest)


def test_peft_s_own(adapter_draft, tmp_path):
    it = with_magnitudes(adapter_draft(("q_proj", "up_proj")))
    form, uses = told(it.write(tmp_path))
    assert form == "PEFT's LoRA" and uses.keys() == it.tensors.keys()
    assert uses[f"{Q0}.lora_A.weight"] == "A of layers.0.self_attn.q_proj"
    assert uses["base_model.model.model.layers.2.mlp.up_proj.lora_B.weight"] == "B of layers.2.mlp.up_proj"
    assert uses[f"{Q0}.lora_magnitude_vector"] == "magnitudes of layers.0.self_attn.q_proj"


@pytest.mark.parametrize("modules", [TINY_PATHS, FUSED])
def test_one_matrix_of_several_projections(adapter_draft, tmp_path, modules):
    _, uses = told(fused(shared(adapter_draft())).write(tmp_path), modules)
    names = "layers.0.self_attn.q_proj, layers.0.self_attn.k_proj, layers.0.self_attn.v_proj"
    for side in "AB":
        assert uses[f"base_model.model.model.layers.0.self_attn.qkv_proj.lora_{side}.weight"] == f"{side} of {names}"


def test_mlx_and_gguf(adapter_draft, tmp_path):
    form, uses = told(write_mlx(with_magnitudes(adapter_draft(("q_proj",))), tmp_path / "mlx"))
    assert form == "MLX" and uses["model.layers.1.self_attn.q_proj.lora_a"] == "A of layers.1.self_attn.q_proj"
    assert uses["model.layers.1.self_attn.q_proj.m"] == "magnitudes of layers.1.self_attn.q_proj"
    form, uses = told(write_gguf(adapter_draft(("q_proj",)), tmp_path / "gguf"))
    assert form == "llama.cpp's GGUF" and uses["blk.2.attn_q.weight.lora_b"] == "B of layers.2.self_attn.q_proj"


def test_other_methods(tmp_path):
    form, uses = told(MethodDraft("LOHA").write(tmp_path / "loha"), PATHS)
    assert form == "PEFT's LoHa"
    computed = "which is computed (LoHa), of layers.0.self_attn.q_proj"
    assert uses[f"{Q0}.hada_w1_a"] == f"a part of B, {computed}"
    assert uses[f"{Q0}.hada_w1_b"] == f"a part of A, {computed}"
    _, uses = told(MethodDraft("VERA").write(tmp_path / "vera"), PATHS)
    assert uses["base_model.vera_A"].startswith("a part of A, which is computed (VeRA), of 12 modules, layers.0.")


def test_what_is_not_used(adapter_draft, tmp_path):
    """Tensors of a vision tower."""
    from dataclasses import replace

    path = adapter_draft(("q_proj",)).write(tmp_path)
    tower = "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"
    save_file(load_file(path / WEIGHTS) | {tower: torch.ones(4, 4)}, path / WEIGHTS)
    _, uses = told(path, replace(TINY_PATHS, left_out=("model.visual.",)))
    assert uses[tower].startswith("not used: outside the text model")
    assert sum(use.startswith("not used") for use in uses.values()) == 1
