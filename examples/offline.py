"""Several adapters of one model in one call: `python examples/offline.py`."""

from chorus import LLM, SamplingParams

PROMPTS = ["hello world\n", "hello world\n", "hello world\n"]

with LLM() as llm:
    answers = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=32), adapter=[None, "reverse", "rot13"])
    for answer in answers:
        print(answer.text)
