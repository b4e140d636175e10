"""Adapters of LyCORIS are the same in pages as PEFT's of the same matrices; what has no A and B is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter, is_adapter_dir
from chorus.memory.files.identity import open_unchanged, with_content
from chorus.memory.files.module_paths import ModulePaths
from chorus.memory.files.peft_names import tensor_shapes
from chorus.memory.files.tensor_uses import form_in_words, uses_of
from chorus.memory.pages.layer_projections import dense_projections, model_projections
from chorus.memory.pages.projections import Projections

from .loading import CONFIG, WEIGHTS

pytestmark = pytest.mark.wide

TABLE = Projections(
    dense_projections(3, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16).layers, model_projections(80, 64, 80)
)
PATHS = ModulePaths(TABLE)
MODULES = ("q_proj", "k_proj", "up_proj", "down_proj")
RANK, ALPHA = 2, 3.0


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def lora(d_in: int, d_out: int, rank: int = RANK) -> dict[str, torch.Tensor]:
    return {"lora_up.weight": drawn(d_out, rank), "lora_down.weight": drawn(rank, d_in)}


def loha(d_in: int, d_out: int) -> dict[str, torch.Tensor]:
    a, b = drawn(d_out, RANK), drawn(RANK, d_in)
    return {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": a + 1, "hada_w2_b": b - 1}


def lokr(d_in: int, d_out: int) -> dict[str, torch.Tensor]:
    return {"lokr_w1": drawn(4, 4), "lokr_w2_a": drawn(d_out // 4, RANK), "lokr_w2_b": drawn(RANK, d_in // 4)}


ALGORITHMS: dict[str, Any] = {"lora": lora, "loha": loha, "lokr": lokr}


def written(path: Path, modules: dict[str, dict[str, torch.Tensor]], name: str = "last.safetensors") -> Path:
    """A file in LyCORIS's layout. modules: by their names in the model."""
    path.mkdir(parents=True)
    tensors = {
        f"lycoris_{module.replace('.', '_')}.{part}": tensor.contiguous().clone()
        for module, parts in modules.items()
        for part, tensor in ({"alpha": torch.tensor(ALPHA)} | parts).items()
    }
    save_file(tensors, path / name)
    return path


def modules_of(algorithm: str) -> dict[str, dict[str, torch.Tensor]]:
    return {
        f"model.layers.{layer}.{each.path}": ALGORITHMS[algorithm](each.inputs, each.outputs)
        for layer in range(TABLE.num_layers)
        for each in map(TABLE.__getitem__, MODULES)
    }


def as_peft(path: Path, algorithm: str, modules: dict[str, dict[str, torch.Tensor]]) -> Path:
    path.mkdir(parents=True)
    names = {"lora_up.weight": "lora_B.weight", "lora_down.weight": "lora_A.weight"}
    tensors = {
        f"base_model.model.{module}.{names.get(part, part)}": tensor.contiguous().clone()
        for module, parts in modules.items()
        for part, tensor in parts.items()
    }
    save_file(tensors, path / WEIGHTS)
    alpha = "lora_alpha" if algorithm == "lora" else "alpha"
    fields = {"peft_type": algorithm.upper(), "r": RANK, alpha: ALPHA, "target_modules": list(MODULES)}
    (path / CONFIG).write_text(json.dumps(fields))
    return path


def deltas(path: Path) -> dict[tuple[int, str], torch.Tensor]:
    """What an adapter adds to each weight."""
    manifest, found = with_content(inspect_adapter(path, PATHS)), {}
    buffer = torch.empty(1 << 16, dtype=torch.uint8)
    with open_unchanged(manifest) as file:
        for part in manifest.parts:
            for layer in part.layers:
                for module in part.targets:
                    shapes = tensor_shapes(layer, TABLE[module], part.rank)
                    a, b = (file.matrix(name, shape, buffer).clone() for name, shape in shapes)
                    found[layer, module] = part.scale * b @ a
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_as_peft_s(tmp_path, algorithm):
    modules = modules_of(algorithm)
    own, want = deltas(written(tmp_path / "own", modules)), deltas(as_peft(tmp_path / "peft", algorithm, modules))
    assert own.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(own[key], value)


def test_alphas_and_ranks_of_each_module(tmp_path):
    """LyCORIS keeps them with each module; 0 is the rank."""
    alphas = {"q_proj": 8.0, "k_proj": 0.0, "down_proj": 0.5}
    modules = {
        f"model.layers.1.{TABLE[name].path}": lora(*TABLE[name].dims, rank=rank) | {"alpha": torch.tensor(alphas[name])}
        for rank, name in enumerate(alphas, 1)
    }
    found = deltas(written(tmp_path / "a", modules))
    for rank, (name, alpha) in enumerate(alphas.items(), 1):
        parts = modules[f"model.layers.1.{TABLE[name].path}"]
        want = (alpha or rank) / rank * parts["lora_up.weight"] @ parts["lora_down.weight"]
        torch.testing.assert_close(found[1, name], want)


