"""Readers of traces, published ones and one's own. Paths are arguments; none of the traces is part of this package."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .functions2019 import AzureFunctions2019
from .published import AzureFunctions, AzureLLM, LoraSequence, Mooncake
from .source import Source, TraceRow
from .table import Csv

__all__ = ["Source", "TraceRow", "TraceSource"]

TraceSource = Annotated[
    AzureLLM | AzureFunctions | AzureFunctions2019 | Mooncake | LoraSequence | Csv,
    Field(discriminator="format"),
]
