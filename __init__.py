"""Chorus: thousands of LoRA adapters over one resident base model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError(
        "Chorus does not run on Windows itself; install it in the Windows Subsystem for Linux: "
        "https://learn.microsoft.com/windows/wsl/install"
    )

if TYPE_CHECKING:
    from .core.requests.grammar import Grammar as Grammar
    from .core.requests.request_params import AdapterPaused as AdapterPaused
    from .core.requests.request_params import InvalidRequest as InvalidRequest
    from .core.requests.request_params import NotServed as NotServed
    from .memory.adapters.store import UnknownAdapter as UnknownAdapter
    from .memory.files.error import AdapterFormatError as AdapterFormatError
    from .server.engine.adapter_loader import LoadTimedOut as LoadTimedOut
    from .server.errors import EngineUnavailable as EngineUnavailable
    from .server.errors import GenerationFailed as GenerationFailed
    from .server.library.params import SamplingParams as SamplingParams
    from .server.llm import LLM as LLM
    from .server.llm import Completion as Completion
    from .server.start.checks import LaunchError as LaunchError
    from .server.version import VERSION as __version__

__all__ = [
    "LLM",
    "AdapterFormatError",
    "AdapterPaused",
    "Completion",
    "EngineUnavailable",
    "GenerationFailed",
    "Grammar",
    "InvalidRequest",
    "LaunchError",
    "LoadTimedOut",
    "NotServed",
    "SamplingParams",
    "UnknownAdapter",
    "__version__",
]

_HOMES = {
    "LLM": (".server.llm", "LLM"),
    "AdapterFormatError": (".memory.files.error", "AdapterFormatError"),
    "AdapterPaused": (".core.requests.request_params", "AdapterPaused"),
    "EngineUnavailable": (".server.errors", "EngineUnavailable"),
    "GenerationFailed": (".server.errors", "GenerationFailed"),
    "LaunchError": (".server.start.checks", "LaunchError"),
    "LoadTimedOut": (".server.engine.adapter_loader", "LoadTimedOut"),
    "NotServed": (".core.requests.request_params", "NotServed"),
    "UnknownAdapter": (".memory.adapters.store", "UnknownAdapter"),
    "Completion": (".server.llm", "Completion"),
    "Grammar": (".core.requests.grammar", "Grammar"),
    "InvalidRequest": (".core.requests.request_params", "InvalidRequest"),
    "SamplingParams": (".server.library.params", "SamplingParams"),
    "__version__": (".server.version", "VERSION"),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: `import chorus` alone loads no engine."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home, own_name = _HOMES[name]
    return getattr(import_module(home, __name__), own_name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