def test_two_whole_matrices_have_no_factor(tmp_path):
    """With full_matrix; LyCORIS sets alpha to a rank that the file does not tell."""
    q = TABLE["q_proj"]
    parts = {"lokr_w1": drawn(16, 2), "lokr_w2": drawn(q.outputs // 16, q.inputs // 2)}
    found = deltas(written(tmp_path / "a", {"model.layers.0.self_attn.q_proj": parts}))
    torch.testing.assert_close(found[0, "q_proj"], parts["lokr_w1"].kron(parts["lokr_w2"]))


def test_names_of_other_prefixes_and_models_around(tmp_path):
    parts = lora(*TABLE["q_proj"].dims)
    plain = deltas(written(tmp_path / "plain", {"model.layers.2.self_attn.q_proj": parts}))
    for number, prefix in enumerate(
        ("lycoris_model_language_model", "lora_te_model", "lora_unet_model", "lycoris.model")
    ):
        path = tmp_path / str(number)
        path.mkdir()
        tensors = {f"{prefix}_layers_2_self_attn_q_proj.{end}": tensor for end, tensor in parts.items()}
        tensors = {name.replace("lycoris.model_", "model_"): tensor for name, tensor in tensors.items()}
        alpha = {f"{next(iter(tensors)).partition('.')[0]}.alpha": torch.tensor(ALPHA)}
        save_file(tensors | alpha, path / "x.safetensors")
        assert torch.equal(deltas(path)[2, "q_proj"], plain[2, "q_proj"])


def test_a_head(tmp_path):
    head = lora(TABLE["lm_head"].inputs, TABLE["lm_head"].outputs)
    manifest = inspect_adapter(written(tmp_path / "a", {"lm_head": head, **modules_of("lora")}), PATHS)
    assert "lm_head" in manifest.targets


def test_magnitudes(tmp_path):
    modules = {
        name: parts | {"dora_scale": drawn(parts["hada_w1_a"].shape[0], 1)}
        for name, parts in modules_of("loha").items()
    }
    manifest = inspect_adapter(written(tmp_path / "a", modules), PATHS)
    assert len(manifest.vectors) == len(modules) and all(target.has_magnitude for target in manifest.vectors)


def test_the_form_in_words(tmp_path):
    path = written(tmp_path / "a", modules_of("loha"))
    assert is_adapter_dir(path)
    manifest = inspect_adapter(path, PATHS)
    assert form_in_words(manifest) == "LyCORIS"
    uses = uses_of(manifest)
    assert (
        "a part of A, which is computed (LoHa), of layers.0.self_attn.q_proj"
        in uses["lycoris_model_layers_0_self_attn_q_proj.hada_w1_b"]
    )


Q = "model.layers.0.self_attn.q_proj"
D_IN, D_OUT = TABLE["q_proj"].dims
REFUSED = {
    "full": ({Q: {"diff": drawn(D_OUT, D_IN)}}, r"q_proj\.diff' is the whole difference .*merge_to\(\)"),
    "diag-oft": ({Q: {"oft_blocks": drawn(4, 2, 2)}}, r"q_proj\.oft_blocks' is a rotation .*merge_to\(\)"),
    "glora": ({Q: {"a1.weight": drawn(D_OUT, 2)}}, r"q_proj\.a1\.weight' is of algo glora; .*merge_to\(\)"),
    "tlora": ({Q: {"lambda_layer": drawn(1, 2)}}, r"q_proj\.lambda_layer' is of algo tlora; .*merge_to\(\)"),
    "ia3": ({Q: {"weight": drawn(D_OUT), "on_input": torch.tensor(0.0)}}, r"of algo ia3, .* train it with algo lora"),
    "a norm": ({"model.norm": {"w_norm": drawn(D_IN)}}, r"w_norm' is of a norm"),
    "a convolution": ({Q: loha(D_IN, D_OUT) | {"hada_t1": drawn(2, 2, 1, 1)}}, r"hada_t1' is of a convolution"),
    "another module": ({"model.layers.0.conv": lora(D_IN, D_OUT)}, r"_layers_0_conv' are of no projection"),
    "another layer": ({"model.layers.77.self_attn.q_proj": lora(D_IN, D_OUT)}, r"_layers_77_.* are of no projection"),
    "no alpha": ({Q: {**lora(D_IN, D_OUT), "alpha": torch.zeros(0)}}, r"q_proj': alpha is missing, or not one number"),
    "alpha of NaN": ({Q: {**lora(D_IN, D_OUT), "alpha": torch.tensor(torch.nan)}}, r"alpha is nan; the file is"),
    "no A": ({Q: {"lora_up.weight": drawn(D_OUT, 2)}}, r"lora_down\.weight is missing"),
    "scales of inputs": ({Q: {**lora(D_IN, D_OUT), "dora_scale": drawn(1, D_IN)}}, r"train with wd_on_output=True"),
    "magnitudes of the head": (
        {"lm_head": {**lora(D_IN, TABLE["lm_head"].outputs), "dora_scale": drawn(TABLE["lm_head"].outputs, 1)}},
        r"lm_head': dora_scale is served of projections of layers; train without it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_refused(tmp_path, case):
    modules, why = REFUSED[case]
    path = written(tmp_path / "a", modules)
    with pytest.raises(AdapterFormatError, match=why):
        inspect_adapter(path, PATHS)


@pytest.mark.parametrize("name", ["model.safetensors", WEIGHTS])
def test_other_files_without_a_configuration(tmp_path, name):
    save_file({"model.layers.0.self_attn.q_proj.weight": drawn(4, 4)}, tmp_path / name)
    assert not is_adapter_dir(tmp_path)
    with pytest.raises(AdapterFormatError, match=r"adapter_config\.json: not found"):
        inspect_adapter(tmp_path, PATHS)
