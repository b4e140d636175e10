"""Whole copies of embeddings and heads: what equals the base model's is dropped, and listed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.read_config import read_model_config
from chorus.memory.files import trained_rows
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.server.cli.check import Status
from chorus.server.cli.check import _base_of as base_of
from chorus.server.cli.check import check as check_adapter

from ..tiny_families import save_family
from .model_module_forms import Alone, save_form

pytestmark = [pytest.mark.native, pytest.mark.wide]

EMBED, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"

#: What PEFT and trainers write: with LoRA on the modules, in `modules_to_save`, and by itself.
FORMS = {
    "targeted": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "saved": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "head saved": {"r": 2, "lora_alpha": 6, "target_modules": ["up_proj"], "modules_to_save": ["lm_head"]},
    "beside": {"r": 3, "lora_alpha": 6, "target_modules": ["v_proj"]},
}


@pytest.fixture(scope="module", params=["llama2", "llama3"])
def it(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    save_family(request.param, root / "model")
    adapters = {name: root / name for name in FORMS}
    for seed, (name, arguments) in enumerate(FORMS.items()):
        save_form(root / "model", adapters[name], seed, save_embedding_layers=True, **arguments)
    return Alone(root / "model", adapters)


def manifest_of(it, path):
    return inspect_adapter(path, read_model_config(it.model).module_paths)


@pytest.fixture
def changed(it, tmp_path):
    """`changed(name, change)`: a copy of an adapter, whose tensors and configuration are changed."""

    def make(name, change):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        shutil.copytree(it.adapters[name], path)
        tensors, config = load_file(path / "adapter_model.safetensors"), path / "adapter_config.json"
        raw = json.loads(config.read_text())
        change(tensors, raw)
        save_file(tensors, path / "adapter_model.safetensors")
        config.write_text(json.dumps(raw))
        return path

    return make


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_equal_copies_change_nothing(it, drive):
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24)
    want = {}
    for name in (None, *FORMS):
        prompt, want[str(name)] = it.case(name, 20, seed=3)
        driver.add(str(name), name, prompt, max_tokens=8)
    answers = driver.drain()
    assert {name: answers[name].tokens for name in want} == want


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("targeted", [f"{EMBED}.base_layer.weight", f"{HEAD}.base_layer.weight"]),
        ("saved", [f"{EMBED}.weight", f"{HEAD}.weight"]),
        ("head saved", [f"{HEAD}.weight"]),
        ("beside", [f"{EMBED}.weight", f"{HEAD}.weight"]),
    ],
)
def test_what_is_dropped_is_listed(it, name, dropped):
    assert set(dropped) <= set(manifest_of(it, it.adapters[name]).dropped)
    verdict = check_adapter(it.adapters[name], base_of(it.model, None))
    assert verdict.status is Status.SERVED
    assert set(dropped) <= set(verdict.dropped_tensors)


def test_rows_that_no_token_uses_are_dropped(it, changed):
    """As of a vocabulary that was padded to a round number."""

    def pad(tensors, raw):
        for name in (f"{EMBED}.weight", f"{HEAD}.weight"):
            tensors[name] = torch.cat((tensors[name], torch.ones(10, tensors[name].shape[1])))

    path = changed("saved", pad)
    assert len(manifest_of(it, path).dropped) == 6
    (path / "added_tokens.json").write_text(json.dumps({"<base>": 149}))
    assert len(manifest_of(it, path).dropped) == 6


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("added_tokens.json", {"<tool>": 151, "<base>": 3}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"151": {"content": "<tool>"}, "3": {"content": "a"}}}),
        ("tokenizer.json", {"added_tokens": [{"id": 3, "content": "a"}, {"id": 151, "content": "<tool>"}]}),
    ],
)
def test_rows_of_tokens_that_a_tokenizer_adds_are_kept(it, changed, file, content):
    def pad(tensors, raw):
        for name in [name for name in tensors if name.startswith((EMBED, HEAD))]:
            tensors[name] = torch.cat((tensors[name], torch.ones(2, 64)))

    path = changed("saved", pad)
    assert not manifest_of(it, path).added, "a vocabulary that was padded to a round number"
    (path / file).write_text(json.dumps(content))
    found = manifest_of(it, path)
    assert (found.num_tokens, found.added) == (152, {150, 151})
    assert f"{EMBED}.weight" not in found.dropped


@pytest.mark.parametrize("trained", [False, True])
def test_without_a_tokenizer_rows_beyond_the_base_model_s_are_padding_or_not(it, changed, trained):
    def pad(rows):
        def change(tensors, raw):
            for name in [name for name in tensors if name.startswith((EMBED, HEAD))]:
                tensors[name] = torch.cat((tensors[name], torch.ones(rows, 64)))
                if trained and "original" not in name:
                    tensors[name][7] += 1

        return change

    for rows, is_kept in ((2, trained), (3, True)):
        assert bool(manifest_of(it, changed("saved", pad(rows))).added) == is_kept


def test_too_many_rows_are_refused_with_the_count(it, changed, monkeypatch):
    monkeypatch.setattr(trained_rows, "MAX_TRAINED_ROWS", 149)

    def narrow(tensors, raw):
        tensors |= {name: tensors[name].bfloat16() for name in tensors if name.startswith(HEAD)}

    with pytest.raises(AdapterFormatError, match="150 of its rows differ from the base model's; at most 149"):
        manifest_of(it, changed("saved", narrow))

    def another_base(tensors, raw):
        tensors[f"{HEAD}.original_module.weight"][2:5] += 1

    with pytest.raises(AdapterFormatError, match=r"from before the training, differs .* in 3 rows"):
        manifest_of(it, changed("saved", another_base))


def test_refusals(it, changed):
    def another(tensors, raw):
        tensors[f"{HEAD}.weight"] = tensors[f"{HEAD}.weight"][:, :32].contiguous()

    with pytest.raises(AdapterFormatError, match=r"lm_head.*shape \[150, 32\].*\[150, 64\]"):
        manifest_of(it, changed("head saved", another))

    def fewer(tensors, raw):
        tensors[f"{HEAD}.weight"] = tensors[f"{HEAD}.weight"][:149].contiguous()

    with pytest.raises(AdapterFormatError, match=r"\[149, 64\]"):
        manifest_of(it, changed("head saved", fewer))

    def none(tensors, raw):
        for name in [name for name in tensors if name.startswith(HEAD)]:
            del tensors[name]

    with pytest.raises(AdapterFormatError, match=r"has no copy of lm_head, which adapter_config\.json names"):
        manifest_of(it, changed("head saved", none))

    def twice(tensors, raw):
        tensors[f"{HEAD}.base_layer.weight"] = tensors[f"{HEAD}.weight"].clone()

    assert manifest_of(it, changed("head saved", twice)).dropped

    def other(tensors, raw):
        twice(tensors, raw)
        tensors[f"{HEAD}.weight"][3] += 1

    with pytest.raises(AdapterFormatError, match="are both lm_head, and differ"):
        manifest_of(it, changed("head saved", other))

    def norm(tensors, raw):
        raw["modules_to_save"] = ["lm_head", "norm"]

    with pytest.raises(AdapterFormatError, match=r"modules_to_save is .*such as 'norm'"):
        manifest_of(it, changed("head saved", norm))


#: The head has the embeddings' rank, and the scale that the patterns give its own name.
TIED_PATTERNS = {
    "plain": {},
    "scale of the embeddings": {"alpha_pattern": {"embed_tokens": 24}},
    "scale of the head": {"alpha_pattern": {"lm_head": 1}},
    "rank of the embeddings": {"rank_pattern": {"embed_tokens": 6}},
    "rank of the head": {"rank_pattern": {"lm_head": 12}, "use_rslora": True},
}


@pytest.mark.parametrize("kernels", ["native"])
@pytest.mark.parametrize("patterns", TIED_PATTERNS)
def test_tied_weights_are_trained_alike(tmp_path, drive, patterns):
    """With `ensure_weight_tying` LoRA on the embeddings is on the head too."""
    save_family("llama3", tmp_path / "model")
    adapters = {name: tmp_path / name for name in ("tied", "embeddings")}
    for name, path in adapters.items():
        save_form(
            tmp_path / "model",
            path,
            1,
            save_embedding_layers=True,
            r=3,
            lora_alpha=8,
            target_modules=["q_proj", "embed_tokens"],
            ensure_weight_tying=name == "tied",
            **TIED_PATTERNS[patterns],
        )
    it = Alone(tmp_path / "model", adapters)
    driver, want = drive(it), {}
    for name in adapters:
        prompt, want[name] = it.case(name, 20, seed=3, count=16)
        driver.add(name, name, prompt, max_tokens=16)
    assert {name: answer.tokens for name, answer in driver.drain().items()} == want
    assert "lm_head" in manifest_of(it, adapters["tied"]).targets


def test_the_names_of_tinker(it, changed):
    """The head as `unembed_tokens` of the model's parent, with all linear modules as targets."""

    def rename(tensors, raw):
        raw["target_modules"] = "all-linear"
        for name in [name for name in tensors if "base_layer" in name or "q_proj" in name or "embedding" in name]:
            del tensors[name]
        for name in [name for name in tensors if name.startswith(HEAD)]:
            tensors[name.replace(HEAD, "base_model.model.model.unembed_tokens")] = tensors.pop(name)
        raw["exclude_modules"] = ".*layers.*"

    assert manifest_of(it, changed("targeted", rename)).targets == ("lm_head",)

    def usual(tensors, raw):
        rename(tensors, raw)
        for name in list(tensors):
            tensors[name.replace("base_model.model.model.unembed_tokens", HEAD)] = tensors.pop(name)

    with pytest.raises(AdapterFormatError, match="match none"):
        manifest_of(it, changed("targeted", usual))


