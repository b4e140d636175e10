"""docs/reference/parameters.md: which parameter exists where, from the code that reads them.

python -m chorus.server.library.table writes it.

Tests: tests/server/library/test_params.py, tests/server/api/test_sampling_options.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ..api.chat_request import ChatCompletionRequest
from ..api.completion_request import CompletionRequest
from ..api.fields import ALIASES, HARMLESS, INSTEAD, NEUTRAL
from .params import ALWAYS, ELSEWHERE

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "parameters.md"

_HEAD = """# Parameters: which exists where

`SamplingParams` in Python takes the fields of `POST /v1/completions` (for `generate` and `stream`) and of
`POST /v1/chat/completions` (for `chat` and `stream_chat`) by their names. The same code reads, limits and refuses them:
a 400 over HTTP is an `InvalidRequest` in Python, with the same message. `python -m chorus.server.library.table` writes
this page.

Three things differ in Python. `max_tokens=None` asks for as many tokens as fit; over HTTP `null` counts as absent.
`logprobs` is a number for conversations, too. `grammar` may be a `Grammar`, and `json` the class of a pydantic model.

Fields by purpose, with other names in brackets:

"""

PURPOSES = {
    "model and adapter": "model lora_path",
    "several adapters": "adapters lora merged_adapters",
    "prompts": "prompt add_special_tokens echo truncate_prompt_tokens truncation_side",
    "conversations": "messages add_generation_prompt chat_template_kwargs continue_final_message mm_processor_kwargs",
    "length": "max_tokens max_completion_tokens min_tokens",
    "choices": "n best_of",
    "sampling": "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty logit_bias "
    "bad_words allowed_token_ids",
    "structured output": "response_format structured_outputs guided_json guided_regex guided_choice guided_grammar "
    "regex ebnf grammar json_schema structural_tag",
    "stopping": "stop stop_token_ids ignore_eos include_stop_str_in_output",
    "returned values": "logprobs top_logprobs prompt_logprobs logprob_token_ids return_token_ids "
    "return_tokens_as_token_ids return_step_info skip_special_tokens",
    "tools and reasoning": "tools tool_choice parallel_tool_calls reasoning_effort verbosity thinking_token_budget "
    "include_reasoning separate_reasoning",
    "streams": "stream stream_options",
    "other": "cache_salt request_id prediction",
}
"""Fields of a kind, in the order of the page; a test holds that each field has one."""

_ALONE = """
Completions alone have {completions}; chats alone {chats}.
"""

_NOT_IN_PYTHON = """
Python refuses these fields of HTTP, `return_token_ids` apart:

"""

_REFUSED = """
## Refused unless the value asks for nothing

Over HTTP and in Python, also where a field belongs to other requests. By the values that ask for nothing:

"""

_INSTEAD = """
What to ask for instead:

"""

_HARMLESS = """
## Accepted and ignored

No response depends on these:

"""


def page() -> str:
    """The whole page."""
    completion, chat = CompletionRequest.model_fields.keys(), ChatCompletionRequest.model_fields.keys()
    refused = sorted(NEUTRAL.keys() - (completion & chat))
    neutral = {name: ", ".join(f"`{value!r}`" for value in NEUTRAL[name]) or "none" for name in refused}
    return "".join(
        [
            _HEAD,
            *(f"* {kind}: {', '.join(map(_with_aliases, names.split()))}\n" for kind, names in PURPOSES.items()),
            _ALONE.format(completions=_listed(completion - chat), chats=_listed(chat - completion)),
            _NOT_IN_PYTHON,
            *(f"* {names}: {instead}\n" for instead, names in _grouped({**ELSEWHERE, **ALWAYS}).items()),
            _REFUSED,
            *(f"* {values}: {names}\n" for values, names in _grouped(neutral).items()),
            _INSTEAD,
            *(f"* `{name}`: {INSTEAD[name]}\n" for name in refused if name in INSTEAD),
            _HARMLESS,
            *(f"* {names}: {why}\n" for why, names in _grouped(HARMLESS).items()),
        ]
    )


def _with_aliases(name: str) -> str:
    """A field with its other names."""
    aliases = ", ".join(f"`{alias}`" for alias, own in sorted(ALIASES.items()) if own == name)
    return f"`{name}`" + (f" ({aliases})" if aliases else "")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _grouped(words: Mapping[str, str]) -> dict[str, str]:
    """Lists of the fields of which the same words are true."""
    found: dict[str, list[str]] = {}
    for name in sorted(words):
        found.setdefault(words[name], []).append(name)
    return {each: _listed(names) for each, names in found.items()}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
