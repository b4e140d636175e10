"""Programs as people read them."""

from __future__ import annotations

import json
from pathlib import Path

from chorus.core.model.program.text import program_lines
from chorus.core.model.read_config import read_model_config

from ...tiny_families import save_config

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}


def formulas(path: Path, fields: dict[str, object]) -> list[str]:
    """Lines without what is beside each op."""
    (path / "config.json").write_text(json.dumps(fields))
    return [
        line if line.endswith(":") else line[2:].partition("  ")[0] for line in program_lines(read_model_config(path))
    ]


MIXER = ["n ← norm x", "in ← gemm[qkv] n", "q ← heads in", "a ← attend q", "y ← gemm[o] a"]
ADDED = ["y ← all_reduce y", "x += y"]


def test_layers_with_one_program_are_printed_once(tmp_path):
    assert formulas(tmp_path, QWEN3_MOE) == [
        "before the layers:",
        "x ← embed",
        "layers 0, 2-3:",
        *MIXER,
        *ADDED,
        "n ← norm x",
        "y ← moe n",
        *ADDED,
        "layer 1:",
        *MIXER,
        *ADDED,
        "n ← norm x",
        "gu ← gemm[gate_up] n",
        "f ← activate gu",
        "y ← gemm[down] f",
        *ADDED,
        "behind the layers:",
        "x ← select x",
        "n ← norm x",
        "logits ← logits n",
    ]


def test_lines_have_shapes_and_kinds(tmp_path):
    formulas(tmp_path, QWEN3_MOE)
    lines = {line.strip() for line in program_lines(read_model_config(tmp_path))}
    assert "in ← gemm[qkv] n  64 → 128: q_proj, k_proj, v_proj" in lines
    assert "y ← moe n         8 experts of 32, 2 for each token by softmax" in lines
    assert "gu ← gemm[gate_up] n  64 → 192: gate_proj, up_proj" in lines
    assert {"x ← embed  100 tokens → 64: embed_tokens", "logits ← logits n  64 → 100: lm_head"} <= lines


def test_layers_with_the_same_weights_are_named(tmp_path):
    save_config("zamba-2", tmp_path, {})
    lines = program_lines(read_model_config(tmp_path))
    assert "layers 1, 3-4, 6 (layers 1, 4 share weights; layers 3, 6 share weights):" in lines
    found = {line.strip().partition("  ")[0]: line.rpartition("  ")[2] for line in lines}
    assert found["gu ← gemm[gate_up] n"] == "64 → 192: gate_proj, up_proj; shared"
    assert found["t ← gemm[block_out] y"] == "64 → 64: linear"
