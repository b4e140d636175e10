"""Fields of `config.json` that make another family of a geometry of Llama's shape, for `--family`.

`families.json` has those of each family; `like` names another one, whose fields it has besides.

Tests: tests/perf/bench/models/test_sizes.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def fields_of(family: str, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    """What replaces Llama's fields. Windows are of 512 tokens, in as many layers as the family's models have them."""
    every = {"gemma-2": 2, "gemma-3": 6, "exaone-4": 4, "cohere-2": 4, "gpt-oss": 2}.get(family)
    fields: dict[str, Any] = {"head_dim": head_dim, **FAMILIES[family]}
    if "kv_lora_rank" in fields or family == "diffllama":  # latents serve all heads, and values are of two
        fields["num_key_value_heads"] = heads
    if family == "lfm2":
        kinds = ["full_attention" if layer % 3 == 2 else "conv" for layer in range(layers)]
        fields |= {"layer_types": kinds}
    if family == "nemotron-h":  # each layer is one part
        fields["hybrid_override_pattern"] = ("M-M-M*-" * layers)[:layers]
    if family == "nemotron-3-super":
        fields["hybrid_override_pattern"] = ("MEME*E" * layers)[:layers]
    if family in ("zamba", "zamba-2"):
        fields["layers_block_type"] = ["hybrid" if layer % 3 == 2 else "linear_attention" for layer in range(layers)]
    if family == "zamba-2":  # a block's input is the layer's beside the embeddings
        fields["head_dim"] = 2 * head_dim
    if family == "gpt-neo":
        fields["attention_types"] = [[["global", "local"], layers // 2]]
    if family == "mamba-2":
        fields["num_heads"] = 2 * heads * head_dim // 64
    if family == "inkling":
        own = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": head_dim}
        fields |= {f"swa_{name}": value for name, value in own.items()}
    if every is not None:
        kinds = [_GLOBAL if layer % every == every - 1 else _LOCAL for layer in range(layers)]
        fields |= {"sliding_window": 512, "layer_types": kinds}
    return fields


def _read(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for family, own in json.loads(path.read_text("utf-8")).items():
        found[family] = found.get(own.pop("like", ""), {}) | own
    return found


FAMILIES = _read(Path(__file__).with_suffix(".json"))
