"""Adapters of PEFT's other methods: A and B that are computed, and files that are refused."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.compose.composed import composed
from chorus.core.model.compose.decoder_layer import DecoderLayer
from chorus.core.model.specs.feed_forward import UngatedActivation, UngatedSpec
from chorus.core.model.specs.norms import NormSpec
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.identity import open_unchanged, with_content, with_effect
from chorus.memory.files.module_paths import ModulePaths
from chorus.memory.files.peft_names import tensor_shapes
from chorus.memory.pages.layer_projections import dense_projections
from chorus.memory.pages.projections import Projections

from ...conftest import module_key
from ..loading import CONFIG, WEIGHTS
from ..test_adapter_fuzz import VALUES, edit_header, flip_config, flip_data, flip_header, resize

pytestmark = pytest.mark.wide

#: Wide enough for ranks up to 8 everywhere.
HIDDEN, FFN = 32, 48
DIMS = {"q_proj": (HIDDEN, HIDDEN), "k_proj": (HIDDEN, HIDDEN), "up_proj": (HIDDEN, FFN), "down_proj": (FFN, HIDDEN)}
TABLE = dense_projections(3, hidden=HIDDEN, ffn=FFN, heads=2, kv_heads=2, head_dim=16)
PATHS = ModulePaths(TABLE)
Q0 = f"base_model.model.{module_key(0, 'q_proj')}"


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def loha(rank: int, d_in: int, d_out: int) -> dict[str, torch.Tensor]:
    a, b = drawn(d_out, rank), drawn(rank, d_in)
    return {"hada_w1_a": a, "hada_w1_b": b, "hada_w2_a": a + 1, "hada_w2_b": b - 1}


def lokr(rank: int, d_in: int, d_out: int) -> dict[str, torch.Tensor]:
    return {
        "lokr_w1": drawn(4, 2),
        "lokr_w2_a": drawn(d_out // 4, rank),
        "lokr_w2_b": drawn(rank, d_in // 2),
    }


def vera(rank: int, d_in: int, d_out: int) -> dict[str, torch.Tensor]:
    return {"vera_lambda_b": drawn(d_out), "vera_lambda_d": drawn(rank)}


def adalora(rank: int, d_in: int, d_out: int) -> dict[str, torch.Tensor]:
    return {"lora_A": drawn(rank, d_in), "lora_B": drawn(d_out, rank), "lora_E": drawn(rank, 1)}


def miss(rank: int, d_in: int, d_out: int) -> dict[str, torch.Tensor]:
    return {"miss_block": drawn(rank, d_out)}


def vb_lora(rank: int, d_in: int, d_out: int) -> dict[str, torch.Tensor]:
    tiles_in, tiles_out = d_in // LENGTH, d_out // LENGTH
    return {
        "vblora_logits_A": drawn(rank, tiles_in, VECTORS),
        "vblora_logits_B": drawn(tiles_out, rank, VECTORS, seed=1),
    }


#: Of VB-LoRA's bank.
VECTORS, LENGTH = 10, 8

MAKERS: dict[str, Any] = {
    "LOHA": loha,
    "LOKR": lokr,
    "VERA": vera,
    "ADALORA": adalora,
    "MISS": miss,
    "VBLORA": vb_lora,
}
SHARED = {
    "VERA": {"base_model.vera_A": drawn(2, FFN + 8), "base_model.vera_B": drawn(FFN + 8, 2)},
    "VBLORA": {"base_model.vblora_vector_bank": drawn(VECTORS, LENGTH)},
}


class Draft:
    """An adapter to be: tests change `config` and `tensors`, then write it."""

    def __init__(self, method: str, rank: int = 2, modules: tuple[str, ...] = tuple(DIMS), **config: Any) -> None:
        self.config: dict[str, Any] = {"peft_type": method, "target_modules": list(modules)}
        if method == "ADALORA":
            self.config |= {"init_r": rank, "target_r": 1, "lora_alpha": 6, "r": 8}
        else:
            self.config |= {"r": rank} if method in ("VERA", "MISS", "VBLORA") else {"r": rank, "alpha": 6}
        self.config |= config
        self.tensors = {
            f"base_model.model.{module_key(layer, module)}.{end}": tensor
            for layer in range(3)
            for module in modules
            for end, tensor in MAKERS[method](rank, *DIMS[module]).items()
        }
        self.tensors |= SHARED.get(method, {})

    def write(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        (path / CONFIG).write_text(json.dumps(self.config))
        save_file({name: tensor.contiguous().clone() for name, tensor in self.tensors.items()}, path / WEIGHTS)
        return path


def delta(path: Path, layer: int, module: str, modules: ModulePaths = PATHS) -> torch.Tensor:
    """What an adapter adds to a weight."""
    manifest = inspect_adapter(path, modules)
    part = next(part for part in manifest.parts if module in part.targets and layer in part.layers)
    with open_unchanged(manifest) as file:
        buffer = torch.empty(1 << 16, dtype=torch.uint8)
        shapes = tensor_shapes(layer, modules.projections[module], part.rank)
        a, b = (file.matrix(name, shape, buffer).clone() for name, shape in shapes)
    return part.scale * b @ a


def refusal(draft: Draft, path: Path) -> str:
    with pytest.raises(AdapterFormatError) as caught:
        with_content(inspect_adapter(draft.write(path), PATHS))
    assert str(caught.value).startswith(str(path))
    return str(caught.value)


@pytest.mark.parametrize("module", DIMS)
@pytest.mark.parametrize("method", MAKERS)
def test_the_paper_s_formula(tmp_path, method, module):
    path, parts = Draft(method).write(tmp_path), MAKERS[method](2, *DIMS[module])
    d_in, d_out = DIMS[module]
    if method == "LOHA":
        want = 3 * (parts["hada_w1_a"] @ parts["hada_w1_b"]) * (parts["hada_w2_a"] @ parts["hada_w2_b"])
    elif method == "LOKR":
        want = 3 * torch.kron(parts["lokr_w1"], parts["lokr_w2_a"] @ parts["lokr_w2_b"])
    elif method == "VERA":
        a, b = (SHARED["VERA"][f"base_model.vera_{side}"] for side in "AB")
        want = parts["vera_lambda_b"].diag() @ b[:d_out] @ parts["vera_lambda_d"].diag() @ a[:, :d_in]
    elif method == "MISS":
        want = parts["miss_block"].T.repeat(1, d_in // 2)
    elif method == "VBLORA":
        bank, best = SHARED["VBLORA"]["base_model.vblora_vector_bank"], {}
        for side in "AB":
            logits = parts[f"vblora_logits_{side}"]
            kept = torch.full_like(logits, -torch.inf).scatter(-1, *reversed(logits.topk(2)))
            best[side] = kept.softmax(-1) @ bank
        want = best["B"].transpose(1, 2).flatten(0, 1) @ best["A"].flatten(1)
    else:
        want = 6 / (2 + 1e-5) * parts["lora_B"] @ (parts["lora_A"] * parts["lora_E"])
    torch.testing.assert_close(delta(path, 1, module), want, rtol=1e-4, atol=1e-4)


KRONECKER = {
    "both products": {"lokr_w1_a": (4, 2), "lokr_w1_b": (2, 8), "lokr_w2_a": (8, 2), "lokr_w2_b": (2, 4)},
    "a tall matrix": {"lokr_w1": (8, 4), "lokr_w2_a": (4, 2), "lokr_w2_b": (2, 8)},
    "a matrix on the right": {"lokr_w1_a": (4, 1), "lokr_w1_b": (1, 16), "lokr_w2": (8, 2)},
    "two matrices": {"lokr_w1": (16, 2), "lokr_w2": (2, 16)},
}


@pytest.mark.parametrize("case", KRONECKER)
def test_forms_of_kronecker_products(tmp_path, case):
    it = Draft("LOKR", modules=("q_proj",))
    parts = {name: drawn(*shape) for name, shape in KRONECKER[case].items()}
    rank = min((shape[1] for name, shape in KRONECKER[case].items() if name.endswith("_a")), default=7)
    it.config["r"] = rank
    it.tensors = {
        f"base_model.model.{module_key(layer, 'q_proj')}.{name}": tensor
        for layer in range(3)
        for name, tensor in parts.items()
    }
    one, two = (
        parts[name] if name in parts else parts[f"{name}_a"] @ parts[f"{name}_b"] for name in ("lokr_w1", "lokr_w2")
    )
    found = delta(it.write(tmp_path), 2, "q_proj")
    torch.testing.assert_close(found, 6 / rank * torch.kron(one, two), rtol=1e-4, atol=1e-4)


def test_ranks_that_training_left(tiny_base, tmp_path):
    """AdaLoRA's `rank_pattern` of what each module has kept, with PEFT's deltas; a module may have lost all."""
    from peft import AdaLoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    from ....tables import TINY_PATHS

    config = AdaLoraConfig(
        init_r=4, target_r=2, lora_alpha=5, total_step=9, target_modules=["q_proj", "up_proj"], init_lora_weights=False
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_base), config)
    keys = [module_key(layer, module) for layer in range(3) for module in ("q_proj", "up_proj")]
    kept = {f"{key}.lora_E": [True, False, index % 3 > 0, index % 2 > 0] for index, key in enumerate(keys)}
    kept[f"{keys[-1]}.lora_E"] = [False] * 4
    model.peft_config["default"].rank_pattern = kept
    model.save_pretrained(tmp_path)
    again: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_base), tmp_path)
    manifest = inspect_adapter(tmp_path, TINY_PATHS)
    assert {part.rank for part in manifest.parts} == {1, 2, 3}
    for index, key in enumerate(keys[:-1]):
        module = key.rpartition(".")[2]
        want = again.get_submodule(f"base_model.model.{key}").get_delta_weight("default")
        torch.testing.assert_close(delta(tmp_path, index // 2, module, TINY_PATHS), want.detach())
    assert not any(2 in part.layers and "up_proj" in part.targets for part in manifest.parts)


def test_names_that_trainers_give(tmp_path):
    it, other = Draft("LOHA"), Draft("LOHA")
    it.tensors = {f"module.{name}.default": tensor for name, tensor in it.tensors.items()}
    assert torch.equal(delta(it.write(tmp_path / "a"), 0, "q_proj"), delta(other.write(tmp_path / "b"), 0, "q_proj"))


def test_a_method_on_projections_in_one_matrix(tmp_path):
    parts = tuple((name, HIDDEN) for name in ("q_proj", "k_proj", "v_proj"))
    fused = dataclasses.replace(PATHS, fused=(("self_attn.qkv_proj", parts),))
    own = loha(2, HIDDEN, 3 * HIDDEN)
    it = Draft("LOHA", modules=())
    it.config["target_modules"] = ["qkv_proj"]
    it.tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.qkv_proj.{end}": tensor
        for layer in range(3)
        for end, tensor in own.items()
    }
    path = it.write(tmp_path)
    want = 3 * (own["hada_w1_a"] @ own["hada_w1_b"]) * (own["hada_w2_a"] @ own["hada_w2_b"])
    for index, (name, _) in enumerate(parts):
        rows = want[HIDDEN * index : HIDDEN * (index + 1)]
        torch.testing.assert_close(delta(path, 0, name, fused), rows, rtol=1e-4, atol=1e-4)


def without(end: str):
    def spoil(it: Draft) -> None:
        it.tensors = {name: tensor for name, tensor in it.tensors.items() if not name.endswith(end)}

    return spoil


def with_tensor(name: str, *shape: int):
    def spoil(it: Draft) -> None:
        it.tensors[name] = drawn(*shape)

    return spoil


def with_field(name: str, value: Any):
    def spoil(it: Draft) -> None:
        it.config[name] = value

    return spoil


REFUSED = {
    "a part is missing": ("LOHA", without("hada_w2_b"), "hada_w2_b is missing", Q0.rpartition(".layers")[0]),
    "parts of other ranks": ("LOHA", with_tensor(f"{Q0}.hada_w1_b", 3, HIDDEN), "hada_w1_b [3, 32]", "do not fit"),
    "a part of three dimensions": ("LOHA", with_tensor(f"{Q0}.hada_w1_b", 2, 16, 2), "[2, 16, 2], a matrix is needed"),
    "another rank": ("LOHA", with_field("r", 3), "LoHa of q_proj in layer 0 has rank 2", "it is 3"),
    "another rank of LoKr": ("LOKR", with_field("r", 1), "LoKr of q_proj in layer 0 has rank 2", "it is 1"),
    "another rank of VeRA": ("VERA", with_field("r", 1), "VeRA of q_proj in layer 0 has rank 2", "it is 1"),
    "another width": ("LOHA", lambda it: it.tensors.update(
        {f"{Q0}.hada_w{n}_b": drawn(2, 16) for n in (1, 2)}
    ), "hada_w1_a and hada_w1_b", "[4, 16], [4, 32] is needed"),
    "a convolution's": ("LOHA", with_tensor(f"{Q0}.hada_t1", 2, 2, 1, 1), "hada_t1' is none of hada_w1_a, "),
    "whole and in parts": ("LOKR", with_tensor(f"{Q0}.lokr_w2", 8, 16), "lokr_w2 is there as a matrix and as a"),
    "two ranks": ("LOKR", lambda it: [
        it.tensors.pop(f"{Q0}.lokr_w1"),
        it.tensors.update({f"{Q0}.lokr_w1_a": drawn(4, 1), f"{Q0}.lokr_w1_b": drawn(1, 2)}),
    ], "the ranks of lokr_w1_a and lokr_w2_a are 1 and 2"),
    "no product": ("LOKR", with_tensor(f"{Q0}.lokr_w2_b", 3, 16), "lokr_w2_a has 2 columns, and lokr_w2_b 3 rows"),
    "no projections": ("VERA", without(("vera_A", "vera_B")), "save_projection=False", "rank=r)"),
    "projections too narrow": ("VERA", with_tensor("base_model.vera_A", 2, 16), "[2, 16], [2, 32] is needed"),
    "projections too short": ("VERA", with_tensor("base_model.vera_B", 16, 2), "at least [32, 2]"),
    "projections wider than any module": (
        "VERA", with_tensor("base_model.vera_A", 2, 5000), "[2, 5000], more than any module of the base model has",
    ),
    "a bias": ("VERA", with_field("bias", "some"), "bias is 'some'"),
    "another rank of MiSS": ("MISS", with_field("r", 3), "MiSS of q_proj in layer 0 has rank 2", "it is 3"),
    "MiSS of a block for each weight": ("MISS", with_tensor(f"{Q0}.miss_block", 4, 2, 2), "[4, 2, 2], a matrix is"),
    "MiSS by the base model": ("MISS", with_field("init_weights", "bat"), "'bat'", "peft.save_as_lora(DIR, "),
    "MiSS without outputs": ("MISS", with_field("init_weights", "mini"), "'mini'", "peft.save_as_lora(DIR, "),
    "MiSS of other outputs": ("MISS", with_tensor(f"{Q0}.miss_block", 2, 31), "q_proj.miss_block has shape [31, 2]"),
    "no logits": ("VBLORA", without("logits_B"), "vblora_logits_B is missing"),
    "no bank": ("VBLORA", without("vector_bank"), "vblora_vector_bank is missing"),
    "another bank": (
        "VBLORA", with_tensor("base_model.vblora_vector_bank", 7, 8), "vblora_vector_bank [7, 8] do not fit",
    ),
    "too few vectors": ("VBLORA", with_field("topk", 11), "do not fit each other and topk, 11"),
    "no vectors": ("VBLORA", with_field("topk", 0), "topk is 0, a number from 1 is needed"),
    "logits of two dimensions": ("VBLORA", with_tensor(f"{Q0}.vblora_logits_A", 2, 4), "three dimensions are needed"),
    "numbers of vectors": ("VBLORA", with_field("save_only_topk_weights", True), "save_only_topk_weights", "peft.save"),
    "AdaLoRA of another rank": ("ADALORA", with_field("init_r", 3), "are 2, 2 and 2, by rank_pattern and init_r 3"),
    "no value of a rank": ("ADALORA", with_tensor(f"{Q0}.lora_E", 1, 1), "are 2, 2 and 1"),
    "no rank": ("ADALORA", with_field("init_r", "all"), "init_r 'all' is needed"),
    "no alpha": ("LOHA", with_field("alpha", "8"), "lora_alpha is '8'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_refused(tmp_path, case):
    method, spoil, *words = REFUSED[case]
    it = Draft(method)
    spoil(it)
    message = refusal(it, tmp_path / "a")
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(("method", "rank", "found"), [("LOHA", 3, 9), ("LOKR", 5, 10), ("VERA", 9, 9)])
def test_ranks_above_a_quarter_of_the_smaller_side_are_refused(tmp_path, monkeypatch, method, rank, found):
    monkeypatch.setitem(SHARED, "VERA", {"base_model.vera_A": drawn(rank, FFN), "base_model.vera_B": drawn(FFN, rank)})
    message = refusal(Draft(method, rank), tmp_path / "a")
    assert f"is LoRA of rank {found}, and at most 8 are served there" in message
    assert "peft.save_as_lora(DIR, model, rank=R)" in message


def test_what_takes_no_more_than_the_file_may_have_any_rank(tmp_path):
    assert inspect_adapter(Draft("ADALORA", 20).write(tmp_path), PATHS).rank == 20


@pytest.mark.parametrize("method", MAKERS)
def test_content_hashes(tmp_path, method):
    """Of the content, wherever it is; another value of any part makes another."""
    it = Draft(method)
    first = with_content(inspect_adapter(it.write(tmp_path / "1"), PATHS))
    again = with_content(inspect_adapter(it.write(tmp_path / "2"), PATHS))
    assert first.content_hash == again.content_hash and not first.no_effect
    for name in [name for name in it.tensors if name.startswith((Q0, "base_model.v"))]:
        other = Draft(method)
        other.tensors = {**it.tensors, name: it.tensors[name] + 1}
        assert with_content(inspect_adapter(other.write(tmp_path / "3"), PATHS)).content_hash != first.content_hash


@pytest.mark.parametrize(
    ("method", "zero"),
    [
        ("LOHA", "hada_w2_b"),
        ("LOKR", "lokr_w1"),
        ("VERA", "vera_lambda_b"),
        ("ADALORA", "lora_E"),
        ("MISS", "miss_block"),
        ("VBLORA", "vblora_vector_bank"),
    ],
)
def test_adapters_before_training_have_no_effect(tmp_path, method, zero):
    it = Draft(method)
    it.tensors = {name: tensor * (not name.endswith(zero)) for name, tensor in it.tensors.items()}
    assert with_effect(inspect_adapter(it.write(tmp_path), PATHS)).no_effect


def test_equal_mixtures_have_an_effect(tmp_path):
    """Logits of zero are equal weights."""
    it = Draft("VBLORA")
    it.tensors = {name: tensor * ("bank" in name) for name, tensor in it.tensors.items()}
    assert not with_effect(inspect_adapter(it.write(tmp_path), PATHS)).no_effect


def test_values_that_overflow_are_named_by_the_file_s_tensors(tmp_path):
    from chorus.server.cli.check import check

    it = Draft("LOHA")
    it.tensors[f"{Q0}.hada_w1_b"] *= float("inf")
    verdict = check(it.write(tmp_path), None)
    assert verdict.status == "refused"
    assert re.search(r"q_proj\.hada_w1_a and .* holds NaN or infinity", verdict.reasons[0]), verdict.reasons


def test_a_file_of_lora_under_another_method_s_name(tmp_path):
    it = Draft("LOHA")
    path = it.write(tmp_path)
    save_file({f"{Q0}.lora_A.weight": drawn(2, HIDDEN), f"{Q0}.lora_B.weight": drawn(HIDDEN, 2)}, path / WEIGHTS)
    with pytest.raises(AdapterFormatError, match=r"is LoRA's, but peft_type in"):
        inspect_adapter(path, PATHS)
    assert load_file(path / WEIGHTS)


def edit_config(path: Path, rng: random.Random) -> None:
    fields = json.loads((path / CONFIG).read_text())
    fields[rng.choice([*fields, "rank_pattern", "bias", "fan_in_fan_out", "layers_to_transform"])] = rng.choice(VALUES)
    (path / CONFIG).write_text(json.dumps(fields))


@pytest.mark.parametrize("method", MAKERS)
def test_damaged_files_are_read_or_refused(tmp_path, method):
    rng, outcomes = random.Random(method), set()
    good = Draft(method).write(tmp_path / "good")
    for number in range(60):
        path = shutil.copytree(good, tmp_path / str(number))
        rng.choice([flip_header, flip_config, flip_data, resize, edit_header, edit_config])(path, rng)
        try:
            manifest = with_content(inspect_adapter(path, PATHS))
            for part in manifest.parts:
                delta(path, part.layers[0], part.targets[0])
            outcomes.add("read")
        except AdapterFormatError as error:
            assert str(path) in str(error) and len(str(error)) < 1500
            outcomes.add("refused")
        shutil.rmtree(path)
    assert outcomes == {"read", "refused"}


def ia3(**fields: Any) -> Draft:
    """Scales of outputs of k_proj and of up_proj, and of inputs of down_proj."""
    it = Draft("LOHA", modules=("k_proj", "up_proj", "down_proj"), feedforward_modules=["down_proj"], **fields)
    it.config["peft_type"] = "IA3"
    it.tensors = {
        f"base_model.model.{module_key(layer, module)}.ia3_l": drawn(*shape)
        for layer in range(3)
        for module, shape in (("k_proj", (HIDDEN, 1)), ("up_proj", (FFN, 1)), ("down_proj", (1, FFN)))
    }
    return it


def test_scales_of_outputs_and_of_the_inputs_that_they_are(tmp_path):
    manifest = with_content(inspect_adapter(ia3().write(tmp_path), PATHS))
    assert manifest.form == "PEFT's IA³" and manifest.rank == 1 and not manifest.no_effect
    assert {target.module for target in manifest.vectors} == {"k_proj", "up_proj"}
    assert {target.module for target in manifest.vectors if target.has_scale_of_next} == {"up_proj"}
    assert not delta(tmp_path, 1, "down_proj").any()


def test_every_scale_is_part_of_the_content(tmp_path):
    hashes = set()
    for name in (
        None,
        *(f"base_model.model.{module_key(1, each)}.ia3_l" for each in ("k_proj", "up_proj", "down_proj")),
    ):
        it = ia3()
        if name is not None:
            it.tensors[name] = it.tensors[name] + 1
        hashes.add(with_content(inspect_adapter(it.write(tmp_path / str(len(hashes))), PATHS)).content_hash)
    assert len(hashes) == 4


SCALES_REFUSED = {
    "inputs of another module": (f"{Q0}.ia3_l", (1, HIDDEN), "scales inputs, which is served of down_proj"),
    "a head": ("base_model.model.lm_head.ia3_l", (64, 1), "lm_head"),
    "neither": (f"{Q0}.ia3_l", (2, HIDDEN), "[2, 32], one row of inputs or one column of outputs is needed"),
    "other outputs": (f"{Q0}.ia3_l", (HIDDEN - 1, 1), "q_proj.ia3_l has shape [31], [32] is needed"),
    "other inputs": (
        f"base_model.model.{module_key(0, 'down_proj')}.ia3_l",
        (1, FFN - 1),
        "down_proj.ia3_l has shape [47], [48] is needed",
    ),
    "a convolution's": (f"{Q0}.ia3_l", (HIDDEN, 1, 1), "a matrix is needed"),
}


@pytest.mark.parametrize("case", SCALES_REFUSED)
def test_scales_that_are_refused(tmp_path, case):
    name, shape, why = SCALES_REFUSED[case]
    it = ia3()
    it.tensors[name] = drawn(*shape)
    it.config["target_modules"] = ["k_proj", "up_proj", "down_proj"] + ["q_proj"] * ("q_proj" in name)
    if "q_proj" in name:
        it.tensors |= {f"base_model.model.{module_key(layer, 'q_proj')}.ia3_l": drawn(HIDDEN, 1) for layer in (1, 2)}
    assert why in refusal(it, tmp_path / "a")


def fused_paths(path: str, *parts: str) -> ModulePaths:
    """The base model's modules, of which some are the rows of one matrix."""
    rows = tuple((name, TABLE[name].outputs) for name in parts)
    return dataclasses.replace(PATHS, fused=((path, rows),))


