"""`chorus check` and `chorus convert-adapter`: dry runs and conversions, as CI has them."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.server.cli.command import main, make_parser
from chorus.server.cli.unpickle import MAX_TENSORS

from ...core.adapters.adapter_zoo import save_zoo
from ...tables import hybrid_table

pytestmark = pytest.mark.wide

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"


@pytest.fixture
def gqa(subject):
    return subject("gqa")


@pytest.fixture
def adapter(gqa, tmp_path):
    return shutil.copytree(gqa.adapters["r2-qv"], tmp_path / "adapter")


def checked(*args):
    out = io.StringIO()
    arguments = make_parser().parse(["check", *map(str, args), "--json"])
    code = arguments.run(arguments, out)
    return code, json.loads(out.getvalue())["adapters"]


def edit(adapter, **fields):
    (adapter / CONFIG).write_text(json.dumps(json.loads((adapter / CONFIG).read_text()) | fields))


def test_an_adapter_that_is_served(gqa, adapter):
    edit(adapter, base_model_name_or_path=f"org/{gqa.model.name}-bnb-4bit")
    for model in (["--model", gqa.model], []):
        code, (one,) = checked(adapter, *model)
        assert code == 0
        assert one["status"] == "served" and one["reasons"] == []
        assert one["rank"] == 2 and one["target_modules"] == ["q_proj", "v_proj"] and len(one["content_hash"]) == 64
        assert one["form"] == "PEFT's LoRA" and one["tensors"].keys() == load_file(adapter / WEIGHTS).keys()


def test_what_each_tensor_is_used_for(gqa, adapter, capsys):
    assert main(["check", str(adapter), "--model", str(gqa.model)]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert main(["check", str(adapter), "--model", str(gqa.model), "--tensors"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert "form PEFT's LoRA, rank 2" in first and len(others) == len(load_file(adapter / WEIGHTS))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert f"  '{name}': A of layers.0.self_attn.q_proj" in others


def test_refusals_and_differences_have_their_exit_codes(gqa, adapter, tmp_path, capsys):
    other = shutil.copytree(adapter, tmp_path / "other")
    edit(other, base_model_name_or_path="org/other-7b")
    idle = shutil.copytree(adapter, tmp_path / "idle")
    tensors = load_file(idle / WEIGHTS)
    save_file(
        {name: torch.zeros_like(one) if "lora_B" in name else one for name, one in tensors.items()}, idle / WEIGHTS
    )
    broken = shutil.copytree(adapter, tmp_path / "broken")
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] * float("nan")}, broken / WEIGHTS)
    edit(idle, base_model_name_or_path=None)
    code, (first, second) = checked(other, idle, "--model", gqa.model)
    assert code == 3 and first["status"] == second["status"] == "differs"
    assert "'org/other-7b'" in first["reasons"][0] and "has no effect" in second["reasons"][0]
    code, found = checked(other, broken, tmp_path / "nowhere", "--model", gqa.model)
    assert code == 1 and [one["status"] for one in found] == ["differs", "refused", "refused"]
    assert "NaN" in found[1]["reasons"][0] and "no such directory" in found[2]["reasons"][0]
    assert main(["check", str(broken)]) == 1
    assert capsys.readouterr().out.startswith("refused: ")


def test_a_refused_adapter_of_another_model_is_said_to_be_one(gqa, adapter):
    """Of a tensor that no layer has the reason tells nothing of the model that it was trained on."""
    tensors = load_file(adapter / WEIGHTS)
    save_file({name.replace("layers.0", "layers.70"): one for name, one in tensors.items()}, adapter / WEIGHTS)
    edit(adapter, base_model_name_or_path=f"org/{gqa.model.name}")
    code, (one,) = checked(adapter, "--model", gqa.model)
    assert code == 1 and len(one["reasons"]) == 1
    edit(adapter, base_model_name_or_path="org/other-7b")
    code, (one,) = checked(adapter, "--model", gqa.model)
    assert code == 1 and one["reasons"][1:] == ["it was trained on 'org/other-7b', which is not this model"]
    edit(adapter, r=3)
    code, (one,) = checked(adapter)
    assert code == 1 and len(one["reasons"]) == 1, "without a model there is no other"


def test_without_a_model_the_files_must_agree_with_themselves(adapter):
    edit(adapter, r=3)
    code, (one,) = checked(adapter)
    assert code == 1 and "its rank is 2" in one["reasons"][0]


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_dora_and_biases(tmp_path, bias):
    """With and without a model, whose weights are not read; a bias of a module without LoRA among them."""
    forms = {"it": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"], "use_dora": True, "bias": bias}}
    zoo = save_zoo(tmp_path, biased=True, forms=forms)
    (zoo.model / "model.safetensors").unlink()
    for model in (["--model", zoo.model], []):
        code, (one,) = checked(zoo.adapters["it"], *model)
        assert code == 0, one
        assert ("k_proj" in one["target_modules"]) == (bias == "all")


@pytest.mark.parametrize("names", [hybrid_table().names, ("in_proj_z", "up_proj"), ("q_proj", "out_proj")])
def test_without_a_model_layers_may_be_of_two_kinds(tmp_path, names):
    tensors = {}
    for layer, projections in enumerate(hybrid_table("LLAL").layers):
        for each in projections:
            if each.name in names:
                key = f"base_model.model.model.layers.{layer}.{each.path}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(2, each.inputs)
                tensors[f"{key}.lora_B.weight"] = torch.randn(each.outputs, 2)
    save_file(tensors, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": list(names)}))
    code, (one,) = checked(tmp_path)
    assert code == 0, one["reasons"]
    assert sorted(one["target_modules"]) == sorted(names)
    name = next(name for name in tensors if "linear_attn" in name)
    save_file(tensors | {name: tensors[name][:, :3].contiguous()}, tmp_path / WEIGHTS)
    code, (one,) = checked(tmp_path)
    assert code == 1 and "shape" in one["reasons"][0]


def test_without_a_model_files_of_a_tokenizer_are_named_as_not_checked(adapter, capsys):
    (adapter / "added_tokens.json").write_text("[]")
    assert main(["check", str(adapter)]) == 0
    assert "not checked without --model added_tokens.json" in capsys.readouterr().out
    code, (verdict,) = checked(adapter)
    assert code == 0 and verdict["unchecked_files"] == ["added_tokens.json"]


def test_a_model_that_is_none_is_an_error(adapter, tmp_path, capsys):
    assert main(["check", str(adapter), "--model", str(tmp_path / "nowhere")]) == 1
    assert "neither a directory nor a known model" in capsys.readouterr().err


# -- conversion


def as_pickle(adapter, content=None):
    tensors = load_file(adapter / WEIGHTS)
    (adapter / WEIGHTS).unlink()
    torch.save(tensors if content is None else content, adapter / PICKLE)
    return tensors


@pytest.mark.wide
def test_a_pickle_becomes_the_same_tensors(gqa, adapter, tmp_path, capsys):
    before = checked(adapter, "--model", gqa.model)[1][0]["content_hash"]
    as_pickle(adapter)
    assert "chorus convert-adapter" in checked(adapter)[1][0]["reasons"][0]
    assert main(["convert-adapter", str(adapter), "--out", str(tmp_path / "new")]) == 0
    assert sorted(os.listdir(tmp_path / "new")) == [CONFIG, WEIGHTS]
    assert main(["convert-adapter", str(adapter)]) == 0
    for path in (adapter, tmp_path / "new"):
        assert checked(path, "--model", gqa.model)[1][0]["content_hash"] == before
    assert main(["convert-adapter", str(adapter)]) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_a_pickle_with_tensors_of_each_expert_is_converted(adapter):
    names = [f"base_model.model.model.layers.0.mlp.experts.{n}.up_proj.lora_A.weight" for n in range(36_864)]
    as_pickle(adapter, dict.fromkeys(names, torch.ones(1)))
    assert main(["convert-adapter", str(adapter)]) == 0
    assert load_file(adapter / WEIGHTS).keys() == set(names)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "case",
    [
        "code",
        "plain pickle",
        "cut",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("expanded", "no tensors", "too many")),
    ],
)
def test_what_is_no_adapters_weights_is_refused_and_nothing_is_left(adapter, tmp_path, capsys, case):
    done = tmp_path / "was-executed"
    content = {
        "code": {"a": Evil(done)},
        "plain pickle": None,
        "expanded": {"a": torch.ones(1).expand(1 << 34)},
        "no tensors": {"a": [1, 2]},
        "too many": {str(n): torch.ones(1) for n in range(MAX_TENSORS + 1)},
        "cut": None,
    }[case]
    as_pickle(adapter, content)
    before = sorted(os.listdir(adapter))
    if case == "plain pickle":
        (adapter / PICKLE).write_bytes(pickle.dumps({"a": Evil(done)}))
    if case == "cut":
        (adapter / PICKLE).write_bytes((adapter / PICKLE).read_bytes()[:500])
    assert main(["convert-adapter", str(adapter)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("chorus: error: ") and str(adapter / PICKLE) in told and len(told) < 900
    assert not done.exists() and sorted(os.listdir(adapter)) == before
