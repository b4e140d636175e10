"""Arguments that methods of `LLM` do not have: each is refused with advice.

Tests: tests/server/library/test_library.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.requests.request_params import InvalidRequest
from ..api.fields import unknown_field
from .params import FIELDS, python_errors

ARGUMENTS = {
    "lora_path": "name the adapter by adapter=",
    "model": "name the adapter by adapter=",
    "prompt_token_ids": "give token ids as a prompt: generate([1, 2, 3]), or a list of such lists",
    "sampling_params": "it is called params",
}
"""Arguments of other libraries' methods, each with advice."""


def refuse_unknown(unknown: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for an unknown argument."""
    for name in unknown:
        if name == "lora_request":
            raise InvalidRequest(name, f"unknown argument {name!r}; {_instead_of(unknown[name])}")
        if name in ARGUMENTS:
            raise InvalidRequest(name, f"unknown argument {name!r}; {ARGUMENTS[name]}")
        if name in FIELDS:
            raise InvalidRequest(name, f"{name!r} is a sampling parameter; give params=SamplingParams({name}=…)")
        with python_errors():
            raise unknown_field(name, ("prompts", "messages", "params", "adapter", "stop", *FIELDS))


def _instead_of(lora_request: Any) -> str:
    """The calls that do what a `LoRARequest` of vLLM asks for, with its values."""
    name, path = (getattr(lora_request, field, None) for field in ("lora_name", "lora_path"))
    if not isinstance(name, str) or not isinstance(path, str):
        return "name the adapter by adapter=; load_adapter registers one"
    return f"call load_adapter({name!r}, {path!r}) once, and give adapter={name!r}"
