"""The fields of a request's body: our own, other servers' names for them, and fields that can't be honored.

The lists hold every field that OpenAI, vLLM, SGLang, LoRAX and llama.cpp document for completions and chat completions.
A field that would change the response is honored or refused; a field that can't change it is listed in `HARMLESS`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import ApiError, clipped

ALIASES = {
    "choice": "guided_choice",  # vLLM's, within structured_outputs
    "ignore_eos_token": "ignore_eos",  # LoRAX
    "json": "guided_json",  # vLLM's, within structured_outputs
    "max_new_tokens": "max_tokens",  # SGLang, LoRAX
    "min_new_tokens": "min_tokens",  # SGLang
    "n_cmpl": "n",  # llama.cpp
    "n_predict": "max_tokens",  # llama.cpp
    "no_stop_trim": "include_stop_str_in_output",  # SGLang
    "return_full_text": "echo",  # LoRAX
    "sampling_seed": "seed",  # SGLang
    "rid": "request_id",  # SGLang
    "adapter_id": "lora_path",  # LoRAX
}
"""Other names of fields that we have."""


class AllThatFit(int):
    """A limit on tokens that is all that the context has room for."""


ALL_THAT_FIT = AllThatFit(1 << 62)

UNLIMITED = {"n_predict": -1}
"""Values of aliases that ask for all tokens that fit."""

HARMLESS = {
    "custom_labels": "labels for the caller's metrics",
    "dry_allowed_length": "only has a meaning with dry_multiplier",
    "dry_base": "only has a meaning with dry_multiplier",
    "dry_penalty_last_n": "only has a meaning with dry_multiplier",
    "dry_sequence_breakers": "only has a meaning with dry_multiplier",
    "dynatemp_exponent": "only has a meaning with dynatemp_range",
    "metadata": "notes for the caller's own use",
    "mirostat_eta": "only has a meaning with mirostat",
    "mirostat_tau": "only has a meaning with mirostat",
    "prompt_cache_key": "a hint where to find a cached prompt",
    "prompt_cache_options": "says how long a prompt stays cached",
    "prompt_cache_retention": "says how long a prompt stays cached",
    "return_mm_kwargs": "only has a meaning with images or sound",
    "safety_identifier": "names the caller's user",
    "service_tier": "a price class; this server has one",
    "session_id": "says which conversation a request belongs to",
    "spaces_between_special_tokens": "only has a meaning for slow tokenizers",
    "store": "this server stores nothing",
    "stream_interval": "how a stream is cut into chunks, not its text",
    "stream_reasoning": "reasoning is always sent as it is generated",
    "user": "names the caller's user",
    "xtc_threshold": "only has a meaning with xtc_probability",
}
"""Fields that are accepted and ignored, each with the reason why no response depends on it."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    name: nothing
    for nothing, names in (
        (
            (),
            """
            api_token audio bootstrap_host bootstrap_port bootstrap_room chat_template custom_logit_processor
            data_parallel_rank disagg_prefill_dp_rank guided_decoding_backend
            guided_whitespace_pattern max_dynamic_patch min_dynamic_patch moderation ngram_corpus_id
            prompt_embeds repetition_detection routed_dp_rank task truncate
            web_search_options""",
        ),
        (
            (False,),
            """
            apply_chat_template continue_final_message decoder_input_details details echo post_sampling_probs
            return_cached_tokens_details return_hidden_states return_meta_info return_progress
            return_prompt_text return_prompt_token_ids return_routed_experts return_token_offsets return_tokens
            timings_per_token use_audio_in_video use_beam_search watermark watermarking""",
        ),
        (
            (0,),
            """
            dry_multiplier dynatemp_range min_keep mirostat n_cache_reuse n_discard n_indent n_keep n_probs
            priority return_k_alternatives routed_experts_prompt_start routed_experts_start_len t_max_predict_ms
            top_logprobs xtc_probability""",
        ),
        (
            ({},),
            """
            chat_template_kwargs custom_params ec_transfer_params images_config kv_transfer_params
            media_io_kwargs mm_processor_kwargs reasoning session_params vllm_xargs""",
        ),
        (
            ([],),
            """
            documents functions input_ids logits_processors response_fields samplers tools""",
        ),
        (("",), "extra_key suffix"),
        ((-1,), "id_slot repeat_last_n sse_ping_interval thinking_token_budget top_n_sigma"),
        ((True,), "add_generation_prompt cache_prompt do_sample include_reasoning"),
        ((1,), "best_of length_penalty repeat_penalty typical_p"),
    )
    for name in names.split()
} | {
    "adapter_source": ("local",),
    "function_call": ("none",),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "separate_reasoning": (True, False),
    "stop_regex": ([], ""),
    "tool_choice": ("none", "auto"),
    "verbosity": ("medium",),
}
"""Known fields that are not supported, or not for this kind of request, with the values that ask for nothing."""

