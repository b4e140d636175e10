"""The modules that PEFT targets if `target_modules` is null, by the type of the base model.

Tests: tests/memory/files/test_default_targets.py
"""

from __future__ import annotations

_QUERIES_AND_VALUES = ("q_proj", "v_proj")

DEFAULT_TARGETS: dict[str, tuple[str, ...] | str] = {
    **dict.fromkeys(
        (
            "gemma",
            "gemma2",
            "gemma3_text",
            "gpt_neo",
            "gptj",
            "llama",
            "llama4",
            "mistral",
            "mixtral",
            "opt",
            "qwen2",
            "qwen3",
            "stablelm",
        ),
        _QUERIES_AND_VALUES,
    ),
    "gemma4": r".*language_model\..*\.(q_proj|v_proj)",
    **dict.fromkeys(("bloom", "falcon", "gpt_neox"), ("query_key_value",)),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    "codegen": ("qkv_proj",),
    "mpt": ("Wqkv",),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
}
"""Those of the types that are served: names, or a regular expression. PEFT has none for the others."""


def default_targets(model_type: str | None) -> tuple[str, ...] | str | None:
    """The default of a `model_type`, None if PEFT has none. Without a type: that of Llama."""
    return _QUERIES_AND_VALUES if model_type is None else DEFAULT_TARGETS.get(model_type)
