"""docs/reference/parameters.md: which parameter exists where, from the code that reads them.

python -m chorus.server.library.table writes it.
"""

from __future__ import annotations

from pathlib import Path

from ..api.chat_request import ChatCompletionRequest
from ..api.completion_request import CompletionRequest
from ..api.fields import ALIASES, HARMLESS, INSTEAD, NEUTRAL
from .params import ALWAYS, CHAT_FIELDS, COMPLETION_FIELDS, ELSEWHERE

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "parameters.md"

_HEAD = """# Parameters: which exists where

`SamplingParams` in Python takes the fields of `POST /v1/completions` (for `generate` and `stream`) and of
`POST /v1/chat/completions` (for `chat` and `stream_chat`) by their names. The same code reads, limits and refuses them:
a 400 over HTTP is an `InvalidRequest` here, with the same message. A field that a kind of request does not have is
refused unless its value asks for nothing. This page is made by `python -m chorus.server.library.table`.

Three things differ in Python. `max_tokens=None` asks for as many tokens as fit; over HTTP `null` counts as absent.
`logprobs` is a number for conversations, too. `grammar` may be a `Grammar`, and `json` the class of a pydantic model.

| field | completions | chat | Python | other names |
|---|---|---|---|---|
"""

_REFUSED = """
## Refused unless the value asks for nothing

Over HTTP and in Python alike, where the table above has no other entry.

| field | values that ask for nothing | instead |
|---|---|---|
"""

_HARMLESS = """
## Accepted and ignored

| field | why no response depends on it |
|---|---|
"""


def page() -> str:
    """The whole page."""
    completion, chat = CompletionRequest.model_fields, ChatCompletionRequest.model_fields
    names: dict[str, list[str]] = {}
    for alias, name in sorted(ALIASES.items()):
        names.setdefault(name, []).append(f"`{alias}`")
    rows = [
        f"| `{name}` | {'yes' if name in completion else '—'} | {'yes' if name in chat else '—'} | {_python(name)} "
        f"| {', '.join(names.get(name, ()))} |\n"
        for name in sorted(completion.keys() | chat.keys())
    ]
    refused = [
        f"| `{name}` | {', '.join(f'`{value!r}`' for value in NEUTRAL[name]) or 'none'} | {INSTEAD.get(name, '')} |\n"
        for name in sorted(NEUTRAL.keys() - (completion.keys() & chat.keys()))
    ]
    harmless = [f"| `{name}` | {why} |\n" for name, why in sorted(HARMLESS.items())]
    return "".join([_HEAD, *rows, _REFUSED, *refused, _HARMLESS, *harmless])


def _python(name: str) -> str:
    if name in ELSEWHERE:
        return f"no: {ELSEWHERE[name]}"
    if name in ALWAYS:
        return ALWAYS[name]
    if name in COMPLETION_FIELDS and name in CHAT_FIELDS:
        return "yes"
    return "`generate`, `stream`" if name in COMPLETION_FIELDS else "`chat`, `stream_chat`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
