"""LoRA on embeddings and heads, copies of them and trained tokens, in every family, as transformers + peft."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from chorus.core.model.read_config import read_model_config
from chorus.memory.files.error import AdapterFormatError

from ...conftest import quiet
from ...kept import kept_files
from ..tiny_families import EVERY, load_model, save_family, without_conversion
from .model_module_forms import Alone

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


def chosen() -> list[str]:
    """Of each configuration class one geometry with tied weights and one without, where there are both."""
    found: dict[tuple[str, bool], str] = {}
    for name, (config_class, fields, _) in EVERY.items():
        found.setdefault((config_class, bool(fields.get("tie_word_embeddings"))), name)
    return [*found.values()]


#: Families with further arguments: `tie_word_embeddings` where transformers does not tie.
CHANGED = {"nemotron-h tied": ("nemotron-h", {"tie_word_embeddings": True})}

TOKENS = [20, 3, 31, 14]


def forms(embedding: str, head: str, layer: str) -> dict[str, dict[str, Any]]:
    """Arguments of `LoraConfig`, by the names of the two modules and of a linear one of a layer."""
    return {
        "embedding": {"target_modules": [embedding]},
        "head": {"target_modules": [head]},
        "both-and-copy": {"target_modules": [embedding, head], "modules_to_save": [head]},
        "copy": {"target_modules": [head], "modules_to_save": [embedding]},
        "tokens": {"target_modules": [layer], "trainable_token_indices": {embedding: TOKENS}},
        "tokens-of-each": {
            "target_modules": [layer],
            "trainable_token_indices": {embedding: TOKENS, head: TOKENS[1:]},
        },
    }


@pytest.fixture
def kernels() -> str:
    return "auto"


def _save(family: str, root: Path) -> None:
    name, changes = CHANGED.get(family, (family, {}))
    save_family(name, root / "model", **changes)
    model = load_model(root / "model")
    names = {id(module): name for name, module in model.named_modules()}
    ends = [names[id(module)] for module in (model.get_input_embeddings(), model.get_output_embeddings())]
    kinds = torch.nn.Linear, Conv1D
    layers = (name for name, module in model.named_modules() if isinstance(module, kinds) and ".0." in name)
    plain = next(name for name in layers if not name.endswith(("out_proj", ".router.classifier")))
    for form, arguments in forms(*(end.rpartition(".")[2] for end in ends), plain).items():
        _save_form(root / "model", root / form, arguments)


@quiet()
@without_conversion()
def _save_form(model: Path, path: Path, arguments: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    config = LoraConfig(**{"r": 3, "lora_alpha": 5, "init_lora_weights": False, "task_type": "CAUSAL_LM", **arguments})
    trained = get_peft_model(load_model(model), config)
    train_whole_modules(trained)
    trained.save_pretrained(path)


def train_whole_modules(model: Any) -> None:
    """Change rows of TOKENS in copies, and trained tokens."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "modules_to_save" in name and parameter.ndim > 1:
                parameter[TOKENS] += 0.3 * torch.randn(len(TOKENS), parameter.shape[1])


def scores_of(model: Any, prompt: list[int]) -> torch.Tensor:
    with quiet(), torch.inference_mode():
        found = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1].log_softmax(-1)
    return found.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


@pytest.mark.parametrize("family", [*chosen(), *CHANGED])
def test_embeddings_and_heads(drive, family):
    root = kept_files(f"modules {family}", lambda root: _save(family, root))
    adapters = {path.name: path for path in sorted(root.iterdir()) if path.name != "model"}
    assert adapters
    it, rng = Alone(root / "model", adapters), random.Random(family)
    prompt = [rng.randrange(3, 150) for _ in range(12)] + TOKENS + [rng.randrange(3, 150) for _ in range(4)]
    driver = drive(it, adapters={}, max_num_seqs=4, max_num_batched_tokens=64)
    base, wrong = scores_of(it.use(None), prompt), {}
    norms_embeddings = read_model_config(it.model).embedding_rows_eps is not None
    has_bias = getattr(it.use(None).get_output_embeddings(), "bias", None) is not None
    for name, path in adapters.items():
        try:
            driver.engine.store.register(name, path)
        except AdapterFormatError as error:
            if has_bias and name.startswith("tokens") and "the base model's head has a bias" in str(error):
                continue  # PEFT leaves the bias out
            if norms_embeddings and "the base model normalises its embeddings" in str(error):
                assert "embedding" not in name
                continue
            wrong[name] = str(error)
            continue
        want = scores_of(it.use(name), prompt)
        answer = driver.run(name, name, prompt, max_tokens=1, prompt_logprobs=1)
        found = torch.tensor([each.logprob for each in answer.prompt_logprobs])
        if not float((found - want).abs().max()) < 0.03 < float((base - want).abs().max()):
            wrong[name] = float((found - want).abs().max()), float((base - want).abs().max())
    assert not wrong
