"""`adapter_config.json`: the modules that an adapter changes, with their ranks and scales, exactly as PEFT computes
them.

Tests: tests/memory/files/test_adapter_files.py, tests/memory/files/names/test_name_pattern.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from . import strict_json
from .default_targets import default_targets
from .directory import AdapterDirectory
from .error import AdapterFormatError, shown
from .names.module_names import ModuleNames
from .names.name_pattern import NamePattern, Steps
from .score_head import MODULES
from .whole_copies import COPIED, MAX_TRAINED_ROWS

CONFIG_FILE = "adapter_config.json"

#: Two patterns for each of a large model's 1,000 modules, by their full names, take half of it. While it is parsed, no
#: other Python code runs.
MAX_CONFIG_BYTES = 1 << 18
MAX_RANK = 4096
MAX_BASE_CHARACTERS = 256
MAX_PATTERNS = 1024
MAX_INVOCATION_TOKENS = 1024

#: Values of `bias`: which biases of the base model PEFT trains.
BIASES = ("none", "all", "lora_only")

_MAX_SCALE = 3e38  # scales are applied in float32

#: In place of a usual name: the module is in a vision tower, whose tensors are checked there (`tower_tensors`).
IN_TOWER = ""

#: Another name of a module of `COPIED`.
_USUAL = {"unembed_tokens": "lm_head"}

#: Fields that change the arithmetic in unsupported ways, with the remedy for each.
_UNSERVED = {
    "layer_replication": "the base model's layers are fixed; train without layer_replication",
    "use_qalora": "QALoRA is not supported; train plain LoRA",
    "use_bdlora": "block-diagonal LoRA is not supported; train plain LoRA",
    "arrow_config": "Arrow routing is not supported; serve its adapters under names of their own",
    "kasa_config": "KaSA is not supported; train plain LoRA",
    "monteclora_config": "MonteCLoRA is not supported; train plain LoRA",
    "velora_config": "VeLoRA is not supported; train plain LoRA",
}

#: Fields that are obeyed, or that change nothing once an adapter is trained. Their effect on training is in its
#: weights, and in `init_lora_weights` where it is also in the base model's.
_SERVED = frozenset(
    [
        "peft_type",
        "task_type",
        "base_model_name_or_path",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "bias",
        "fan_in_fan_out",
        "lora_bias",
        "use_dora",
        "modules_to_save",
        "trainable_token_indices",
        "init_lora_weights",
        "alora_invocation_tokens",
        "auto_mapping",
        "peft_version",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_config",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
    ]
)

#: Names that PEFT gives to switches of its variants of LoRA.
_VARIANT = re.compile(r"use_\w+|\w+_config")

#: Tasks of models whose head samples no tokens.
_CLASSIFIERS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")

_CONVERT = (
    "it changed the base weights too; convert it to plain LoRA with PEFT: model.save_pretrained(DIR, "
    "path_initial_model_for_weight_conversion=INITIAL), where INITIAL is the adapter as it was saved before training, "
    "with init_lora_weights=True in its configuration"
)

#: Initialisations that also change the base weights, by how their names begin, and the remedy: the adapter fits only a
#: base model changed alike.
_BASE_CHANGING = {
    **dict.fromkeys(("pissa", "olora", "corda", "lora_ga"), _CONVERT),
    "loftq": "it changed the base weights too, and PEFT has no conversion; serve the base model that was saved with it "
    "(model.get_base_model().save_pretrained(BASE)), and set init_lora_weights to true",
}


class AdapterConfig:
    """A checked configuration. Module keys are names inside the base model: `model.layers.0.self_attn.q_proj`."""

    def __init__(self, fields: _Fields) -> None:
        fields.refuse_unserved()
        self.file = fields.file
        """The file that says it."""
        base = fields.raw.get("base_model_name_or_path")
        self.base_model = base[:MAX_BASE_CHARACTERS] if isinstance(base, str) and base else None
        """The base model that the adapter names, if any."""
        version = fields.raw.get("peft_version")
        self.peft_version = version[:MAX_BASE_CHARACTERS] if isinstance(version, str) else None
        """The version of PEFT that it names, if any."""
        self._rank = fields.rank("r", fields.raw.get("r", 8))
        self._alpha = fields.alpha("lora_alpha", fields.raw.get("lora_alpha", 8))
        self._ranks = fields.patterns("rank_pattern", fields.rank)
        self._alphas = fields.patterns("alpha_pattern", fields.alpha)
        self._rslora = fields.flag("use_rslora")
        self.parameters = fields.parameters()
        """Ends of the names of parameters that it changes as matrices, such as `mlp.experts.down_proj`."""
        named = fields.names("target_modules")
        layers = fields.layers()
        self._layer_patterns = fields.layer_patterns()
        if isinstance(named, str) and (layers is not None or fields.raw.get("layers_pattern") is not None):
            raise fields.refuse("layers_to_transform", "PEFT takes it only with a list of target_modules")
        if fields.names("layers_pattern") and layers is None:
            raise fields.refuse("layers_pattern", "PEFT needs layers_to_transform with it")
        targets = fields.default_targets() if named is None else named
        self._layers = None if isinstance(targets, str) else layers
        self._targets = _Matcher(fields, "target_modules", targets)
        self._excluded = _Matcher(fields, "exclude_modules", fields.names("exclude_modules") or ())
        self.targets_all_linear = isinstance(targets, str) and targets.lower() == "all-linear"
        self.names_targets = named is not None and not self.targets_all_linear
        """False if PEFT chooses the modules."""
        self.has_head = fields.has_head
        """True if it has a score head of its own."""
        self.saved_modules = fields.saved_modules()
        """Modules that the adapter has whole; see `whole_copies`."""
        self._saved_names = fields.saved_names()
        self.trained_tokens = fields.trained_tokens()
        """Tokens whose rows are trained, of each module, in the order of the rows in the file."""
        self.refuse = fields.refuse
        """Returns the error for a field and a reason."""
        self.ties_weights = fields.flag("ensure_weight_tying")
        """True if trained embeddings are also the head's, in a model that ties the two."""
        self.invocation_tokens = fields.invocation_tokens()
        """Of activated LoRA: it changes a prompt's tokens from the last occurrence of these on; empty: all tokens."""
        self.uses_dora = fields.flag("use_dora")
        self.lora_bias = fields.flag("lora_bias")
        """Whether B has a bias."""
        self.bias = fields.bias()
        """One of `BIASES`."""
        fields.refuse_together()

    @classmethod
    def of(
        cls,
        file: Path,
        fields: Mapping[str, Any],
        usual_names: Mapping[str, str] = _USUAL,
        model_type: str | None = None,
    ) -> AdapterConfig:
        """The configuration with PEFT's `fields` of LoRA, which `file` says, maybe in another way. Raises
        AdapterFormatError if it can't be served as PEFT applies it. usual_names, model_type: see `ModulePaths`.
        """
        return cls(_Fields(file, fields, usual_names, model_type))

    def targets(self, names: ModuleNames) -> dict[str, tuple[int, float]]:
        """Rank and scale of every linear module that it changes (PEFT's `check_target_module_exists`).

        The scale is `lora_alpha / r`, or `lora_alpha / sqrt(r)` for rsLoRA, after the patterns.
        """
        if self.targets_all_linear:
            found = names.ends
        else:
            found = self._targets.ends(names)
            if self._layers:
                found = found & self._in_layers(names, self._layers) | self._targets.named(names)
        return self._ranks_and_scales(names, found & ~self._excluded.ends(names) & ~self._saved(names))

    def _saved(self, names: ModuleNames) -> int:
        """The ends of the names of modules that are saved whole, and of those inside: PEFT puts no LoRA on them."""
        if not self._saved_names:
            return 0
        inner = tuple(f".{saved}." for saved in self._saved_names)
        return names.ends_of(name for name in names.names if any(each in f".{name}." for each in inner))

    def parameter_targets(self, names: ModuleNames) -> dict[str, tuple[int, float]]:
        """As `targets`, of parameters. names: of parameters of the model."""
        return self._ranks_and_scales(names, names.ends_of(self.parameters_in(names)))

    def parameters_in(self, names: ModuleNames) -> set[str]:
        """Those of the names that it names."""
        return {name for tail in self.parameters for name in names.with_tail(tail)}

    def scale_of(self, name: str) -> float:
        """The scale of a module, whether it is targeted or not."""
        names = ModuleNames([name])
        return self._ranks_and_scales(names, names.ends)[name][1]

    def _ranks_and_scales(self, names: ModuleNames, ends: int) -> dict[str, tuple[int, float]]:
        ranks = _first_matches(self._ranks, names, ends, self._rank)
        alphas = _first_matches(self._alphas, names, ends, self._alpha)
        return {
            name: (rank, alphas[name] / (math.sqrt(rank) if self._rslora else rank)) for name, rank in ranks.items()
        }

    def _in_layers(self, names: ModuleNames, layers: frozenset[int]) -> int:
        """The ends of the names in one of the layers to transform."""
        ends = 0
        for pattern, anywhere in self._layer_patterns:
            ends |= pattern.before_number(names, anywhere=anywhere)
        found = ((name, _LAYER.search(name)) for name in names.at(ends))
        return names.ends_of(name for name, layer in found if layer and int(layer[1]) in layers)


