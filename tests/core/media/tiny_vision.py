"""Tiny random models that see, with the installed transformers' image processors, and their reference answers."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from chorus.core.media.lacking import why_lacking
from chorus.core.media.places import ImagePlaces
from chorus.memory.files.tokens.torchvision import mend_torchvision

from ...conftest import quiet
from ...kept import KeptAnswers, kept_files, kept_root
from ...tiny_tokenizer import save_tokenizer
from . import tiny_mrope
from .seeing import TEXT
from .seeing_families import SEEING

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'] is string %}{{ ': ' + message['content'] }}{% else %}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '@PLACE@' }}{% endif %}{% endfor %}{% endif %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
#: Beside `pytest.mark.integration`: `.ci/integrations` runs the tests that have it.
needs_vision = pytest.mark.skipif(
    why_lacking() is not None,
    reason="needs the extra vision",
)

ENDS = "<end_of_utterance>"
#: Differences of log-probabilities in float32 that are not found: those of recurrent layers in chunks reach 2e-3.
TOLERANCE = 5e-3


class Answer(list[int]):
    """Tokens with their log-probabilities. Answers are equal if their tokens are, and these nearly so: a soft cap or
    a scale that is left out changes no greedy token.
    """

    def __init__(self, tokens: Iterable[int] = (), logprobs: Iterable[float] = ()) -> None:
        super().__init__(tokens)
        self.logprobs = [*logprobs]

    def __eq__(self, other: object) -> bool:
        same = super().__eq__(other)
        return same and (not isinstance(other, Answer) or self.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __repr__(self) -> str:
        return f"Answer({super().__repr__()}, {[round(each, 3) for each in self.logprobs]})"


SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = ("text", "seven", "linear", "tower", "dora", "copied")


def adapters_of(family: str) -> dict[str, dict[str, Any]]:
    """Fields of peft's configuration of each adapter."""
    common = {
        "seven": {"target_modules": SEVEN, "use_rslora": True},
        "linear": {"target_modules": "all-linear", "lora_alpha": 3},
    }
    if family in tiny_mrope.FAMILIES:
        return common | tiny_mrope.adapters(family)
    it = SEEING[family]
    if it.seven is not None:
        common["seven"] = {"target_modules": it.seven, "use_rslora": True}
    if it.excluded:
        common["linear"]["exclude_modules"] = it.excluded
    if it.matrix:
        common["matrix"] = {"target_modules": ["q_proj", "v_proj"], "target_parameters": [it.matrix]}
    return common | {
        "text": {"target_modules": it.text_linear},
        "tower": {"target_modules": it.tower_linear},
        "dora": {"target_modules": it.tower_dora, "use_dora": True},
        "copied": {"target_modules": it.seven or ["q_proj", "v_proj"], "modules_to_save": [it.projector]},
    }


def refused_of(family: str) -> tuple[str, ...]:
    """Sizes of images that a family's processor or tower does not take."""
    return SEEING[family].refused if family in SEEING else ()


def step_of(family: str) -> dict[str, int]:
    """Settings of a server with which a step has all that it must of an image, or of a prompt with images."""
    return SEEING[family].step if family in SEEING else {}


def tiny(family: str) -> Path:
    """A model's directory, with its adapters in `adapters`."""
    return kept_files(f"vision-{family}", lambda path: _save(family, path))


@quiet()
def _save(family: str, path: Path) -> None:
    mend_torchvision()
    save = tiny_mrope.save_model if family in tiny_mrope.FAMILIES else _save_model
    save(family, path)
    for seed, (title, fields) in enumerate(adapters_of(family).items()):
        save_adapter(path, family, title, fields, seed)


