"""`chorus generate`: completes one prompt with an engine in this process, without HTTP."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from ..demo.skills import prompt as builtin_prompt
from ..library.params import SamplingParams
from ..llm import LLM
from ..settings import Settings

SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
)
"""Flags that are sampling parameters under their own names."""


def generate(settings: Settings, arguments: argparse.Namespace, out: TextIO) -> None:
    """Write the completion as it is generated. Raises InvalidRequest, LaunchError or GenerationFailed."""
    sampling: dict[str, Any] = {name: getattr(arguments, name) for name in SAMPLING}
    sampling["stop"] = [stop for stop in arguments.stop if stop]
    sampling["bad_words"] = [word for word in arguments.bad_word if word]
    params = SamplingParams(**sampling, seed=settings.seed)  # report wrong values before the model is loaded
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if settings.is_builtin and not arguments.chat and not text.endswith("\n"):
        text = builtin_prompt(text)
    with LLM.of(settings) as llm:
        if arguments.chat:
            pieces = llm.stream_chat([{"role": "user", "content": text}], params, arguments.adapter)
        else:
            pieces = llm.stream(text, params, arguments.adapter)
        _print(pieces, out)


def _print(pieces: Iterable[str], out: TextIO) -> None:
    try:
        for piece in pieces:
            out.write(piece)
            out.flush()
    finally:
        out.write("\n")
