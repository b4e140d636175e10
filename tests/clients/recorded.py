"""What the server of recorded text says, and the questions to which it does: one call of `weather`, one city."""

from __future__ import annotations

from typing import Any

USER: list[dict[str, Any]] = [{"role": "user", "content": "Weather in Paris?"}]

THOUGHT = "They ask for Paris."
ARGUMENTS = {"city": "Pa\"r'is", "days": 3}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa\\"r\'is", "days": 3}}\n</tool_call>'
SAYS_CALL = f"<think>\n{THOUGHT}\n</think>\n\n{CALL}"
SAYS_TWO = f"{SAYS_CALL}\n{CALL.replace('3', '4')}"
ANSWER = "It rains in Paris — 12 °C."
SAYS_ANSWER = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
SAYS_CITY = '{"city": "Paris", "rank": 1}'

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
"""As chat completions have it."""
FLAT = {"type": "function", **FUNCTION}
"""As responses have it."""
INPUT_TOOL = {"name": "weather", "description": "The weather of a city.", "input_schema": PARAMETERS}
"""As messages have it."""


def num_tokens(text: str) -> int:
    """Tokens of an answer with this text: its bytes, and its end."""
    return len(text.encode()) + 1
