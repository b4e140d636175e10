"""Methods of vLLM's `LLM` that ours does not have, each with the reason or an alternative.

Tests: tests/server/library/test_library.py
"""

from __future__ import annotations

from typing import NoReturn

_WORKERS = "no methods of workers can be called"

ABSENT = {
    "apply_model": _WORKERS,
    "beam_search": "beams of one adapter would take the slots of others; ask for n choices, and choose by logprobs",
    "collective_rpc": _WORKERS,
    "encode": "use embed, classify or score",
    "get_default_sampling_params": "a SamplingParams without fields has the model's defaults",
    "get_metrics": "GET /metrics of a server has them; adapter(NAME) tells an adapter's tier, pages and requests",
    "llm_engine": "there is no engine to drive by hand; agenerate and achat run beside other work",
    "reset_mm_cache": "a server has POST /reset_mm_cache",
    "set_tokenizer": "give the tokenizer's directory as LLM(tokenizer=…)",
    "sleep": "close() frees the memory; a server sleeps by POST /sleep",
    "start_profile": "use `chorus profile`",
    "stop_profile": "use `chorus profile`",
    "wake_up": "make a new LLM after close(); a server wakes by POST /wake_up",
}


def refuse(owner: object, name: str) -> NoReturn:
    """Raise AttributeError for a name that a class does not have."""
    kind = type(owner).__name__
    reason = f"; {ABSENT[name]}" if name in ABSENT else ""
    raise AttributeError(f"{kind} has no attribute {name!r}{reason}", name=name, obj=owner)
