"""Chat templates: what they are read from, the variables that they take, and how they write texts.

Tests: tests/server/text/test_tokenizer.py
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateSyntaxError, meta, nodes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
"""Tags of transformers that mark generated text of the assistant."""

_PROBE = "zqx"


def read_template(path: Path) -> str:
    """The text of a chat template file. Raises ValueError for one that can't be used."""
    try:
        text = path.read_text(encoding="utf-8")
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", text))
    except OSError as error:
        raise ValueError(f"--chat-template {path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--chat-template {path} must be UTF-8 text") from None
    except TemplateSyntaxError as error:
        raise ValueError(f"--chat-template {path}, line {error.lineno}: {error.message}") from None
    return text


@lru_cache(maxsize=64)
def variables_of(template: str) -> frozenset[str]:
    """Variables that a template is given from outside."""
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    except TemplateSyntaxError:
        return frozenset()
    return frozenset(meta.find_undeclared_variables(parsed))


@lru_cache(maxsize=64)
def names_in(template: str) -> frozenset[str]:
    """The strings that a template compares values with, removes from texts, or looks members up by."""
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", template))
    except TemplateSyntaxError:
        return frozenset()
    consts = (each.value for each in parsed.find_all(nodes.Const))
    attributes = (each.attr for each in parsed.find_all(nodes.Getattr))
    return frozenset(each for each in (*consts, *attributes) if isinstance(each, str))


@lru_cache(maxsize=64)
def drops_texts(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """True if a chat template writes the text of a part, and not that of a content that is a text."""

    def writes(content: Any) -> bool:
        try:
            messages = [{"role": "user", "content": content}]
            return _PROBE in str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
        except Exception:  # templates are programs: this one refuses such messages
            return False

    return not writes(_PROBE) and writes([{"type": "text", "text": _PROBE}])
