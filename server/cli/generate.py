"""`chorus generate`: one prompt, answered by an engine in this process, without HTTP."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from typing import TextIO

from ...core.requests.sampling_params import SamplingParams
from ..demo.skills import prompt as builtin_prompt
from ..llm import LLM
from ..settings import Settings

SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "ignore_eos", "min_tokens",
)  # fmt: skip
"""Flags that are sampling parameters under their own names."""


def generate(settings: Settings, arguments: argparse.Namespace, out: TextIO) -> None:
    """Writes the answer as it comes. Raises InvalidRequest, LaunchError or GenerationFailed."""
    sampling = {name: getattr(arguments, name) for name in SAMPLING}
    SamplingParams(**sampling)  # which says what is wrong before the model is loaded
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if settings.is_builtin and not arguments.chat and not text.endswith("\n"):
        text = builtin_prompt(text)
    with LLM.of(settings) as llm:
        prompt = llm.tokenizer.encode_chat_now([{"role": "user", "content": text}]) if arguments.chat else text
        bad_words = llm.tokenizer.bad_words([word for word in arguments.bad_word if word])
        params = SamplingParams(**sampling, seed=settings.seed, bad_words=bad_words)
        stop = [stop for stop in arguments.stop if stop]
        asyncio.run(_print(llm.stream(prompt, params, arguments.adapter, stop=stop), out))


async def _print(pieces: AsyncIterator[str], out: TextIO) -> None:
    try:
        async for piece in pieces:
            out.write(piece)
            out.flush()
    finally:
        out.write("\n")
