"""A conversation to continue, as chat templates are given it.

Tests: tests/server/text/test_tokenizer.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...core.requests.request_params import InvalidRequest

if TYPE_CHECKING:
    from ...core.media.places import ImagePlaces

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of the API's messages; a model's chat template may support others."""

RESERVED_FOR_TEMPLATE = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that a client's own template variables can't have, because they control how the template is used."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages to continue."""

    messages: list[dict[str, Any]]
    begins_output: bool = True
    """The prompt ends with the beginning of the assistant's message."""
    continues_last: bool = False
    """The output continues the last message."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Definitions for the template."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """The template's own variables, such as `enable_thinking`."""
    add_special_tokens: bool = False
    """The tokenizer adds its special tokens to the template's."""
    places: ImagePlaces | None = None
    """How images are written in the prompt; None: none are served."""
    image_texts: tuple[str, ...] = ()
    """The text of each image, in order."""

    @property
    def num_images(self) -> int:
        contents = (message["content"] for message in self.messages if isinstance(message["content"], list))
        return sum(part["type"] == "image" for content in contents for part in content)

    def with_images(self, prompt: str) -> str:
        """The template's text with those of images. Raises InvalidRequest if it has not the place of each."""
        if not self.num_images:
            return prompt
        if self.places is None:
            raise InvalidRequest("messages", "images are not served here; send text alone")
        if (count := self.places.count(prompt)) != len(self.image_texts):
            raise InvalidRequest(
                "messages",
                f"the chat template writes {count} places for {len(self.image_texts)} images; send images in "
                "messages of the role user",
            )
        return self.places.written(prompt, self.image_texts)


def text_in(content: str | list[dict[str, Any]]) -> str:
    """The text of a message's content."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part["type"] == "text")
