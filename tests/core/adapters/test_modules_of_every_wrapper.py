"""LoRA on embeddings and heads, copies and trained tokens of models that see or hear, as transformers + peft."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from chorus.core.model.read_config import read_model_config
from chorus.memory.files.error import AdapterFormatError

from ...conftest import quiet
from ...kept import kept_files
from ..test_text_parts import IN_MEMORY, MODELS, RENAMED, make_whole
from .model_module_forms import Alone
from .test_modules_of_every_family import TOKENS, forms, scores_of, train_whole_modules

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


#: The embeddings have further rows or are normalised, or transformers does not tie them.
NEVER_TIED = {
    "Apertus1p5ForConditionalGeneration",
    "Cosmos3EdgeForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "Molmo2ForConditionalGeneration",
    "MuseGlimmerForConditionalGeneration",
}

#: Their configurations have no text part, or another head in memory than in files.
NOT_MADE = {"NemotronH_Omni_Reasoning_V3", "Phi4MultimodalForCausalLM"}

#: The end of a refusal of embeddings that an adapter has copied or trained.
REFUSED = "the base model normalises its embeddings, and other rows of them are not supported; train LoRA on them"


@pytest.fixture
def kernels() -> str:
    return "auto"


def _make(architecture: str, tied: bool) -> Any:
    return make_whole(architecture, tie_word_embeddings=tied)


def _save(architecture: str, root: Path, tied: bool) -> None:
    model = _make(architecture, tied)
    model.save_pretrained(root / "model", save_original_format=architecture not in IN_MEMORY)
    names = {id(module): name for name, module in model.named_modules()}
    text = text_of(model)
    ends = [names[id(module)] for module in (text.get_input_embeddings(), text.get_output_embeddings())]
    layers = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and ".0." in name)
    plain = next(
        name
        for name in layers
        if any(each in name for each in ("language_model.", "text_model.")) and not name.endswith("out_proj")
    )
    embedding, head = (end.rpartition(".")[2] for end in ends)
    every = forms(embedding, head, plain)
    if tied:
        every |= {
            "tied-embedding": {"target_modules": [embedding], "ensure_weight_tying": True},
            "tied-copy": {"target_modules": [plain], "modules_to_save": [embedding], "ensure_weight_tying": True},
        }
    for form, arguments in every.items():
        _save_form(_make(architecture, tied), root / form, arguments)


def text_of(model: Any) -> Any:
    """The part that is asked: in transformers 5.24 whole Llama 4 fails without images."""
    return model.language_model if type(model).__name__.startswith("Llama4") else model


@quiet()
def _save_form(base: Any, path: Path, arguments: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    config = LoraConfig(**{"r": 3, "lora_alpha": 5, "init_lora_weights": False, "task_type": "CAUSAL_LM", **arguments})
    trained = get_peft_model(base, config)
    train_whole_modules(trained)
    trained.save_pretrained(path)


@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied"])
@pytest.mark.parametrize("architecture", [each for each in (*MODELS, *RENAMED) if each not in NOT_MADE])
def test_embeddings_and_heads(drive, architecture, tied):
    from peft import PeftModel

    if tied and architecture in NEVER_TIED:
        pytest.skip("its head and embeddings are never one")
    root = kept_files(f"modules {architecture} {tied}", lambda root: _save(architecture, root, tied))
    adapters = {path.name: path for path in sorted(root.iterdir()) if path.name != "model"}
    assert adapters
    rng, config = random.Random(architecture), read_model_config(root / "model")
    most = min(150, config.vocab_size)
    prompt = [rng.randrange(3, most) for _ in range(12)] + TOKENS + [rng.randrange(3, most) for _ in range(4)]
    driver = drive(Alone(root / "model", {}), max_num_seqs=4, max_num_batched_tokens=64)
    base, wrong = scores_of(text_of(_make(architecture, tied)), prompt), {}
    for name, path in adapters.items():
        try:
            driver.engine.store.register(name, path)
        except AdapterFormatError as error:
            if str(error).endswith(REFUSED) and name not in ("layers", "head"):
                continue
            wrong[name] = str(error)
            continue
        with quiet():
            model = PeftModel.from_pretrained(_make(architecture, tied), path).eval()
        want = scores_of(text_of(model.get_base_model()), prompt)
        answer = driver.run(name, name, prompt, max_tokens=1, prompt_logprobs=1)
        found = torch.tensor([each.logprob for each in answer.prompt_logprobs])
        if not float((found - want).abs().max()) < 0.03 < float((base - want).abs().max()):
            wrong[name] = float((found - want).abs().max()), float((base - want).abs().max())
    assert not wrong
