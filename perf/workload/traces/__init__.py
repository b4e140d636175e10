"""Readers of published traces. Paths are arguments; none of the traces is part of this package."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .azure_functions import AzureFunctions
from .azure_llm import AzureLLM
from .jsonl import Jsonl
from .lora_requests import LoraRequests, LoraSequence
from .mooncake import Mooncake
from .servegen import ServeGen
from .source import Source, TraceRow

__all__ = ["Source", "TraceRow", "TraceSource"]

TraceSource = Annotated[
    AzureLLM | AzureFunctions | Mooncake | ServeGen | LoraRequests | LoraSequence | Jsonl, Field(discriminator="format")
]
