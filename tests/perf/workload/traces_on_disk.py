"""Made-up traces, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

AZURE_LLM = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-01-01 23:59:59.5000000,100,7
2023-01-02 00:00:00.2500000,2000,31
2023-01-02 00:00:03.2500001,40,1
"""
AZURE_NAMES = {"arrival": "TIMESTAMP", "prompt_tokens": "ContextTokens", "output_tokens": "GeneratedTokens"}
ADAPTERS = "row,adapter\n0,\n1,L2\n2,L1\n3,L2\n"


def azure_llm(folder: Path, text: str = AZURE_LLM) -> dict[str, Any]:
    """As Azure published the requests of a language model: times and lengths."""
    return {**trace(folder, text, "azure.csv"), "names": AZURE_NAMES}


def adapters(folder: Path) -> dict[str, Any]:
    """Adapters alone, in order of request."""
    return trace(folder, ADAPTERS, "adapters.csv")


def trace(folder: Path, text: str, name: str) -> dict[str, Any]:
    (folder / name).write_text(text)
    return {"format": "csv", "path": str(folder / name)}
