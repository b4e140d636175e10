"""Tiny random models that see, with the installed transformers' image processors, and their reference answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from chorus.core.media.lacking import why_lacking
from chorus.memory.files.tokens.torchvision import mend_torchvision

from ...conftest import quiet
from ...kept import kept_files
from ...tiny_tokenizer import save_tokenizer
from . import tiny_mrope

MARKS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'] is string %}{{ ': ' + message['content'] }}{% else %}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}{% endif %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
SEQUENCE = 4
"""Rows of a tile: 32 x 32 pixels in patches of 8 are 16, of which the connector makes one of four."""

#: Beside `pytest.mark.integration`: `.ci/integrations` runs the tests that have it.
needs_vision = pytest.mark.skipif(
    why_lacking() is not None,
    reason="needs the extra vision",
)

IDEFICS = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}
FAMILIES = {**IDEFICS, **tiny_mrope.FAMILIES}
TEXT = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "initializer_range": 0.4,
}

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TEXT_ONLY = r".*text_model.*\.(q_proj|v_proj|down_proj)"
TOWER_ONLY = r".*(vision_model.*(q_proj|k_proj|v_proj|fc1|out_proj|patch_embedding)|connector.*proj)"

ADAPTERS: dict[str, dict[str, Any]] = {
    "text": {"target_modules": TEXT_ONLY},
    "seven": {"target_modules": SEVEN, "use_rslora": True},
    "linear": {"target_modules": "all-linear", "lora_alpha": 3},
    "tower": {"target_modules": TOWER_ONLY},
    "dora": {"target_modules": r".*vision_model.*(q_proj|fc2)|.*text_model.*v_proj", "use_dora": True},
    "copied": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["connector"]},
}


def tiny(family: str) -> Path:
    """A model's directory, with its adapters in `adapters`."""
    return kept_files(f"vision-{family}", lambda path: _save(family, path))


def adapters(family: str) -> dict[str, dict[str, Any]]:
    """A family's adapters: fields of PEFT's configuration, by name."""
    return ADAPTERS if family in IDEFICS else ADAPTERS | tiny_mrope.adapters(family)


@quiet()
def _save(family: str, path: Path) -> None:
    mend_torchvision()
    save = _save_idefics if family in IDEFICS else tiny_mrope.save_model
    save(family, path)
    for seed, (title, fields) in enumerate(adapters(family).items()):
        save_adapter(path, family, title, fields, seed)


def _save_idefics(family: str, path: Path) -> None:
    import transformers

    save_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.save(str(path / "tokenizer.json"))
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>"
    )
    wrapped.chat_template = TEMPLATE
    name = FAMILIES[family]
    size: dict[str, Any] = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}
    images = getattr(transformers, f"{name}ImageProcessor")(**size)
    parts: dict[str, Any] = {"image_processor": images, "tokenizer": wrapped, "image_seq_len": SEQUENCE}
    if family == "smolvlm":
        parts["video_processor"] = transformers.SmolVLMVideoProcessor(**size)
    processor = getattr(transformers, f"{name}Processor")(**parts)
    processor.chat_template = TEMPLATE
    processor.save_pretrained(path)
    vocab = -(-len(wrapped) // 8) * 8
    config = getattr(transformers, f"{name}Config")(
        text_config={**TEXT, "vocab_size": vocab},
        vision_config=TOWER,
        scale_factor=2,
        image_token_id=wrapped.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float()
    with torch.no_grad():
        for title, parameter in model.named_parameters():
            if "norm" in title and parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            elif "connector" in title or "vision_model" in title:
                parameter.normal_(0, 0.3)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(path)


@quiet()
def save_adapter(path: Path, family: str, title: str, fields: dict[str, Any], seed: int) -> None:
    """Write a random adapter of the whole model with peft."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(100 + seed)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "init_lora_weights": False, **fields})
    model = get_peft_model(reference(path, family), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "lora_magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
    model.save_pretrained(str(path / "adapters" / title))


def reference(path: Path, family: str) -> Any:
    import transformers

    kind = getattr(transformers, f"{FAMILIES[family]}ForConditionalGeneration")
    return kind.from_pretrained(path, dtype=torch.float32).eval()


class Reference:
    """transformers and peft, given the same RGB images one by one."""

    @quiet()
    def __init__(self, family: str) -> None:
        mend_torchvision()
        from transformers import AutoImageProcessor, AutoProcessor

        self.path, self.family = tiny(family), family
        self.processor: Any = AutoProcessor.from_pretrained(self.path)
        self.processor.image_processor = AutoImageProcessor.from_pretrained(self.path, backend="torchvision")
        self._models: dict[str | None, Any] = {}

    def _model(self, adapter: str | None) -> Any:
        if adapter not in self._models:
            model = reference(self.path, self.family)
            if adapter is not None:
                from peft import PeftModel

                model = PeftModel.from_pretrained(model, str(self.path / "adapters" / adapter)).eval()
            self._models[adapter] = model
        return self._models[adapter]

    @quiet()
    def answer(
        self, adapter: str | None, messages: list[dict[str, Any]], images: Sequence[Any], count: int
    ) -> tuple[list[int], list[int]]:
        """The prompt's tokens, and the greedy answer of `count` tokens. images: in RGB."""
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        given = {"images": [list(images)]} if images else {}
        inputs = self.processor(text=text, return_tensors="pt", add_special_tokens=False, **given)
        for name in ("rows", "cols"):
            inputs.pop(name, None)
        with torch.inference_mode():
            out = self._model(adapter).generate(
                **inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
            )
        prompt = inputs["input_ids"][0].tolist()
        return prompt, out[0, len(prompt) :].tolist()
