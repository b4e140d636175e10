"""Default sampling parameters of requests: the model's recommendation, or OpenAI's defaults."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.model.config_json import ConfigJson
from ...core.requests.request_params import RequestParams

if TYPE_CHECKING:
    from ..settings import Settings

OVERRIDABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""Fields of generation_config.json that are defaults of requests."""


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

    @classmethod
    def of(cls, settings: Settings) -> SamplingDefaults:
        """The defaults that the settings define. Raises ValueError for a value that no request could have."""
        own = cls.read(settings.model) if settings.generation_config == "auto" else cls()
        return own.overridden(settings.override_generation_config)

    def overridden(self, overrides: Mapping[str, Any]) -> SamplingDefaults:
        """The same with some values replaced. overrides: by the names of generation_config.json."""
        values = dict[str, Any]()
        for name, value in overrides.items():
            if name not in OVERRIDABLE:
                near = difflib.get_close_matches(name, OVERRIDABLE, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it may set {', '.join(OVERRIDABLE)}"
                raise ValueError(f"override_generation_config sets {name!r}, which has no default; {hint}")
            whole = name in ("top_k", "max_new_tokens")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                what = "a whole number" if whole else "a number"
                raise ValueError(f"override_generation_config: {name} is {value!r}; it must be {what}")
            values["max_tokens" if name == "max_new_tokens" else name] = max(value, 0) if name == "top_k" else value
        try:
            RequestParams(**values)
        except ValueError as error:
            told = str(error).replace("max_tokens", "max_new_tokens")
            raise ValueError(f"override_generation_config: {told}") from None
        return replace(self, **values)

    @classmethod
    def read(cls, model: Path) -> SamplingDefaults:
        """The defaults in the model's generation_config.json, if it has one.

        As in vLLM, `do_sample` is ignored. Raises ValueError for a value that no request could have.
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
        has_limit = config.raw.get("max_new_tokens") is not None
        return cls(top_k=top_k, max_tokens=config.integer("max_new_tokens") if has_limit else None, **numbers)


def _number(config: ConfigJson, name: str, default: float) -> float:
    value = config.raw.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise config.refuse(name, "it must be a number")
    return float(value)