ROUTES = {
    "input": "POST /v1/responses takes it; send prompt to /v1/completions, or messages to /v1/chat/completions",
    "inputs": "POST /generate takes it; send prompt to /v1/completions, or messages to /v1/chat/completions",
    "messages": "POST /v1/chat/completions takes conversations",
    "prompt": "POST /v1/completions takes prompts; a conversation is a list of messages",
}
"""Fields of which a body can have only one, each with the route that accepts it."""

_ADAPTER = "name the adapter as model"
_THEMSELVES = "give the fields in it themselves, next to model"

ELSEWHERE = {
    **dict.fromkeys(("adapter", "adapter_name", "lora_id", "lora_name", "lora_request"), _ADAPTER),
    **dict.fromkeys(("extra_body", "options", "parameters", "sampling_params"), _THEMSELVES),
    "context": "send the whole conversation as messages",
    "engine": "it is called model",
    "eos_token_id": "use stop_token_ids",
    "format": "use response_format",
    "generationConfig": _THEMSELVES,
    "generation_config": _THEMSELVES,
    "guided_decoding": "use structured_outputs",
    "images": 'send images as content parts of messages, {"type": "image_url", …}',
    "keep_alive": "PATCH /v1/adapters/NAME with pinned keeps an adapter resident",
    "max_length": "use max_tokens, which counts generated tokens only",
    "max_output_tokens": "use max_tokens",
    "num_beams": "use n, and choose by logprobs",
    "num_ctx": "the server is started with --max-model-len",
    "num_predict": "use max_tokens",
    "num_return_sequences": "use n",
    "raw": "POST /v1/completions takes prompts as they are",
    "stop_sequences": "use stop",
    "system": "send a message of the role system",
    "template": "send the prompt as it is to POST /v1/completions",
    "think": "use reasoning_effort, or chat_template_kwargs",
    "top_n_tokens": "use top_logprobs, or logprobs of a completion",
}
"""Fields of other servers, and of their client libraries, that have another name here."""

INSTEAD = {
    "function_call": "use tool_choice",
    "functions": 'use tools, each {"type": "function", "function": {…}}',
    "api_token": "adapters are loaded with POST /v1/adapters",
    "guided_decoding_backend": "the only backend is llguidance",
    "guided_whitespace_pattern": "generated JSON has at most one blank between its tokens",
    "do_sample": "use temperature 0 for greedy decoding",
    "n_probs": "use logprobs",
    "repeat_penalty": "use repetition_penalty",
    "return_prompt_token_ids": "use return_token_ids",
    "return_tokens": "use return_token_ids",
    "stop_regex": "use stop",
    "verbosity": "limit the length by max_tokens",
    "use_beam_search": "beams of one adapter would take the slots of others; ask for n choices and choose by logprobs",
}
"""Advice for refused fields that have an alternative."""


