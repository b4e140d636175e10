"""Adapters of a model whose logits leave out the rows by which its vocabulary was padded (Inkling)."""

from __future__ import annotations

import shutil

import pytest
from safetensors.torch import load_file, save_file

from chorus.core.model.read_config import read_model_config
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.form import WEIGHTS_FILE
from chorus.memory.files.format import inspect_adapter

from ..tiny_families import save_family
from .model_module_forms import Alone, save_form
from .test_modules_of_every_family import TOKENS, scores_of

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

#: By name, arguments of `LoraConfig`; PEFT decides what of the whole modules it saves.
FORMS = {
    "head": {"r": 4, "lora_alpha": 6, "target_modules": ["lm_head"]},
    "embed": {"r": 3, "lora_alpha": 9, "target_modules": ["embed_tokens"]},
    "both": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "saved head": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trained head": {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    root = tmp_path_factory.mktemp("padded")
    save_family("inkling-padded", root / "model")
    adapters = {name: root / name for name in FORMS}
    for seed, (name, arguments) in enumerate(FORMS.items()):
        save_form(root / "model", adapters[name], seed, save_embedding_layers="auto", **arguments)
    weights = adapters["trained head"] / WEIGHTS_FILE
    tensors = load_file(weights)
    tensors["base_model.model.lm_head.weight"][[*TOKENS, 149, 155]] += 0.3  # 155 is padding, which decays
    save_file(tensors, weights)
    return Alone(root / "model", adapters)


@pytest.fixture
def kernels():
    return "auto"


def test_peft_saves_rows_of_the_padded_vocabulary(it):
    (rows,) = (each.shape[0] for name, each in _tensors(it, "head").items() if "lora_B" in name)
    (columns,) = (each.shape[1] for name, each in _tensors(it, "embed").items() if "embedding_A" in name)
    config = read_model_config(it.model)
    assert rows == columns == config.vocab_size + config.further_logits == 160


def _tensors(it, name):
    return load_file(it.adapters[name] / WEIGHTS_FILE)


def test_adapters_score_as_with_peft(it, drive):
    prompt = [5, 9, 140, 33, 71, 149, 2, 64, *TOKENS, 17, 148, 8]
    driver, base = drive(it, max_num_seqs=4, max_num_batched_tokens=64), scores_of(it.use(None), prompt)
    for name in FORMS:
        want = scores_of(it.use(name), prompt)
        answer = driver.run(name, name, prompt, max_tokens=1, prompt_logprobs=1)
        found = [each.logprob for each in answer.prompt_logprobs]
        assert found == pytest.approx(want.tolist(), abs=1e-4), name
        assert found != pytest.approx(base.tolist(), abs=0.03), name


def test_the_norm_in_embeddings_is_a_copy_or_refused(it, tmp_path):
    """PEFT saves it beside LoRA on embeddings."""
    (name,) = (each for each in _tensors(it, "embed") if "embed_norm" in each)
    paths = read_model_config(it.model).module_paths
    assert name in inspect_adapter(it.adapters["embed"], paths).dropped
    shutil.copytree(it.adapters["embed"], tmp_path / "other")
    save_file(_tensors(it, "embed") | {name: 2 + _tensors(it, "embed")[name]}, tmp_path / "other" / WEIGHTS_FILE)
    with pytest.raises(AdapterFormatError, match="a norm of the embeddings, and the base model has another"):
        inspect_adapter(tmp_path / "other", paths)
