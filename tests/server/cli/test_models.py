"""`chorus models`: the supported families, and a summary of a checkpoint's configuration."""

from __future__ import annotations

import json

import pytest

from chorus.core.model.families.registry import FAMILIES
from chorus.server.cli import command as cli
from chorus.server.demo.builtin import BUILTIN_MODEL

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "sliding_window": 512,
}


def test_every_architecture_is_listed(capsys):
    assert cli.main(["models"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in FAMILIES)


def test_a_checkpoint_is_described(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    assert cli.main(["models", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["Gemma 3 (Gemma3ForCausalLM) is served", "context: 4,096 tokens"]
    assert "6 layers see the last 512 tokens, with default rope of base 10000" in lines
    assert "1 layers see all tokens, with default rope of base 1e+06" in lines
    assert cli.main(["models", str(BUILTIN_MODEL)]) == 0


def test_experts_of_all_tokens_and_relative_attention_are_told(tmp_path, capsys):
    changes = {"architectures": ["InklingForCausalLM"], "n_routed_experts": 16, "moe_intermediate_size": 40}
    changes |= {"num_experts_per_tok": 3, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA, **changes, "swa_head_dim": 24, "rel_extent": 30}))
    assert cli.main(["models", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "16 experts of 40, 3 for each token, and 2 for all" in out
    assert "6 heads of 24, 2 KV heads, learned numbers of 512 distances" in out
    assert "4 heads of 16, 2 KV heads, learned numbers of 30 distances" in out


def test_a_checkpoint_without_a_head_is_described(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA, "architectures": ["Gemma3TextModel"]}))
    assert cli.main(["models", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("Gemma 3 (Gemma3TextModel) is served\n")


def test_chunks_of_attention_are_told(tmp_path, capsys):
    changes = {"architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 8, "intermediate_size": 40}
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA, **changes}))
    assert cli.main(["models", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "6 layers see their own chunk of 8,192 tokens, with default rope of base 500000" in lines
    assert "2 layers see all tokens, with no rope" in lines


LATENTS = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


@pytest.mark.parametrize("architecture", ["Glm4MoeForCausalLM", "AfmoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_experts_are_told(tmp_path, capsys, architecture):
    changes = {"architectures": [architecture], "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1}
    changes |= {"n_routed_experts": 16, "num_experts": 16, "num_shared_experts": 1, "num_dense_layers": 0}
    changes |= {"n_shared_experts": 1, "first_k_dense_replace": 0, "moe_intermediate_size": 40}
    fields = {**GEMMA, **changes} if architecture != "DeepseekV3ForCausalLM" else {**GEMMA, **changes, **LATENTS}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert cli.main(["models", str(tmp_path)]) == 0
    want = " layers have 16 experts of 40, 3 for each token, and one of 40 for all"
    assert any(line.endswith(want) for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("desc_act", "want"),
    [
        (True, ", act order, dequantised when they are loaded"),
        (False, ", kept so by GPUs, integers also by the native decoder, and dequantised elsewhere"),
    ],
)
def test_the_form_of_quantised_weights_is_told(tmp_path, capsys, desc_act, want):
    how = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": desc_act}
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA, "quantization_config": how}))
    assert cli.main(["models", str(tmp_path)]) == 0
    assert f"weights: GPTQ, 4 bits, groups of 128{want}" in capsys.readouterr().out.splitlines()


def test_integers_of_experts_are_told(tmp_path, capsys):
    changes = {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 16, "num_experts_per_tok": 3}
    how = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    fields = {**GEMMA, **changes, "moe_intermediate_size": 40, "quantization_config": how}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert cli.main(["models", str(tmp_path)]) == 0
    want = ", experts kept so by GPUs and as integers on CPUs by the native library, and dequantised elsewhere"
    assert any(line.endswith(want) for line in capsys.readouterr().out.splitlines())


def test_a_checkpoint_that_is_not_served_is_refused_with_the_reason(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**GEMMA, "architectures": ["RwkvForCausalLM"]}))
    assert cli.main(["models", str(tmp_path)]) == 1
    assert "architecture RwkvForCausalLM is not supported: its recurrence is not computed" in capsys.readouterr().err
    assert cli.main(["models", str(tmp_path / "missing")]) == 1
    assert "chorus: error: " in capsys.readouterr().err


def test_programs_of_layers(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    assert cli.main(["models", str(tmp_path), "--program"]) == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line for line in lines if not line.startswith(" ")]
    assert titles == ["before the layers:", "layers 0-4, 6:", "layer 5:", "behind the layers:"]
    assert sum(line.startswith("  q ← heads in") for line in lines) == 2
    assert cli.main(["models", "--program"]) == 2
    assert "--program needs a MODEL" in capsys.readouterr().err