MESSAGE = {
    "content",
    "function_call",
    "name",
    "reasoning",
    "reasoning_content",
    "role",
    "thinking",
    "tool_call_id",
    "tool_calls",
}
"""Fields of a message that APIs document. The chat template shows those other than role and content."""

REFUSED_INSIDE = {
    "audio": "give its text as content",
    "partial": "set continue_final_message",
    "prefix": "set continue_final_message",
    "refusal": "give it as content",
}
"""Fields of messages that change completions elsewhere and can't be honored, each with advice."""

FIELD = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_OTHER_FIELDS = 16
"""Names of fields other than those of MESSAGE that the messages of one request may have."""

PART = {"text", "type"}
"""Fields of a content part."""

HARMLESS_INSIDE = {
    "annotations": "sources of an earlier message, not part of its text",
    "cache_control": "a hint about caching",
}
"""Fields of messages and parts that are accepted and ignored, each with the reason why no response depends on it."""


def check_messages(messages: Any) -> None:
    """Raises an ApiError for a field inside a conversation that can't be shown; `null` counts as absent."""
    others: set[str] = set()
    for index, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        where = f"messages[{index}]"
        for name in other_fields(message):
            others.add(name)
            _check_other(name, f"{where}.", len(others))
        content = message.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") in ("text", "input_text"):  # others check their own
                _check_part(part, f"{where}.content[{number}].")


def _check_other(name: str, where: str, count: int) -> None:
    """Raises an ApiError for a message's field that no chat template can use, or for one name too many."""
    if name in REFUSED_INSIDE:
        raise unsupported(where + name, f"{where}{name} is not supported; {REFUSED_INSIDE[name]}")
    if FIELD.fullmatch(name) is None or count > MAX_OTHER_FIELDS:
        raise unknown_field(name, MESSAGE, where)


def other_fields(message: Mapping[str, Any]) -> list[str]:
    """Fields of a message that no API documents, but that the chat template may use."""
    return [
        name
        for name, value in message.items()
        if name not in MESSAGE and name not in HARMLESS_INSIDE and value is not None
    ]


def _check_part(part: dict[str, Any], where: str) -> None:
    for name, value in part.items():
        if name not in PART and name not in HARMLESS_INSIDE and value is not None:
            raise unknown_field(name, PART, where)


def own_fields(body: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The fields of a body that are supported, under our names; raises an ApiError for one that can't be honored.

    `null` counts as absent. known: names of our fields in this kind of request.
    """
    own, by_alias = {}, {}
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            own[name] = value
        elif ALIASES.get(name) in known:
            by_alias[name] = value
        elif name in NEUTRAL:
            _check_neutral(name, value)
        elif name not in HARMLESS:
            raise unknown_field(name, known)
    for alias, value in by_alias.items():
        name = ALIASES[alias]
        if UNLIMITED.get(alias) == value:
            value = ALL_THAT_FIT
        if name in own and own[name] != value:
            raise ApiError(400, f"{alias} is another name of {name}, and they differ; give one of them", param=alias)
        own[name] = value
    return own


def _check_neutral(name: str, value: Any) -> None:
    if not any(value == nothing for nothing in NEUTRAL[name]):
        raise unsupported(name, f"{name} is not supported with this value; {INSTEAD.get(name, 'leave it out')}")


def unsupported(param: str, message: str) -> ApiError:
    """The error for a field that can't be honored. param: its name. message: advice."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


def unknown_field(name: str, known: Collection[str], where: str = "") -> ApiError:
    shown = clipped(where + name)
    hint = None if where or name in known else ROUTES.get(name) or ELSEWHERE.get(name)
    if hint is None:
        near = difflib.get_close_matches(name[:64], [*known, *(() if where else ALIASES)], n=1)
        hint = f"did you mean {near[0]}?" if near else "leave it out"
    return ApiError(400, f"there is no field {shown!r}; {hint}", param=shown, code="unknown_parameter")
