"""A running server's model calls a function, by OpenAI's client: `chorus serve &`, then `python examples/tools.py`."""

import json
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("CHORUS_URL", "http://127.0.0.1:8000/v1"), api_key="none")
parameters = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Lima"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
}
answer = client.chat.completions.create(
    model=next(iter(client.models.list())).id,
    messages=[{"role": "user", "content": "What will the weather be in Lima?"}],
    tools=[{"type": "function", "function": {"name": "forecast", "parameters": parameters}}],
    tool_choice="required",
    parallel_tool_calls=False,
)
for call in answer.choices[0].message.tool_calls or ():
    if call.type == "function":
        print(call.function.name, json.loads(call.function.arguments))
