"""How a checkpoint's vectors and scores are made: sentence-transformers' files, and fields of `config.json`.

Tests: tests/core/model/test_pooling_config.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..requests.request_params import Pooling
from .config_json import ConfigJson, UnsupportedModel
from .read_config import CLASSIFIER

MODULES_FILE = "modules.json"

_MODES: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
"""sentence-transformers' names of poolings."""

_FLAGS: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
"""Older boolean fields of the pooling configuration, and the pooling that each one selects if it is true."""

MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How vectors and scores are made of hidden states."""

    hidden_size: int | None = None
    """Length of vectors; None: not known."""
    pooling: Pooling = "last"
    normalises: bool = True
    """True if vectors have length 1."""
    dimensions: tuple[int, ...] | None = None
    """The lengths that vectors may be cut to; None: any."""
    refusal: str | None = None
    """Why the checkpoint's vectors can't be made; None if they can."""
    is_classifier: bool = False
    """True if the checkpoint has a score head."""
    labels: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    """Names of the head's labels."""
    problem_type: str | None = None
    """The head's task, by the name that transformers gives it."""
    classifier_tokens: tuple[str, str] | None = None
    """The tokens whose logits score a text: the one of false, and the one of true (`classifier_from_token`)."""

    @classmethod
    def read(cls, model: Path, classifier_from_token: Sequence[str] | None = None) -> PoolingConfig:
        """Read the files of a model directory, as far as there are any. Raises UnsupportedModel for broken ones.

        classifier_from_token: replaces the field of `config.json`.
        """
        file = model / "config.json"
        config = ConfigJson.read(file) if file.is_file() else ConfigJson(file, {})
        if classifier_from_token:
            config.raw["classifier_from_token"] = list(classifier_from_token)
        tokens = _classifier_tokens(config)
        architecture = next(iter(config.texts("architectures") or ()), "")
        labels, sizes = config.object("id2label"), config.text_part("text_config")
        pooling, normalises, refusal = _sentence_transformer(model)
        return cls(
            sizes.optional("hidden_size"),
            pooling,
            normalises,
            tuple(map(int, config.numbers("matryoshka_dimensions"))) or None,
            refusal,
            is_classifier=architecture.endswith(CLASSIFIER) and tokens is None,
            labels={}
            if labels is None
            else {int(index): str(name) for index, name in labels.raw.items() if index.isdigit()},
            problem_type=config.text("problem_type") if config.has("problem_type") else None,
            classifier_tokens=tokens,
        )


def _classifier_tokens(config: ConfigJson) -> tuple[str, str] | None:
    tokens = config.raw.get("classifier_from_token")
    if tokens is None and config.raw.get("is_original_qwen3_reranker"):
        tokens = ["no", "yes"]
    if tokens is None:
        return None
    if not isinstance(tokens, list) or len(tokens) != 2 or not all(isinstance(token, str) for token in tokens):
        raise config.refuse("classifier_from_token", "two tokens are needed, false's and true's")
    return tokens[0], tokens[1]


def _sentence_transformer(model: Path) -> tuple[Pooling, bool, str | None]:
    """The pooling, whether vectors are normalised, and why they can't be made; without files, as Qwen3-Embedding's."""
    if not (file := model / MODULES_FILE).is_file():
        return "last", True, None
    pooling, normalises, refusal = "mean", False, None
    modules = _read(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise UnsupportedModel(f"{file}: a list of objects is needed")
    for module in modules:
        kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if kind == "Pooling":
            pooling, refusal = _pooling(model / path / "config.json")
        elif kind == "Normalize":
            normalises = True
        elif kind != "Transformer":
            refusal = f"{MODULES_FILE} has the module {kind}; served are Transformer, Pooling and Normalize"
        if refusal is not None:
            break
    return pooling, normalises, refusal


def _pooling(file: Path) -> tuple[Pooling, str | None]:
    fields = _read(file)
    if not isinstance(fields, dict):
        raise UnsupportedModel(f"{file}: a JSON object is needed")
    given = fields.get("pooling_mode")
    modes = [given] if isinstance(given, str) else list(given or ())
    modes += [name for name, value in fields.items() if name.startswith("pooling_mode_") and value is True]
    found: list[Pooling | None] = [_MODES.get(mode) or _FLAGS.get(mode) for mode in modes or ("mean",)]
    if len(found) == 1 and (pooling := found[0]) is not None:
        return pooling, None
    asked = ", ".join(map(str, modes))
    return "last", f"{file.parent.name}/{file.name} asks for {asked}; one of lasttoken, mean and cls is served"


def _read(file: Path) -> Any:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise UnsupportedModel(f"{file}: is larger than {MAX_FILE_BYTES} bytes")
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{file}: cannot be read: {error}") from error
