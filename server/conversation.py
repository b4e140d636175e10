"""A conversation as the chat template takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RESERVED_FOR_TEMPLATE = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
        "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
        "sanitize_control_tokens", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip
"""Names that a client's own template variables can't have: they say how the template is used."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages to continue.

    begins_answer: whether the prompt ends with the beginning of an answer. continues_last: whether the last message is
    left open, to be gone on with. tools: what the template may show of them. variables: the template's own, such as
    `enable_thinking`. add_special_tokens: whether the tokenizer adds its special tokens to those of the template.
    """

    messages: list[dict[str, Any]]
    begins_answer: bool = True
    continues_last: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False
