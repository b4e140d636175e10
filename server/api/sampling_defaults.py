"""Default sampling parameters of requests: the model's recommendation, or OpenAI's defaults."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.model.config_json import ConfigJson
from ...core.requests.request_params import RequestParams

if TYPE_CHECKING:
    from ..settings import Settings

log = logging.getLogger(__name__)

NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
OVERRIDABLE = (*NUMBERS, "min_new_tokens", "stop_strings", "bad_words_ids", "suppress_tokens")
"""Fields of generation_config.json that are defaults of requests."""

#: Fields by which transformers would choose other tokens, and values that change nothing. They are not defaults here.
UNUSED: Mapping[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_length": (20,),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ({}, []),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": ({},),
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of fields that a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    """None: the API's own default."""

    min_tokens: int = 0
    """At most the request's `max_tokens` counts."""

    stop: tuple[str, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids."""

    @classmethod
    def of(cls, settings: Settings) -> SamplingDefaults:
        """The defaults that the settings define. Raises ValueError for a value that no request could have."""
        own = cls.read(settings.model) if settings.generation_config == "auto" else cls()
        return own.overridden(settings.override_generation_config)

    def overridden(self, overrides: Mapping[str, Any]) -> SamplingDefaults:
        """The same with some values replaced. overrides: by the names of generation_config.json."""
        values = dict[str, Any]()
        for name, value in overrides.items():
            _check_override(name, value)
            if name not in NUMBERS:
                continue
            values["max_tokens" if name == "max_new_tokens" else name] = max(value, 0) if name == "top_k" else value
        try:
            RequestParams(**values)
        except ValueError as error:
            told = str(error).replace("max_tokens", "max_new_tokens")
            raise ValueError(f"override_generation_config: {told}") from None
        values |= _lists(ConfigJson(Path("override_generation_config"), dict(overrides)), overrides)
        return replace(self, **values)

    @classmethod
    def read(cls, model: Path) -> SamplingDefaults:
        """The defaults in the model's generation_config.json, if it has one.

        As in vLLM, `do_sample` is ignored. A line of the log names other fields that have no effect. Raises ValueError
        for a value that no request could have.
        """
        path = model / "generation_config.json"
        if not path.is_file():
            return cls()
        config = ConfigJson.read(path)
        usual = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        numbers: dict[str, Any] = {name: _number(config, name, default) for name, default in usual.items()}
        top_k = max(config.integer("top_k", 0, least=-1), 0)
        try:
            RequestParams(top_k=top_k, **numbers)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; fix it, or set generation_config to vllm") from None
        if unused := unused_fields(config.raw):
            log.warning("%s: no effect here, unlike in transformers: %s", path, ", ".join(unused))
        has_limit = config.raw.get("max_new_tokens") is not None
        limit = config.integer("max_new_tokens") if has_limit else None
        return cls(top_k=top_k, max_tokens=limit, **numbers, **_lists(config, OVERRIDABLE))

    def bad_words_of(self, vocab_size: int) -> tuple[tuple[int, ...], ...]:
        """The bad words that a model with so many tokens could write."""
        return tuple(word for word in self.bad_words if max(word) < vocab_size)


def _check_override(name: str, value: Any) -> None:
    """Raise ValueError for a field without a default, and for a value of another type, where it must be a number."""
    if name not in OVERRIDABLE:
        near = difflib.get_close_matches(name, OVERRIDABLE, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it may set {', '.join(OVERRIDABLE)}"
        raise ValueError(f"override_generation_config sets {name!r}, which has no default; {hint}")
    whole = name in ("top_k", "max_new_tokens")
    if name in NUMBERS and (isinstance(value, bool) or not isinstance(value, int if whole else int | float)):
        what = "a whole number" if whole else "a number"
        raise ValueError(f"override_generation_config: {name} is {value!r}; it must be {what}")


def unused_fields(raw: Mapping[str, Any]) -> list[str]:
    """Fields of a generation_config.json that would change answers of transformers, and don't here."""
    return [name for name, neutral in UNUSED.items() if raw.get(name) is not None and raw[name] not in neutral]


def _lists(config: ConfigJson, names: Collection[str]) -> dict[str, Any]:
    """Defaults that are no numbers of the sampler, of those of these fields that the file has. Both fields of bad words
    are one default.
    """
    found: dict[str, Any] = {}
    if "min_new_tokens" in names and not config.is_missing("min_new_tokens"):
        found["min_tokens"] = config.integer("min_new_tokens", least=0)
    if "stop_strings" in names and not config.is_missing("stop_strings"):
        given = config.raw["stop_strings"]
        found["stop"] = (given,) if isinstance(given, str) else tuple(config.texts("stop_strings"))
        if "" in found["stop"]:
            raise config.refuse("stop_strings", "a stop string can't be empty")
    if bad_words := [
        word for name in ("bad_words_ids", "suppress_tokens") if name in names for word in _words(config, name)
    ]:
        found["bad_words"] = tuple(bad_words)
        try:
            RequestParams(bad_words=found["bad_words"])
        except ValueError as error:
            raise ValueError(f"{config.path}: {error}") from None
    return found


def _words(config: ConfigJson, name: str) -> list[tuple[int, ...]]:
    """Sequences of token ids; `suppress_tokens` has single ones."""
    given = config.raw.get(name) or []
    words = [[each] for each in given] if name == "suppress_tokens" and isinstance(given, list) else given
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise config.refuse(name, "lists of token ids are needed")
    if not all(
        isinstance(token, int) and not isinstance(token, bool) and token >= 0 for word in words for token in word
    ):
        raise config.refuse(name, "token ids are whole numbers of at least 0")
    return [tuple(word) for word in words]


def _number(config: ConfigJson, name: str, default: float) -> float:
    value = config.raw.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise config.refuse(name, "it must be a number")
    return float(value)
