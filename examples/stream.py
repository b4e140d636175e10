"""An answer's text as it comes: `python examples/stream.py`."""

import asyncio

from chorus import LLM, SamplingParams


async def main() -> None:
    with LLM() as llm:
        async for text in llm.stream("hello world\n", SamplingParams(temperature=0, max_tokens=32), adapter="reverse"):
            print(text, end="", flush=True)
        print()


asyncio.run(main())
