"""`chorus generate`: one prompt, answered by an engine in this process, without HTTP."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from typing import TextIO

from ..core.requests.sampling_params import SamplingParams
from .demo.skills import prompt as builtin_prompt
from .generation import Generation
from .launch import load
from .settings import Settings


def generate(settings: Settings, arguments: argparse.Namespace, out: TextIO) -> None:
    """Writes the answer as it comes. Raises InvalidRequest, LaunchError or GenerationFailed."""
    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        repetition_penalty=arguments.repetition_penalty,
        seed=settings.seed,
        ignore_eos=arguments.ignore_eos,
        min_tokens=arguments.min_tokens,
    )
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if settings.is_builtin and not arguments.chat and not text.endswith("\n"):
        text = builtin_prompt(text)
    worker, tokenizer = load(settings)
    try:
        if arguments.chat:
            prompt = tokenizer.encode_chat_now([{"role": "user", "content": text}])
        else:
            (prompt,) = tokenizer.encode_now([text])
        bad_words = tokenizer.bad_words([word for word in arguments.bad_word if word])
        generation = Generation(
            worker,
            "generate",
            [prompt],
            [replace(params, bad_words=bad_words)],
            [tokenizer.text_stream([stop for stop in arguments.stop if stop], min_tokens=arguments.min_tokens)],
            model=arguments.adapter or settings.base_name,
            adapter=arguments.adapter,
        )
        asyncio.run(_print(generation, out))
    finally:
        worker.stop()


async def _print(generation: Generation, out: TextIO) -> None:
    await generation.start()
    try:
        async for delta in generation:
            out.write(delta.text)
            out.flush()
    finally:
        generation.close()
        out.write("\n")
