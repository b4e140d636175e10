"""`adapter_config.json`: which modules an adapter changes, by which rank and scale, exactly as PEFT decides it."""

from __future__ import annotations

import math
import os
import stat
from functools import partial
from pathlib import Path
from typing import Any

from . import strict_json
from .adapter_error import AdapterFormatError, shown
from .name_pattern import MatchTime, NamePattern

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 4096

#: What PEFT targets in a Llama-architecture model when `target_modules` is null.
DEFAULT_TARGETS = ("q_proj", "v_proj")

_MAX_SCALE = 3e38  # scales are applied in float32

#: Fields that change the arithmetic in ways that are not served, and what to do about them.
_UNSERVED = {
    "use_dora": "DoRA is not supported; merge it into the base model or train plain LoRA",
    "modules_to_save": "fully trained modules are not supported; train without modules_to_save",
    "trainable_token_indices": "trained tokens are not supported; train without them",
    "lora_bias": "adapters with biases are not supported; train with lora_bias=False",
    "layer_replication": "the base model's layers are fixed; train without layer_replication",
    "target_parameters": "LoRA on bare parameters is not supported; use target_modules",
    "fan_in_fan_out": "weights stored transposed are not supported; the base model has none",
    "use_qalora": "QALoRA is not supported; train plain LoRA",
    "use_bdlora": "block-diagonal LoRA is not supported; train plain LoRA",
    "arrow_config": "Arrow routing is not supported; serve its adapters under names of their own",
    "kasa_config": "KaSA is not supported; train plain LoRA",
    "monteclora_config": "MonteCLoRA is not supported; train plain LoRA",
    "alora_invocation_tokens": "activated LoRA is not supported; train plain LoRA",
}

#: Initialisations that also change the base weights, so that the adapter fits only a base changed alike.
_BASE_CHANGING = ("pissa", "olora", "corda", "lora_ga", "loftq")


class AdapterConfig:
    """A checked configuration. Module keys are names inside the base model: `model.layers.0.self_attn.q_proj`.

    base_model: what the adapter says it was trained on, for messages only.
    """

    def __init__(self, fields: _Fields) -> None:
        fields.refuse_unserved()
        self.base_model = fields.raw.get("base_model_name_or_path")
        self._rank = fields.rank("r", fields.raw.get("r", 8))
        self._alpha = fields.alpha("lora_alpha", fields.raw.get("lora_alpha", 8))
        self._ranks = fields.patterns("rank_pattern", fields.rank)
        self._alphas = fields.patterns("alpha_pattern", fields.alpha)
        self._rslora = fields.flag("use_rslora")
        targets = fields.names("target_modules")
        self._layers = fields.layers()
        self._layer_patterns = fields.layer_patterns()
        if isinstance(targets, str) and (self._layers is not None or fields.raw.get("layers_pattern") is not None):
            raise fields.refuse("layers_to_transform", "PEFT takes it only with a list of target_modules")
        if fields.names("layers_pattern") and self._layers is None:
            raise fields.refuse("layers_pattern", "PEFT needs layers_to_transform with it")
        self._targets = _Matcher(fields, "target_modules", DEFAULT_TARGETS if targets is None else targets)
        self._excluded = _Matcher(fields, "exclude_modules", fields.names("exclude_modules") or ())
        self.targets_all_linear = isinstance(targets, str) and targets.lower() == "all-linear"

    @classmethod
    def read(cls, directory: Path) -> AdapterConfig:
        """Read `directory/adapter_config.json`. AdapterFormatError for what would not be served as PEFT applies it."""
        return cls(_Fields(directory / CONFIG_FILE, _read(directory)))

    def is_target(self, key: str) -> bool:
        """Whether the adapter changes a linear module (PEFT's `check_target_module_exists`)."""
        if self._excluded.matches(key):
            return False
        if self.targets_all_linear or self._targets.is_exactly(key):
            return True
        return self._targets.matches(key) and (not self._layers or self._is_layer(key))

    def rank_and_scale(self, key: str) -> tuple[int, float]:
        """Rank and scaling of a target: `lora_alpha / r`, or `/ sqrt(r)` for rsLoRA, after the patterns."""
        rank = _first_match(self._ranks, key, self._rank)
        alpha = _first_match(self._alphas, key, self._alpha)
        return rank, alpha / (math.sqrt(rank) if self._rslora else rank)

    def _is_layer(self, key: str) -> bool:
        for pattern in self._layer_patterns:
            if match := pattern.match(key):
                return int(match["idx"]) in self._layers
        return False


_ANY_LAYER = r".*?\.[^.]*\.(?P<idx>\d+)\."


