"""The field `prediction`, OpenAI's: text that the client expects in the answer.

Tests: tests/server/test_speculation.py
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _joined(content: Any) -> Any:
    """The text of content parts."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'part {index} is not text; give {{"type": "text", "text": "…"}}, or a string as content')
        if unknown := part.keys() - {"type", "text"}:
            raise ValueError(f"part {index} has a field {min(unknown)[:64]!r}; it may only have type and text")
        texts.append(part["text"])
    return "".join(texts)


class Prediction(BaseModel):
    """A text to propose tokens from. The answer is the same with and without it."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["content"]
    content: Annotated[str, BeforeValidator(_joined)]
