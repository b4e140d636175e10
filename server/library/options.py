"""Options of `LLM`: the settings of `chorus serve` that make sense without HTTP."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import ValidationError

from ...core.config import EngineConfig
from ...core.requests.request_params import InvalidRequest
from ..access.limits import RequestLimits
from ..settings import ConfigFileError, Settings
from ..wanted import problem_of

OPTIONS = frozenset(
    (
        *EngineConfig.model_fields,
        *RequestLimits.model_fields,
        "adapter_cache",
        "adapter_cache_bytes",
        "adapter_roots",
        "adapter_source",
        "adapter_source_bytes",
        "adapter_source_hosts",
        "adapter_source_seconds",
        "adapter_uploads",
        "config",
        "generation_config",
        "adapter_chat_templates",
        "chat_template",
        "keep_versions",
        "lora_modules",
        "max_adapter_bytes",
        "max_uploaded_bytes",
        "override_generation_config",
        "served_model_name",
        "weights",
    )
)

OTHERS = {
    "enable_lora": "adapters are always served; leave it out",
    "lora_path": "use adapters",
    "max_loras": "use max_adapters_per_step",
    "max_lora_rank": "adapters of any rank are served; leave it out",
    "model_path": "use model",
    "trust_remote_code": "code of a model is never run; leave it out",
}
"""Options of other libraries, each with advice."""


def settings_of(options: dict[str, Any]) -> Settings:
    """Settings from an LLM's options. Raises InvalidRequest that names the wrong one."""
    for name in options:
        if name in OTHERS and name not in OPTIONS:
            raise InvalidRequest(name, f"LLM has no option {name!r}; {OTHERS[name]}")
        if name not in OPTIONS:
            raise InvalidRequest(name, f"{name!r} {_why_not(name)}")
    try:
        return Settings(**options)
    except ConfigFileError as error:
        raise InvalidRequest("config", str(error)) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "config"
        raise InvalidRequest(name, name + problem_of(first)) from None


def _why_not(name: str) -> str:
    if name in Settings.model_fields:
        return "only has a meaning for chorus serve; leave it out"
    near = difflib.get_close_matches(name, OPTIONS, n=1)
    return f"is no option of LLM; {f'did you mean {near[0]}?' if near else 'leave it out'}"