def _save_model(family: str, path: Path) -> None:
    import transformers

    it = SEEING[family]
    save_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    marks = dict.fromkeys((it.mark, *it.around, ENDS))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    tokenizer.save(str(path / "tokenizer.json"))
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<unk>",
        extra_special_tokens=it.named,
    )
    if it.adds:
        wrapped.add_tokens([*it.adds])
    wrapped.chat_template = template = TEMPLATE.replace("@PLACE@", it.place or it.mark)

    def made(named: tuple[str, dict[str, Any]], kind: str, **more: Any) -> Any:
        return getattr(transformers, f"{named[0]}{kind}")(**named[1], **more)

    parts: dict[str, Any] = {"image_processor": made(it.images, "ImageProcessor"), "tokenizer": wrapped}
    if it.videos:
        parts["video_processor"] = made(it.videos, "VideoProcessor")
    if it.sound:
        parts["feature_extractor"] = made((it.sound, {}), "AudioFeatureExtractor")
    processor = made(it.processor, "Processor", **parts)
    processor.chat_template = template
    processor.save_pretrained(path)
    vocab = -(-len(wrapped) // 8) * 8
    tokens = {} if it.marks is None else {it.marks[0]: wrapped.convert_tokens_to_ids(list(it.marks[1]))}
    config = getattr(transformers, f"{it.name}Config")(
        text_config={**TEXT, **it.text, "vocab_size": vocab},
        vision_config=it.tower,
        image_token_id=wrapped.convert_tokens_to_ids(it.mark),
        tie_word_embeddings=False,
        **{**tokens, **it.config, **({"vocab_size": vocab} if it.sized else {})},
    )
    torch.manual_seed(5)
    model = getattr(transformers, f"{it.name}ForConditionalGeneration")(config).float()
    model.config.pad_token_id = 0
    with torch.no_grad():
        for title, parameter in model.named_parameters():
            if "norm" in title and parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            elif not title.startswith(("model.text_model.", "model.language_model.", "lm_head.")):
                parameter.normal_(0, 0.3)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(path, save_original_format=it.original)


@quiet()
def save_adapter(
    path: Path, family: str, title: str, fields: dict[str, Any], seed: int, to: Path | None = None
) -> None:
    """Write a random adapter of the whole model with peft. to: where, if not beside the model's others."""
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
    model.save_pretrained(str(to or path / "adapters" / title))


def reference(path: Path, family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of its own of transformers, for peft to change."""
    if kept_root() in path.parents:
        return copy.deepcopy(_read_once(path, family, dtype))
    return _read(path, family, dtype)


@lru_cache(1)
def _read_once(path: Path, family: str, dtype: torch.dtype) -> Any:
    return _read(path, family, dtype)


def _read(path: Path, family: str, dtype: torch.dtype) -> Any:
    import transformers

    name = tiny_mrope.FAMILIES[family] if family in tiny_mrope.FAMILIES else SEEING[family].name
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    model = kind.from_pretrained(path, dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # Janus's `generate` hears of no other
    return model


class Reference:
    """transformers and peft, given the same RGB images one by one. What they answer about a kept model is kept, too."""

    @quiet()
    def __init__(self, family: str, path: Path | None = None) -> None:
        """path: of a model of the family with other weights."""
        mend_torchvision()
        from transformers import AutoImageProcessor, AutoProcessor

        self.path, self.family = path or tiny(family), family
        self.processor: Any = AutoProcessor.from_pretrained(self.path)
        self.processor.image_processor = AutoImageProcessor.from_pretrained(self.path, backend="torchvision")
        self._is_nested = family not in SEEING or SEEING[family].nested
        self._models: dict[str | None, Any] = {}
        self._known = KeptAnswers(self.path if kept_root() in self.path.parents else None)

    def _model(self, adapter: str | None) -> Any:
        if adapter not in self._models:
            model = reference(self.path, self.family)
            if adapter is not None:
                from peft import PeftModel

                model = PeftModel.from_pretrained(model, str(self.path / "adapters" / adapter)).eval()
            self._models[adapter] = model
        return self._models[adapter]

    def tokens_of(self, messages: list[dict[str, Any]], places: ImagePlaces, texts: list[str]) -> list[int]:
        """The tokens of a prompt with these texts of its images."""
        text = self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self.processor.tokenizer(places.written(text, texts), add_special_tokens=False)["input_ids"]

    @quiet()
    def answer(
        self,
        adapter: str | None,
        messages: list[dict[str, Any]],
        images: Sequence[Any],
        count: int,
        settings: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], Answer]:
        """The prompt's tokens, and the greedy answer of `count` tokens. images: in RGB. settings: of the processor."""
        seen = [(image.size, hashlib.sha256(image.tobytes()).hexdigest()) for image in images]
        question = [adapter, messages, seen, count, settings and dict(settings)]
        prompt, *found = self._known.get(question, lambda: self._answer(adapter, messages, images, count, settings))
        return [*prompt], Answer(*found)

    def _answer(
        self,
        adapter: str | None,
        messages: list[dict[str, Any]],
        images: Sequence[Any],
        count: int,
        settings: Mapping[str, Any] | None,
    ) -> tuple[list[int], list[int], list[float]]:
        inputs = self._inputs(messages, images, settings, begins_output=True)
        with torch.inference_mode():
            out = self._model(adapter).generate(
                **inputs,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                return_dict_in_generate=True,
                output_logits=True,
            )
        prompt = inputs["input_ids"][0].tolist()
        tokens = out.sequences[0, len(prompt) :].tolist()
        scores = [
            logits[0].float().log_softmax(-1)[token].item() for logits, token in zip(out.logits, tokens, strict=True)
        ]
        return prompt, tokens, scores

    @quiet()
    def vector(self, adapter: str | None, messages: list[dict[str, Any]], images: Sequence[Any]) -> list[float]:
        """The last token's hidden state behind the last norm, with length 1."""
        with torch.inference_mode():
            found = self._model(adapter)(**self._inputs(messages, images, None), output_hidden_states=True)
        return torch.nn.functional.normalize(found.hidden_states[-1][0, -1], dim=0).tolist()

    def _inputs(
        self,
        messages: list[dict[str, Any]],
        images: Sequence[Any],
        settings: Mapping[str, Any] | None,
        *,
        begins_output: bool = False,
    ) -> Any:
        """What transformers' model is given."""
        text = self.processor.apply_chat_template(messages, add_generation_prompt=begins_output, tokenize=False)
        given = {"images": [list(images)] if self._is_nested else list(images)} if images else {}
        reader = self.processor if images else self.processor.tokenizer  # some processors need images
        inputs = reader(text=text, return_tensors="pt", add_special_tokens=False, **given, **(settings or {}))
        if self.family in SEEING and SEEING[self.family].typed:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        for name in ("rows", "cols"):
            inputs.pop(name, None)
        return inputs