@pytest.mark.parametrize("family", ["qwen3-moe", "llama2"])
def test_models_of_equal_shapes_are_each_compared_with_their_own_rows(tmp_path, family):
    """One process may have several; the way in which an adapter names its modules is found once for both."""
    one, other, adapter = (tmp_path / name for name in ("one", "other", "adapter"))
    for path in (one, other):
        save_family(family, path)
    tensors = load_file(other / "model.safetensors")
    tensors["model.embed_tokens.weight"][3:6] += 1
    save_file(tensors, other / "model.safetensors")
    save_form(one, adapter, 1, save_embedding_layers=True, r=2, lora_alpha=4, target_modules=["q_proj"])
    if family == "llama2":  # trained on a model that has q, k and v in one matrix
        changed = load_file(adapter / "adapter_model.safetensors")
        for name in [name for name in changed if "q_proj" in name]:
            tensor = changed.pop(name)
            tensor = torch.cat([tensor] * 3) if "lora_B" in name else tensor
            changed[name.replace("q_proj", "qkv_proj")] = tensor
        save_file(changed, adapter / "adapter_model.safetensors")
        config = adapter / "adapter_config.json"
        config.write_text(config.read_text().replace("q_proj", "qkv_proj"))
    rows = [
        [part.token_ids for part in inspect_adapter(adapter, read_model_config(model).module_paths).parts]
        for model in (one, other, one)
    ]
    assert [[tokens for tokens in each if tokens] for each in rows] == [[], [(3, 4, 5)], []]
