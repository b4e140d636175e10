"""Options of `LLM`: the settings of `chorus serve` that make sense without HTTP; `option_types` has their types.

Tests: tests/server/library/test_options.py, tests/server/start/test_advice.py
"""

from __future__ import annotations

import difflib
import re
from typing import Any

from pydantic import ValidationError

from ...core.config import EngineConfig
from ...core.requests.request_params import InvalidRequest
from ..access.limits import RequestLimits
from ..settings import Settings
from ..start.advice import INSTEAD, NOTED, SHORT
from ..start.setting_faults import faults_of

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
        "allowed_media_domains",
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
        "tool_call_format",
        "weights",
    )
)

NAMED = frozenset(("model", "adapters"))
"""Options that are parameters of `LLM` by themselves."""

OTHERS = {
    "enable_lora": "adapters are always served; leave it out",
    "enable_chunked_prefill": "use chunked_prefill, which is on",
    "enable_prefix_caching": "use prefix_cache, which is on",
    "disable_radix_cache": "use prefix_cache=False",
    "lora_path": "use adapters",
    "lora_paths": "use adapters",
    "max_cpu_loras": "use host_cache_bytes, the memory for adapters that are not on the device",
    "max_loras": "use max_adapters_per_step",
    "swap_space": "use host_cache_bytes",
    "enforce_eager": "use graph_capture='off'",
    "data_parallel_size": "one LLM has one copy of the model; run a process for each",
    "trust_remote_code": "code of a model is never run; leave it out",
}
"""Options of other libraries whose advice differs from that for the flag."""

_FLAG = re.compile(r"--(no-)?([a-z0-9-]+)")


def _advice(name: str) -> str | None:
    """Advice for another library's option, from the one for its flag; None if it is not known."""
    if name in OTHERS:
        return OTHERS[name]
    flag = "--" + name.replace("_", "-")
    if (same := SHORT.get(flag)) is not None:
        return f"use {same[2:].replace('-', '_')}"
    told = INSTEAD.get(flag) or (f"{NOTED[flag]}: leave it out" if flag in NOTED else None)
    return None if told is None else with_options(told)


def with_options(text: str) -> str:
    """A text about flags as one about options: `prefix_cache=False` for `--no-prefix-cache`."""
    return _FLAG.sub(_as_option, text)


def _as_option(flag: re.Match[str]) -> str:
    name = flag[2].replace("-", "_")
    if name not in OPTIONS:
        return flag[0]
    return f"{name}=False" if flag[1] else name


def settings_of(options: dict[str, Any]) -> Settings:
    """Settings from an LLM's options. Raises InvalidRequest that names the wrong one."""
    for name in options:
        if name not in OPTIONS and (advice := _advice(name)) is not None:
            raise InvalidRequest(name, f"LLM has no option {name!r}; {advice}")
        if name not in OPTIONS:
            raise InvalidRequest(name, f"{name!r} {_why_not(name)}")
    try:
        return Settings(**options)
    except ValidationError as error:
        first = faults_of(error, {name: name for name in options})[0]
        raise InvalidRequest(first.name or "config", first.text) from None


def _why_not(name: str) -> str:
    if name in Settings.model_fields:
        return "only has a meaning for chorus serve; leave it out"
    near = difflib.get_close_matches(name, OPTIONS, n=1)
    return f"is no option of LLM; {f'did you mean {near[0]}?' if near else 'leave it out'}"
