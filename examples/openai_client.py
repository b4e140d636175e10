"""A running server asked by OpenAI's client: `chorus serve &`, then `python examples/openai_client.py`."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("CHORUS_URL", "http://127.0.0.1:8000/v1"), api_key="none")
for model in client.models.list():
    print("serves", model.id)
for chunk in client.completions.create(model="reverse", prompt="hello world\n", stream=True, temperature=0):
    print(chunk.choices[0].text, end="", flush=True)
print()
