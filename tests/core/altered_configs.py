"""One field of a `config.json` at a time altered, with what transformers and Chorus make of it.

Fields are those of the file, those that transformers' configuration class has, and those of sister families.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.config_json import ConfigJson
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import ModelConfig, UnsupportedModel
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams

from ..conftest import quiet
from .tiny_families import LLAMA3_ROPE, OF_CLASSES

#: A field that is taken away.
MISSING = object()

LINEAR = {"rope_type": "linear", "factor": 4.0}
OLD_LINEAR = {"type": "linear", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
YARN_SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3_SCALING = {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"}
MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
FULL, SLIDING = "full_attention", "sliding_attention"
BY_KIND = {FULL: {**LINEAR, "rope_theta": 900.0}, SLIDING: {"rope_type": "default", "rope_theta": 300.0}}

#: field → other values, of any family
VALUES: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu",),
    "attention_bias": (True,),
    "attention_chunk_size": (8,),
    "attention_multiplier": (0.5,),
    "attention_out_bias": (True,),
    "attn_logit_softcapping": (2.0,),
    "attn_temperature_tuning": (True,),
    "bias": (True,),
    "clip_qkv": (0.1,),
    "decoder_sparse_step": (2,),
    "embedding_multiplier": (3.0, 0.0),
    "final_logit_softcapping": (2.0,),
    "first_k_dense_replace": (2,),
    "head_dim": (8,),
    "hidden_act": ("gelu", "relu2", "gelu_pytorch_tanh"),
    "hidden_activation": ("gelu", "silu"),
    "is_causal": (False,),
    "layer_norm_eps": (0.3, 0.0),
    "layer_norm_epsilon": (0.3,),
    "layer_rope_theta": ([300.0, 0.0],),
    "logit_scale": (3.0,),
    "logits_scaling": (3.0,),
    "max_window_layers": (0, 1),
    "mlp_bias": (True,),
    "mlp_hidden_act": ("gelu",),
    "mlp_only_layers": ([0],),
    "moe_layer_freq": (2,),
    "mup_enabled": (True,),
    "n_group": (2,),
    "no_rope_layer_interval": (2,),
    "no_rope_layers": ([0, 1],),
    "norm_eps": (0.3,),
    "norm_epsilon": (0.3,),
    "norm_topk_prob": (True, False),
    "num_experts_per_tok": (1,),
    "num_kv_shared_layers": (1,),
    "original_max_position_embeddings": (32,),
    "partial_rotary_factor": (0.5, 1.0),
    "position_embedding_type": ("nope", "rope"),
    "qk_layernorm": (True,),
    "qkv_bias": (True, False),
    "query_pre_attn_scalar": (100,),
    "residual_multiplier": (0.5,),
    "rms_norm_eps": (0.3,),
    "rope_interleave": (True, False),
    "rope_local_base_freq": (300.0,),
    "rope_parameters": (
        {},
        {"rope_type": "default", "rope_theta": 700.0},
        {**LINEAR, "rope_theta": 700.0},
        {**YARN_SCALING, "rope_theta": 700.0},
        {"rope_type": "yarn", "rope_theta": 700.0, "original_max_position_embeddings": 64},
        {**LLAMA3_SCALING, "rope_theta": 700.0},
        {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
        {**LINEAR, "rope_theta": 700.0, "partial_rotary_factor": 0.5},
        {"rope_type": None, "rope_theta": 700.0},
        {"rope_type": "default", "rope_theta": None},
        {"rope_theta": 700.0},
        {"rope_type": "mrope", "rope_theta": 700.0, "mrope_section": [2, 3, 3]},
        {
            "rope_type": "default",
            "rope_theta": 700.0,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 16,
        },
        BY_KIND,
        {FULL: {**LINEAR, "rope_theta": 900.0}},
        {SLIDING: {**LINEAR, "rope_theta": 900.0}},
        {**BY_KIND, FULL: None},
        {**BY_KIND, FULL: {"rope_type": "linear", "factor": None, "rope_theta": 900.0}},
        {**BY_KIND, SLIDING: {}},
    ),
    "rope_pct": (0.5,),
    "rope_scaling": (
        {},
        LINEAR,
        OLD_LINEAR,
        DYNAMIC,
        YARN_SCALING,
        {**YARN_SCALING, "factor": None},
        {"rope_type": "yarn", "original_max_position_embeddings": 64},
        LLAMA3_SCALING,
        MROPE,
        {"type": None, "factor": 4.0},
        {"rope_type": "linear"},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
        BY_KIND,
    ),
    "rope_theta": (300.0, 1e30),
    "rotary_emb_base": (300,),
    "rotary_pct": (0.5,),
    "routed_scaling_factor": (3.0,),
    "score_func": ("softmax",),
    "scoring_func": ("softmax", "sigmoid"),
    "sliding_window": (8, 0),
    "sliding_window_pattern": (2, 1),
    "swiglu_limit": (0.5,),
    "tie_word_embeddings": (True, False),
    "topk_group": (2,),
    "topk_method": ("greedy", "group_limited_greedy"),
    "use_bias": (True, False),
    "use_bidirectional_attention": (True,),
    "use_cla": (True,),
    "use_parallel_residual": (True, False),
    "use_post_norm": (True, False),
    "use_qk_norm": (True, False),
    "use_qkv_bias": (True, False),
    "use_sliding_window": (True, False),
}

#: Fields that no text depends on, and those whose values the machinery of checkpoints reads.
LEFT_ALONE = {
    "architectures",
    "attention_dropout",
    "dtype",
    "initializer_range",
    "model_type",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "_name_or_path",
    "id2label",
    "label2id",
    "problem_type",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "tokenizer_class",
    "sep_token_id",
    "decoder_start_token_id",
    "task_specific_params",
    "finetuning_task",
    "vocab_size",
}


@dataclass(frozen=True)
class Alteration:
    """A value of one field, with the path to it."""

    path: tuple[str, ...]
    value: Any

    def __str__(self) -> str:
        value = "missing" if self.value is MISSING else json.dumps(self.value, sort_keys=True)
        return f"{'.'.join(self.path)}={value}"

    def of(self, raw: dict[str, Any]) -> dict[str, Any]:
        """A copy of the object with the field altered."""
        altered = json.loads(json.dumps(raw))
        holder = altered
        for name in self.path[:-1]:
            holder = holder[name]
        if self.value is MISSING:
            del holder[self.path[-1]]
        else:
            holder[self.path[-1]] = self.value
        return altered


def others(name: str, value: Any) -> Iterator[Any]:
    """Plausible other values of a field of a file."""
    yield from VALUES.get(name, ())
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, max(value // 2, 0), value + 0.5, 1)
    elif isinstance(value, float):
        yield from (value * 2 + 0.25, 1e30, 1.0)
    elif isinstance(value, str):
        yield from (value + "_2",)
    elif isinstance(value, list) and value:
        yield from ([], value[::-1], value[:-1])


def alterations(raw: dict[str, Any], config: Any, part: tuple[str, ...] = ()) -> list[Alteration]:
    """Of an object at `part`. config: transformers' of it."""
    found: list[Alteration] = []
    own = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    aliases = {*config.attribute_map, *config.attribute_map.values()}
    for name in sorted({*raw, *own, *aliases, *VALUES, "layer_types"} - LEFT_ALONE):
        value = raw.get(name, None if config.is_heterogeneous else getattr(config, name, None))
        if name.endswith(("_config", "token_id", "token_index")):
            continue
        values = list(others(name, value))
        if name == "layer_types" and name not in raw:
            values += [([FULL, SLIDING] * count)[:count] for count in (raw.get("num_hidden_layers"),) if count]
        if name in raw:
            values.append(MISSING)
        values.append(None)
        found += [Alteration((*part, name), each) for each in values if name not in raw or each != raw[name]]
        if isinstance(raw.get(name), dict):
            found += list(_inner(raw[name], (*part, name)))
    return list({str(each): each for each in found}.values())