class _Fields:
    """The raw fields, and how a wrong one is refused."""

    def __init__(self, file: Path, raw: dict[str, Any]) -> None:
        self.file = file
        self.raw = raw
        self._match_time = MatchTime()

    def refuse(self, name: str, why: str) -> AdapterFormatError:
        return AdapterFormatError(f"{self.file}: {name} is {shown(self.raw.get(name))}: {why}")

    def refuse_unserved(self) -> None:
        if self.raw.get("peft_type", "LORA") != "LORA":
            raise self.refuse("peft_type", "only LORA is served")
        if self.raw.get("bias", "none") != "none":
            raise self.refuse("bias", "adapters that train biases are not supported; train with bias='none'")
        for name, why in _UNSERVED.items():
            if self.raw.get(name):
                raise self.refuse(name, why)
        init = self.raw.get("init_lora_weights")
        if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING):
            raise self.refuse(
                "init_lora_weights",
                "it changed the base weights too; save it with path_initial_model_for_weight_conversion",
            )

    def flag(self, name: str) -> bool:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(name, "true or false is needed")
        return bool(value)

    def rank(self, name: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            raise self.refuse(name, f"a rank from 1 to {MAX_RANK} is needed, not {shown(value)}")
        return value

    def alpha(self, name: str, value: Any) -> float:
        if type(value) not in (int, float) or not 0 <= value <= _MAX_SCALE:
            raise self.refuse(name, f"a finite number from 0 is needed, not {shown(value)}")
        return float(value)

    def patterns(self, name: str, check: Any) -> tuple[tuple[NamePattern, Any], ...]:
        """The (matcher, value) pairs of a pattern field, in the file's order."""
        value = self.raw.get(name)
        if value is None:
            return ()
        if not isinstance(value, dict):
            raise self.refuse(name, "an object from module names to numbers is needed")
        return tuple((self.compile(name, key, r"(.*\.)?({})$"), check(name, number)) for key, number in value.items())

    def names(self, name: str) -> str | tuple[str, ...] | None:
        """A list of module names, a regular expression, or null."""
        value = self.raw.get(name)
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(name, "a list of module names or one regular expression is needed")
        return tuple(value)

    def layers(self) -> frozenset[int] | None:
        value = self.raw.get("layers_to_transform")
        if value is None:
            return None
        numbers = value if isinstance(value, list) else [value]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise self.refuse("layers_to_transform", "a layer number or a list of them is needed")
        return frozenset(numbers)

    def layer_patterns(self) -> tuple[NamePattern, ...]:
        value = self.names("layers_pattern")
        if not value:
            return (self.compile("layers_pattern", _ANY_LAYER),)
        patterns = (value,) if isinstance(value, str) else value
        return tuple(self.compile("layers_pattern", each, r"(?:^|.*?\.){}\.(?P<idx>\d+)\.") for each in patterns)

    def compile(self, name: str, pattern: str, template: str = "{}") -> NamePattern:
        return NamePattern(pattern, partial(self.refuse, name), self._match_time, template)


class _Matcher:
    """PEFT's two ways to name modules: a regular expression for the whole key, or names that the key ends with."""

    def __init__(self, fields: _Fields, name: str, value: str | tuple[str, ...]) -> None:
        self._pattern = fields.compile(name, value) if isinstance(value, str) and value else None
        self._names = frozenset() if isinstance(value, str) else frozenset(value)
        self._suffixes = tuple(f".{each}" for each in self._names)

    def is_exactly(self, key: str) -> bool:
        return key in self._names

    def matches(self, key: str) -> bool:
        if self._pattern is not None:
            return self._pattern.fullmatch(key) is not None
        return key in self._names or key.endswith(self._suffixes)


def _first_match(patterns: tuple[tuple[NamePattern, Any], ...], key: str, default: Any) -> Any:
    """PEFT's `get_pattern_key`: the first pattern that matches the key's end, from a dot on."""
    return next((value for pattern, value in patterns if pattern.match(key)), default)


def _read(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG_FILE
    try:
        if not stat.S_ISDIR(os.stat(directory).st_mode):
            raise AdapterFormatError(f"{directory}: not a directory; a PEFT adapter directory is needed")
    except FileNotFoundError:
        raise AdapterFormatError(f"{directory}: no such directory") from None
    except (OSError, ValueError) as error:
        raise AdapterFormatError(f"{shown(str(directory))}: cannot be read: {_reason(error)}") from error
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise AdapterFormatError(f"{file}: not a regular file; a PEFT configuration is needed")
        with open(file, "rb") as stream:
            data = stream.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise AdapterFormatError(f"{file}: not found; a PEFT adapter directory is needed") from None
    except OSError as error:
        raise AdapterFormatError(f"{file}: cannot be read: {_reason(error)}") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise AdapterFormatError(f"{file}: is longer than {MAX_CONFIG_BYTES} bytes; that is no PEFT configuration")
    try:
        config = strict_json.loads(data)
    except ValueError as error:
        raise AdapterFormatError(f"{file}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterFormatError(f"{file}: a JSON object is needed, found {type(config).__name__}")
    return config


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