def on_fused(it: Draft, path: str, **tensors: torch.Tensor) -> Draft:
    """The adapter on such a matrix alone."""
    it.config["target_modules"] = [path.rpartition(".")[2]]
    it.tensors = {
        f"base_model.model.model.layers.{layer}.{path}.{end}": tensor
        for layer in range(3)
        for end, tensor in tensors.items()
    }
    return it


@pytest.mark.parametrize(
    "fused",
    [("self_attn.qkv_proj", "q_proj", "k_proj", "v_proj"), ("mlp.gate_up_proj", "gate_proj", "up_proj")],
    ids=["qkv", "gate_up"],
)
def test_inputs_of_projections_in_one_matrix(tmp_path, fused):
    """The reason is not the shape of a tensor that the file does not have."""
    it = on_fused(ia3(), fused[0], ia3_l=drawn(1, HIDDEN))
    it.config["feedforward_modules"] = it.config["target_modules"]
    with pytest.raises(AdapterFormatError, match=rf"{fused[0]}\.ia3_l' scales inputs, .* merge it with PEFT"):
        inspect_adapter(it.write(tmp_path), fused_paths(*fused))


def test_inputs_of_another_size_are_named_as_the_file_does(tmp_path):
    path = "self_attn.qk_proj"
    it = on_fused(Draft("LOHA"), path, **loha(2, HIDDEN - 1, 2 * HIDDEN))
    with pytest.raises(AdapterFormatError, match=rf"tensor .*{path}\.hada_w1_a.* has shape \[4, 31\]"):
        inspect_adapter(it.write(tmp_path), fused_paths(path, "q_proj", "k_proj"))