def _inner(raw: dict[str, Any], part: tuple[str, ...]) -> Iterator[Alteration]:
    for name, value in raw.items():
        if isinstance(value, dict):
            yield from _inner(value, (*part, name))
            yield from (Alteration((*part, name), each) for each in (None, MISSING, {}))
            continue
        values = {"rope_type": ("default", "linear", "dynamic"), "type": ("default", "linear")}.get(name, ())
        for each in (*values, *others(name, value), None, MISSING):
            if each is MISSING or each != value:
                yield Alteration((*part, name), each)
    if any(isinstance(value, dict) for value in raw.values()):
        return
    for name, each in {
        "partial_rotary_factor": 0.5, "factor": 3.0, "llama_4_scaling_beta": 0.5, "attention_factor": 2.0,
        "mscale": 2.0, "mscale_all_dim": 0.7, "beta_fast": 4.0, "truncate": False, "rope_theta": 300.0,
        "type": "linear", "alpha": 20.0,
    }.items():  # fmt: skip
        if name not in raw:
            yield from (Alteration((*part, name), value) for value in (each, None))


PROMPTS = [
    torch.randint(3, 150, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (45,)
]


_PARTS = ("text_config", "llm_config")


def _scaled(ropes: dict[str, Any]) -> dict[str, Any]:
    """The ropes, or that of each type of layer, stretched by YaRN."""
    if any(isinstance(each, dict) for each in ropes.values()):
        return {kind: _scaled(each) if isinstance(each, dict) else each for kind, each in ropes.items()}
    return {**ropes, **YARN_SCALING}


#: Fields without which, or with null, some classes of transformers fail by mistake, as they derive no default. Here the
#: only possible value is taken.
DERIVED = {"head_dim", "num_key_value_heads", "layer_types"}


class Outcome:
    """Logits of a prompt's last token, or why there are none."""

    def __init__(self, logits: torch.Tensor | None, why: str = "") -> None:
        self.logits, self.why = logits, why

    def equals(self, other: Outcome) -> bool:
        if self.logits is None or other.logits is None or self.logits.shape != other.logits.shape:
            return False
        here, there = (each.logits.float().log_softmax(-1) for each in (self, other))
        most = max(float(there.abs().max()), 20.0)
        return bool((here - there).abs().max() < 1e-3 * most) and not bool(torch.isnan(here).any())


@dataclass
class Checkpoint:
    """A tiny checkpoint whose `config.json` is altered."""

    source: Path
    architecture: str | None = None
    """The class that computes it; None: by `AutoModelForCausalLM`."""
    is_scaled: bool = False
    """True if its ropes, of each type of layer, are by YaRN before anything is altered."""

    @cached_property
    def raw(self) -> dict[str, Any]:
        raw = json.loads((self.source / "config.json").read_text())
        if self.is_scaled:
            text = next((raw[name] for name in _PARTS if name in raw), raw)
            text["rope_parameters"] = _scaled(text["rope_parameters"])
        return raw

    @property
    def has_ropes(self) -> bool:
        """True if the file has ropes that can be scaled, and both transformers and Chorus take scaled ones."""
        raw = json.loads((self.source / "config.json").read_text())
        text = next((raw[name] for name in _PARTS if name in raw), raw)
        if not text.get("rope_parameters"):
            return False
        return self.ours(self.raw).logits is not None and self.reference(self.raw).logits is not None

    @cached_property
    def _directory(self) -> Path:
        path = Path(tempfile.mkdtemp(prefix="altered"))
        for each in self.source.iterdir():
            if each.name not in ("config.json", "generation_config.json") and each.is_file():
                (path / each.name).symlink_to(each)
        return path

    def remove(self) -> None:
        shutil.rmtree(self._directory)

    @cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        with quiet():
            return self._model(self._config(self.raw)).from_pretrained(self.source, dtype=torch.float32).state_dict()

    @cached_property
    def _ties(self) -> list[bool]:
        return _ties_of(self._config(self.raw))

    def _model(self, config: Any) -> Any:
        import transformers

        if self.architecture is not None:
            return getattr(transformers, self.architecture)
        if (own := OF_CLASSES.get(type(config).__name__)) is not None:
            return getattr(transformers, own)
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]

    def _config(self, raw: dict[str, Any]) -> Any:
        from transformers import AutoConfig

        (self._directory / "config.json").write_text(json.dumps(raw))
        return AutoConfig.from_pretrained(self._directory)

    @property
    def part(self) -> tuple[str, ...]:
        """Where the text part is."""
        return next(((name,) for name in _PARTS if name in self.raw), ())

    @cached_property
    def alterations(self) -> list[Alteration]:
        config = self._config(self.raw)
        if not self.part:
            return alterations(self.raw, config)
        inner, text = self.raw[self.part[0]], config.get_text_config()
        found = alterations(inner, text, self.part)
        outside = {name: value for name, value in self.raw.items() if not isinstance(value, dict)}
        return found + [each for each in alterations(outside, text) if each.value is not MISSING]

    @cached_property
    def rope_alterations(self) -> list[Alteration]:
        """Those of fields that ropes depend on, and older forms without `rope_parameters`."""
        names = {"max_position_embeddings", "original_max_position_embeddings", "rope_scaling", "rope_parameters"}
        names |= {"partial_rotary_factor", "rope_theta", "rope_local_base_freq", "swa_rope_theta", "layer_rope_theta"}
        return [each for each in self.alterations if not names.isdisjoint(each.path)]

    @cached_property
    def sources(self) -> str:
        """The text of transformers' classes of this model."""
        config = self._config(self.raw)
        parts = [config, config.get_text_config()]
        with quiet():
            model = self._model(config)(config)
        types = {type(model), *(type(each) for each in model.modules())}
        types |= {base for each in parts for base in type(each).__mro__ if base.__name__.endswith("Config")}
        modules = {inspect.getmodule(each) for each in types if "transformers" in each.__module__}
        modules.add(sys.modules["transformers.modeling_rope_utils"])
        return "\n".join(inspect.getsource(each) for each in modules if each is not None)

    def reference(self, raw: dict[str, Any]) -> Outcome:
        """What transformers makes of the file."""
        try:
            with quiet(), torch.no_grad():
                config = self._config(raw)
                if _ties_of(config) != self._ties:
                    model = self._model(config).from_pretrained(self._directory, dtype=torch.float32)
                else:
                    model = self._model(config)(config).eval()
                    own = model.state_dict()
                    given = self._tensors
                    if missing := sorted(own.keys() - given.keys()):
                        return Outcome(None, f"tensors are missing: {missing[0]}")
                    model.load_state_dict({name: given[name] for name in own})
                text = model.language_model if self.architecture and "Llama4" in self.architecture else model
                rows = [text(torch.tensor([each]), use_cache=False).logits[0, -1] for each in PROMPTS]
                return Outcome(torch.stack(rows))
        except Exception as error:
            return Outcome(None, f"{type(error).__name__}: {error}")

    @cached_property
    def unaltered(self) -> tuple[ModelConfig, Outcome]:
        """What Chorus reads, and transformers computes, without an alteration."""
        found, ours = self.reference(self.raw), self.ours(self.raw)
        assert ours.equals(found), f"{self.source}: {ours.why or 'other logits'}; transformers: {found.why}"
        return self.read(self.raw), found

    def fault(self, alteration: Alteration) -> str | None:
        """How Chorus serves the altered file otherwise than transformers; None: it doesn't, or refuses the file."""
        raw, (model, found) = alteration.of(self.raw), self.unaltered
        try:
            altered = self.read(raw)
        except UnsupportedModel:
            return None
        is_same = altered == model and altered.tensors == model.tensors
        if is_same and alteration.path[-1] not in self.sources:
            return None
        want = self.reference(raw)
        if is_same:
            if want.logits is None:
                return (
                    None
                    if self._has_no_bearing(raw, alteration, want)
                    else f"{alteration}: transformers fails: {want.why}"
                )
            return None if want.equals(found) else f"{alteration}: transformers computes other logits, Chorus doesn't"
        ours = self.ours(raw)
        if ours.logits is None or ours.equals(want) or self._is_derived(alteration, want):
            return None
        return f"{alteration}: other logits than those of transformers {want.why}"

    def _has_no_bearing(self, raw: dict[str, Any], alteration: Alteration, want: Outcome) -> bool:
        """True if no number depends on an altered field that transformers refuses."""
        is_inner = alteration.path[: len(self.part)] == self.part
        is_of_whole = bool(self.part) and (not is_inner or alteration.path[-1] == "tie_word_embeddings")
        return is_of_whole or self._is_derived(alteration, want) or not self.reads(raw, alteration)

    def _is_derived(self, alteration: Alteration, want: Outcome) -> bool:
        """True if transformers fails as it derives no default."""
        is_without = alteration.value is None or alteration.value is MISSING
        text = self.raw[self.part[0]] if self.part else self.raw
        has_no_dim = "head_dim" in text and text["head_dim"] is None and "'NoneType'" in want.why
        return want.logits is None and (has_no_dim or (is_without and alteration.path[-1] in DERIVED))

    def reads(self, raw: dict[str, Any], alteration: Alteration) -> bool:
        """True if Chorus reads the altered field."""
        names: set[str] = set()
        get = ConfigJson._get  # noqa: SLF001 - all getters call it

        def noting(fields: ConfigJson, name: str, default: Any) -> Any:
            names.add(f"{fields._prefix}{name}")  # noqa: SLF001
            return get(fields, name, default)

        with patch.object(ConfigJson, "_get", noting):
            self.read(raw)
        return ".".join(alteration.path) in names

    def read(self, raw: dict[str, Any]) -> ModelConfig:
        (self._directory / "config.json").write_text(json.dumps(raw))
        return read_model_config(self._directory)

    def ours(self, raw: dict[str, Any]) -> Outcome:
        """What Chorus makes of it. Raises what is no refusal."""
        try:
            self.read(raw)
            return Outcome(served(self._directory))
        except (UnsupportedModel, ValueError) as error:
            if type(error) not in (UnsupportedModel, ValueError) and "chorus" not in type(error).__module__:
                raise
            return Outcome(None, str(error))


def _ties_of(config: Any) -> list[bool]:
    return [getattr(each, "tie_word_embeddings", False) for each in (config, config.get_text_config())]


def served(model: Path) -> torch.Tensor:
    """Logits `[prompts, vocab]` of each prompt's last token, all in one step."""
    config = EngineConfig(model=model, memory_bytes=4 << 20, threads=1, dtype="float32", cpu_kernels="torch")
    executor = CpuExecutor(config)
    seen: list[torch.Tensor] = []
    forward = executor.decoder.forward
    executor.decoder.forward = lambda batch: seen.append(forward(batch)) or seen[-1]
    engine, rows = Engine(EngineConfig(model="."), executor), []
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(Request(str(index), prompt, RequestParams(1, temperature=0, logprobs=0)))
        while engine.has_work():
            engine.step()
        rows.append(seen[-1][-1].clone())
    return torch.stack(rows)