_ANY_LAYER = r".*?\.[^.]*"
_LAYER = re.compile(r"\.([0-9]+)\.")


def _is_on(value: Any) -> bool:
    """True if a value switches a variant of LoRA on: PEFT makes a configuration of an object, with defaults if it is
    empty.
    """
    return bool(value) or isinstance(value, dict)


class _Fields:
    """The raw fields of a configuration, and the errors for wrong ones."""

    def __init__(
        self,
        file: Path,
        raw: Mapping[str, Any],
        usual_names: Mapping[str, str] = _USUAL,
        model_type: str | None = None,
    ) -> None:
        self.file = file
        self.raw = raw
        self._usual = usual_names
        self._model_type = model_type
        self._steps = Steps()

    def refuse(self, name: str, why: str) -> AdapterFormatError:
        return AdapterFormatError(f"{self.file}: {name} is {shown(self.raw.get(name))}: {why}")

    def refuse_unserved(self) -> None:
        self._refuse_heads()
        if unserved := [each for each in self.saved_modules() if each not in COPIED]:
            raise self.refuse(
                "modules_to_save",
                f"fully trained modules are not supported, such as {shown(unserved[0])}, except a score head; train "
                "without them",
            )
        for name, why in _UNSERVED.items():
            if _is_on(self.raw.get(name)):
                raise self.refuse(name, why)
        for name, value in self.raw.items():
            if _is_on(value) and name not in _SERVED and _VARIANT.fullmatch(name):
                raise self.refuse(name, "this variant of LoRA is not known; train plain LoRA, or remove the field")
        self._refuse_base_changing(self.raw.get("init_lora_weights"))

    def _refuse_base_changing(self, init: Any) -> None:
        if isinstance(init, str):
            for begin, why in _BASE_CHANGING.items():
                if init.lower().startswith(begin):
                    raise self.refuse("init_lora_weights", why)

    def _refuse_heads(self) -> None:
        """Refuse heads that are not those of a classifier of texts."""
        if self.has_head and self.raw.get("alora_invocation_tokens"):
            raise self.refuse("modules_to_save", "a head of activated LoRA is not supported; train plain LoRA")
        if self.raw.get("task_type") in _CLASSIFIERS and self.raw.get("modules_to_save") and not self.has_head:
            raise self.refuse(
                "task_type",
                f"such a model has a head of its own, which it saves ({shown(self.raw['modules_to_save'])}); only the "
                "head score of task_type='SEQ_CLS' is served: train with that, or with task_type='CAUSAL_LM'",
            )

    @property
    def has_head(self) -> bool:
        """True if it saves the head of a classifier of texts."""
        saved, task = self.raw.get("modules_to_save"), self.raw.get("task_type")
        return (task not in _CLASSIFIERS or task == "SEQ_CLS") and isinstance(saved, list) and "score" in saved

    def bias(self) -> str:
        value = self.raw.get("bias", "none")
        if value not in BIASES:
            raise self.refuse("bias", f"one of {', '.join(BIASES)} is needed")
        return value

    def refuse_together(self) -> None:
        """Refuse fields that PEFT takes only one at a time, and a bias that base tokens would have to have, too."""
        if self.raw.get("use_dora") and self.raw.get("lora_bias"):
            raise self.refuse("lora_bias", "PEFT has no DoRA with it; train with lora_bias=False or use_dora=False")
        if self.raw.get("target_parameters"):
            for name in ("use_dora", "lora_bias", "alora_invocation_tokens"):
                if self.raw.get(name):
                    raise self.refuse(name, "PEFT has no target_parameters with it; train without either")
        if self.raw.get("alora_invocation_tokens") is None:
            return
        if self.raw.get("use_dora"):
            raise self.refuse("use_dora", "PEFT has no DoRA with alora_invocation_tokens; train without either")
        if self.bias() != "none":
            raise self.refuse(
                "bias",
                "with alora_invocation_tokens the tokens before them are the base model's, whose biases PEFT replaces "
                "for all tokens; train with bias='none'",
            )

    def default_targets(self) -> tuple[str, ...] | str:
        """The modules that PEFT chooses, none if it does so only for parameters."""
        found = default_targets(self._model_type)
        if found is None and not self.raw.get("target_parameters"):
            kind = shown(self._model_type)
            raise self.refuse(
                "target_modules", f"PEFT has no default for a base model of type {kind}; name the modules"
            )
        return found or ()

    def saved_names(self) -> tuple[str, ...]:
        """The names in `modules_to_save`."""
        value = self.names("modules_to_save") or ()
        return (value,) if isinstance(value, str) else value

    def saved_modules(self) -> tuple[str, ...]:
        """Last parts of the names in `modules_to_save`, without score heads and modules of a vision tower; others by
        their usual names.
        """
        found = (name.rpartition(".")[2] for name in self.saved_names())
        named = dict.fromkeys(self._usual.get(name, name) for name in found)
        return tuple(name for name in named if name != IN_TOWER and not (self.has_head and name in MODULES))

    def trained_tokens(self) -> dict[str, tuple[int, ...]]:
        """Of each module by its usual name; a list is of the token embeddings."""
        name = "trainable_token_indices"
        value = self.raw.get(name) or {}
        by_module = {"embed_tokens": value} if isinstance(value, list) else value
        if not isinstance(by_module, dict):
            raise self.refuse(name, "a list of token ids, or an object from module names to such lists, is needed")
        found = {}
        for path, tokens in by_module.items():
            module = path.rpartition(".")[2]
            module = self._usual.get(module, module)
            if module not in COPIED or module in found:
                raise self.refuse(name, f"rows of {', '.join(COPIED)} are served, of each once, not of {shown(path)}")
            if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
                raise self.refuse(name, "lists of token ids are needed")
            if not 0 < len(tokens) <= MAX_TRAINED_ROWS or len(set(tokens)) < len(tokens):
                raise self.refuse(name, f"from 1 to {MAX_TRAINED_ROWS} different tokens are needed, not {len(tokens)}")
            found[module] = tuple(tokens)
        return found

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
        if len(value) > MAX_PATTERNS:
            raise self.refuse(name, f"{len(value)} patterns, at most {MAX_PATTERNS} are taken")
        return tuple((self.compile(name, key), check(name, number)) for key, number in value.items())

    def names(self, name: str) -> str | tuple[str, ...] | None:
        """A list of module names, a regular expression, or null."""
        value = self.raw.get(name)
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(name, "a list of module names or one regular expression is needed")
        return tuple(value)

    def parameters(self) -> tuple[str, ...]:
        value = self.raw.get("target_parameters") or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse("target_parameters", "a list of names of parameters is needed")
        return tuple(value)

    def invocation_tokens(self) -> tuple[int, ...]:
        value = self.raw.get("alora_invocation_tokens")
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 1 << 31 for token in value):
            raise self.refuse("alora_invocation_tokens", "a list of token ids is needed")
        if not 0 < len(value) <= MAX_INVOCATION_TOKENS:
            raise self.refuse("alora_invocation_tokens", f"from 1 to {MAX_INVOCATION_TOKENS} tokens are needed")
        return tuple(value)

    def layers(self) -> frozenset[int] | None:
        value = self.raw.get("layers_to_transform")
        if value is None:
            return None
        numbers = value if isinstance(value, list) else [value]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise self.refuse("layers_to_transform", "a layer number or a list of them is needed")
        return frozenset(numbers)

    def layer_patterns(self) -> tuple[tuple[NamePattern, bool], ...]:
        """Patterns of the text before a layer's number; True if the text may begin after any dot."""
        value = self.names("layers_pattern")
        if not value:
            return ((self.compile("layers_pattern", _ANY_LAYER), False),)
        patterns = (value,) if isinstance(value, str) else value
        if len(patterns) > MAX_PATTERNS:
            raise self.refuse("layers_pattern", f"{len(patterns)} patterns, at most {MAX_PATTERNS} are taken")
        compiled = [self.compile("layers_pattern", each) for each in patterns]
        if any(pattern.is_one_of_several for pattern in compiled):
            raise self.refuse("layers_pattern", "PEFT looks for a number after the last alternative only; use a group")
        return tuple((pattern, True) for pattern in compiled)

    def compile(self, name: str, pattern: str) -> NamePattern:
        return NamePattern(pattern, partial(self.refuse, name), self._steps)


