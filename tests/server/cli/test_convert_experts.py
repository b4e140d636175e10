"""`chorus convert-adapter --from unsloth-experts`: experts whose order only their trainer knows."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.server.cli.command import main

from ...core.tiny_mixtures import make_mixture

EXPERTS = 16


@pytest.fixture(scope="module")
def peft():
    """An adapter of all experts as PEFT saves it, whose tokens are PEFT's: see `test_expert_adapters.py`."""
    return make_mixture("qwen3-moe").adapters["r2-experts"]


def as_unsloth_had(peft, path):
    """The same, with the expert index of B slowest."""
    shutil.copytree(peft, path)
    tensors = load_file(path / "adapter_model.safetensors")
    for name in [name for name in tensors if re.search(r"experts(\.base_layer)*\.lora_B", name)]:
        b = tensors[name]
        by_expert = [b[:, expert::EXPERTS] for expert in range(EXPERTS)]
        tensors[name] = torch.cat(by_expert, dim=1).contiguous()
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def convert(*arguments):
    return main(["convert-adapter", *map(str, arguments), "--from", "unsloth-experts"])


def test_the_result_is_peft_s(peft, tmp_path, capsys):
    old = as_unsloth_had(peft, tmp_path / "old")
    (old / "tokenizer_config.json").write_text("{}")
    assert convert(old, "--out", tmp_path / "new", "--experts", EXPERTS) == 0
    assert "4 tensors" in capsys.readouterr().out
    want, found = (load_file(path / "adapter_model.safetensors") for path in (peft, tmp_path / "new"))
    assert want.keys() == found.keys()
    assert all(torch.equal(want[name], found[name]) for name in want)
    before = load_file(old / "adapter_model.safetensors")
    assert any(not torch.equal(want[name], before[name]) for name in want)
    assert (tmp_path / "new" / "adapter_config.json").read_text() == (peft / "adapter_config.json").read_text()
    assert (tmp_path / "new" / "tokenizer_config.json").read_text() == "{}"


def test_the_number_of_experts_by_their_rank(peft, tmp_path):
    old = as_unsloth_had(make_mixture("qwen3-moe").adapters["r6-down"], tmp_path / "old")
    assert convert(old, "--out", tmp_path / "new") == 0
    want = load_file(make_mixture("qwen3-moe").adapters["r6-down"] / "adapter_model.safetensors")
    found = load_file(tmp_path / "new" / "adapter_model.safetensors")
    assert all(torch.equal(want[name], found[name]) for name in want)


def test_refused(peft, tmp_path, capsys):
    old = as_unsloth_had(peft, tmp_path / "old")

    def refusal(*arguments):
        assert convert(*arguments) == 1
        return capsys.readouterr().err

    assert "--out" in refusal(old)
    assert "--experts N" in refusal(old, "--out", tmp_path / "new")
    assert "not a multiple of 7 experts" in refusal(old, "--out", tmp_path / "new", "--experts", 7)
    assert "from 1 is needed" in refusal(old, "--out", tmp_path / "new", "--experts", 0)
    assert not (tmp_path / "new").exists()
    assert convert(old, "--out", tmp_path / "new", "--experts", EXPERTS) == 0
    assert "exists already" in refusal(old, "--out", tmp_path / "new", "--experts", EXPERTS)
    assert "was converted already" in refusal(tmp_path / "new", "--out", tmp_path / "again", "--experts", EXPERTS)
    plain = make_mixture("qwen3-moe").adapters["r5-shared"]
    assert "nothing to convert" in refusal(plain, "--out", tmp_path / "plain")
    assert "not found" in refusal(tmp_path / "none", "--out", tmp_path / "other")
    (old / "adapter_config.json").write_text(json.dumps([]))
    assert "a JSON object" in refusal(old, "--out", tmp_path / "other")
    (old / "adapter_config.json").write_text("{}")
    (old / "adapter_model.safetensors").write_bytes(b"12345678901234567890")
    assert "can't be read" in refusal(old, "--out", tmp_path / "other")


def test_flags_of_the_other_kind(peft, tmp_path, capsys):
    assert main(["convert-adapter", str(peft), "--experts", "4"]) == 1
    assert "--from unsloth-experts" in capsys.readouterr().err
