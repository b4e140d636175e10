"""Made-up rows in the formats of the published traces, as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

AZURE_LLM = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-01-01 23:59:59.5000000,100,7
2023-01-02 00:00:00.2500000,2000,31
2023-01-02 00:00:03.2500001,40,1
"""
AZURE_FUNCTIONS = """app,func,end_timestamp,duration
a1,f0123456789abcdef,1.5,0.5
a1,ffffffffffffffff,1.75,0.25
a1,f0123456789abcdef,3.0,1.0
a2,eeeeeeeeeeeeeeee,62.5,60.0
"""
AZURE_FUNCTIONS_2019 = """HashOwner,HashApp,HashFunction,Trigger,1,2,3
o123456789abcdef,a1,f0123456789abcdef,http,2,0,1
o123456789abcdef,a1,ffffffffffffffff,timer,0,0,0
p123456789abcdef,a2,eeeeeeeeeeeeeeee,queue,1,3,0
"""
LORA_ARGS = """predict_type,exec_time_seconds,prompt_length,checkpoint_model_version_id,lora_args
e8,22.0,54.0,0a,
e8,18.0,54.0,0a,"[{'modelVersionId': '7999', 'scale': 1.0}]"
e8,28.0,14.0,0b,"[{""modelVersionId"": ""51aa"", ""scale"": 0.5}, {""modelVersionId"": ""7999"", ""scale"": 1.0}]"
e8,21.0,61.0,0b,[]
"""
LORA_SEQUENCE = """row,base_model,lora_ids,exec_time_seconds,prompt_length_chars
0,b0,,22.0,54.0
1,b0,L2,18.0,54.0
2,b1,L1 L2,28.0,14.0
3,b1,L2,21.0,61.0
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1024, "output_length": 6, "hash_ids": [0, 1]},
    {"timestamp": 250, "input_length": 1300, "output_length": 4, "hash_ids": [0, 1, 2]},
    {"timestamp": 1000, "input_length": 10, "output_length": 9, "hash_ids": [3]},
]


def azure_llm(folder: Path, text: str = AZURE_LLM) -> dict[str, Any]:
    return _file(folder, "azure_llm", "azure.csv", text)


def azure_functions(folder: Path, text: str = AZURE_FUNCTIONS) -> dict[str, Any]:
    return _file(folder, "azure_functions", "functions.csv", text)


def azure_functions_2019(folder: Path, text: str = AZURE_FUNCTIONS_2019) -> dict[str, Any]:
    return _file(folder, "azure_functions_2019", "invocations.csv", text)


def lora_sequence(folder: Path, text: str = LORA_SEQUENCE) -> dict[str, Any]:
    return _file(folder, "lora_sequence", "sequence.csv", text)


def mooncake(folder: Path, rows: list[Any] | None = None) -> dict[str, Any]:
    lines = [json.dumps(row) + "\n" for row in (MOONCAKE if rows is None else rows)]
    return _file(folder, "mooncake", "mooncake.jsonl", "".join(lines))


def _file(folder: Path, form: str, name: str, text: str) -> dict[str, Any]:
    (folder / name).write_text(text)
    return {"format": form, "path": str(folder / name)}