class _Matcher:
    """PEFT's two ways to name modules: a regular expression for the whole key, or names that the key ends with."""

    def __init__(self, fields: _Fields, name: str, value: str | tuple[str, ...]) -> None:
        self._pattern = fields.compile(name, value) if isinstance(value, str) and value else None
        self._names = frozenset() if isinstance(value, str) else frozenset(value)

    def named(self, names: ModuleNames) -> int:
        """The ends of the names that are given in full."""
        return names.ends_of(name for name in names.names if name in self._names)

    def ends(self, names: ModuleNames) -> int:
        """The ends of all names that match."""
        if self._pattern is not None:
            return self._pattern.whole(names)
        return names.ends_of(name for tail in self._names for name in names.with_tail(tail))


def _first_matches(
    patterns: tuple[tuple[NamePattern, Any], ...], names: ModuleNames, ends: int, default: Any
) -> dict[str, Any]:
    """For each of `ends`, the value of the first pattern that matches it after a dot: PEFT's `get_pattern_key`."""
    found = dict.fromkeys(names.at(ends), default)
    for pattern, value in patterns:  # all patterns are compiled: a wrong one is refused even if no name is left
        matching = pattern.tail(names, ends)
        ends &= ~matching
        found.update(dict.fromkeys(names.at(matching), value))
    return found


def read_fields(directory: AdapterDirectory) -> dict[str, Any]:
    """The fields of a directory's `adapter_config.json`, unchecked. Raises AdapterFormatError if it is no object."""
    file = directory.path / CONFIG_FILE
    data = directory.read(CONFIG_FILE, MAX_CONFIG_BYTES, "a PEFT configuration")
    try:
        config = strict_json.loads(data)
    except ValueError as error:
        raise AdapterFormatError(f"{file}: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterFormatError(f"{file}: a JSON object is needed, found {type(config).__name__}")
    return config