@pytest.mark.parametrize(("method", "rank", "found"), [("LOHA", 4, 16), ("LOKR", 5, 10)])
def test_ranks_of_projections_in_one_matrix_are_limited_by_it(tmp_path, method, rank, found):
    path, own = "self_attn.qk_proj", MAKERS[method]
    modules = fused_paths(path, "q_proj", "k_proj")
    it = on_fused(Draft(method, rank), path, **own(rank, HIDDEN, 2 * HIDDEN))
    with pytest.raises(AdapterFormatError, match=rf"of qk_proj in layer 0 is LoRA of rank {found}, and at most 8 are"):
        inspect_adapter(it.write(tmp_path / "much"), modules)
    narrow = dataclasses.replace(TABLE["k_proj"], outputs=HIDDEN // 4)
    table = Projections(tuple(tuple(narrow if each.name == "k_proj" else each for each in one) for one in TABLE.layers))
    modules = dataclasses.replace(modules, projections=table, fused=((path, (("q_proj", HIDDEN), ("k_proj", 8))),))
    it = on_fused(Draft("LOHA"), path, **loha(2, HIDDEN, HIDDEN + 8))
    assert inspect_adapter(it.write(tmp_path / "little"), modules).rank == 4, "more than a quarter of k_proj's rows"


def test_inputs_of_a_part_without_a_gate(tmp_path):
    """Its activation is of up_proj's outputs, so no scale of these is one of down_proj's inputs."""
    layer = composed(DecoderLayer(None, UngatedSpec(FFN, UngatedActivation.RELU_SQUARED)), NormSpec(1e-6), HIDDEN)
    ungated = [(*own[:4], *layer.projections) for own in TABLE.layers]
    it = ia3().write(tmp_path)
    with pytest.raises(AdapterFormatError, match=r"down_proj\.ia3_l' scales inputs, .* merge it with PEFT"):
        inspect_adapter(it, dataclasses.replace(PATHS, projections=Projections(tuple(ungated))))
