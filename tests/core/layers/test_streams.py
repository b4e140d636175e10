"""Residuals of several streams (Gemma 3n): DoRA beside them, quantised weights, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.checkpoints.quantization.groups import plain
from chorus.core.model.checkpoints.quantization.pack_quantized import packed_tensors
from chorus.core.model.checkpoints.quantization.round_to_nearest import quantiser_of
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.shard import Shard
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.server.cli.command import main

from ..paths.asked import told
from ..test_families import executor_of, logits_of
from ..tiny_families import SHAPES, make_all_linear, randomise, save_family

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

NO_ALTUP_NOR_INPUTS = r".*(altup|per_layer_model_projection).*"
TOWER = {"conf_num_hidden_layers": 1, "conf_num_attention_heads": 2, "sscp_conv_channel_size": [4, 4]}
OF_TEXT = r".*language_model.*(q_proj|v_proj|down_proj|linear_left|per_layer_input_gate)"
BESIDE = {"linear_left", "linear_right", "per_layer_input_gate", "per_layer_projection"}


def test_adapters_are_beside_attention():
    it = make_all_linear("gemma-3n", exclude_modules=NO_ALTUP_NOR_INPUTS, use_dora=True)
    assert {*inspect_adapter(it.adapters["all"], read_model_config(it.model).module_paths).targets} >= BESIDE


@pytest.mark.parametrize(
    ("excluded", "named"),
    [(r".*(modality_router|_coefs)", r"altup_(unembed_)?projections"), (r".*altup_.*", r"altup\.[a-z_]*")],
)
def test_adapters_on_the_streams_own_matrices_are_refused(excluded, named):
    it = make_all_linear("gemma-3n", exclude_modules=excluded)
    with pytest.raises(AdapterFormatError, match=rf"tensor '[a-z_.0-9]*{named}"):
        inspect_adapter(it.adapters["all"], read_model_config(it.model).module_paths)


def test_quantised_weights_are_transformers_own_rounded(tmp_path):
    """Those that adapters may change; not the streams' own."""
    from transformers import AutoModelForCausalLM

    save_family("gemma-3n", tmp_path)
    reference, rounding = AutoModelForCausalLM.from_pretrained(tmp_path), quantiser_of("int8", False, None)
    assert rounding is not None
    with torch.inference_mode():
        for name, module in reference.named_modules():
            if isinstance(module, torch.nn.Linear) and ".layers." in name and "altup" not in name:
                module.weight.copy_(plain(rounding(module.weight.clone(), name, "cpu"), torch.float32))
        want = reference(torch.tensor([range(3, 43)]), use_cache=False).logits[0, -1]
    got = logits_of(executor_of(tmp_path, dtype="float32", quantization="int8"), [list(range(3, 43))])
    assert torch.allclose(got[0], want, rtol=1e-4, atol=1e-4)


def test_weights_that_are_written_quantised(tmp_path):
    """By `chorus quantize`, which leaves the streams' own as they are; and by a tool that quantises these, too."""
    save_family("gemma-3n", tmp_path / "model")
    out, prompt = tmp_path / "out", [list(range(3, 43))]
    want = logits_of(executor_of(tmp_path / "model", dtype="float32", quantization="int8"), prompt)
    assert main(["quantize", str(tmp_path / "model"), str(out), "--quantization", "int8"]) == 0
    tensors, raw = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    own = [f"model.altup_{name}.{index}" for name in ("projections", "unembed_projections") for index in range(3)]
    own += [f"model.layers.{at}.altup.{name}" for at in range(6) for name in ("modality_router", "prediction_coefs")]
    assert {*own} < {*raw["quantization_config"]["ignore"]}
    assert torch.allclose(logits_of(executor_of(out, dtype="float32"), prompt), want, rtol=1e-4, atol=1e-4)
    rounding = quantiser_of("int8", False, None)
    assert rounding is not None
    plainly = dict(tensors)
    for module in own:
        weight = tensors.pop(name := f"{module}.weight")
        tensors |= {f"{module}.{end}": each for end, each in packed_tensors(name, weight, rounding).items()}
        plainly[name] = plain(rounding(weight, name, "cpu"), torch.float32)
    save_file(plainly, out / "model.safetensors")
    want = logits_of(executor_of(out, dtype="float32"), prompt)
    save_file(tensors, out / "model.safetensors")
    raw["quantization_config"]["ignore"] = sorted({*raw["quantization_config"]["ignore"]} - {*own})
    (out / "config.json").write_text(json.dumps(raw))
    assert torch.allclose(logits_of(executor_of(out, dtype="float32"), prompt), want, rtol=1e-3, atol=1e-3)


def test_random_weights_need_no_checkpoint(tmp_path):
    save_family("gemma-3n", tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    executor = executor_of(tmp_path, load_format="dummy")
    assert isinstance(executor, CpuExecutor)
    assert logits_of(executor, [[3, 4, 5]]).isfinite().all()


REFUSED = [
    ({"altup_active_idx": 4}, "altup_active_idx is 4: it must be below altup_num_inputs, 4"),
    ({"laurel_rank": 0}, "laurel_rank is 0: a whole number of at least 1"),
    ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input is 0: a whole number of at least 1"),
    ({"intermediate_size": [96] * 5}, "5 numbers for num_hidden_layers, 6"),
    ({"intermediate_size": [96.5] * 6}, "intermediate_size is .*whole numbers of at least 1"),
    ({"activation_sparsity_pattern": [1.0] * 6}, "shares below 1"),
    ({"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5: of 6 layers, some of each type must"),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.5}}},
        "full_attention.partial_rotary_factor is 0.5: transformers leaves it out for this family; only 1",
    ),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED, ids=[next(iter(changes)) for changes, _ in REFUSED])
def test_configurations_that_are_refused(tiny, tmp_path, changes, why):
    raw = json.loads((tiny("gemma-3n").model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **changes}))
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config(tmp_path)


def test_ranks_need_equal_shares_of_every_width(tmp_path):
    save_family("gemma-3n", tmp_path, intermediate_size=[96, 96, 96, 96, 96, 97])
    config = read_model_config(tmp_path)
    with pytest.raises(UnsupportedModel, match="intermediate_size 97 is not divisible by it"):
        Shard(0, 2).config(config)


def test_the_published_configuration(tmp_path):
    """Of E4B, whose fields are of an older version of transformers."""
    text = {
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25,
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_lr_multiplier": 1.0,
        "altup_num_inputs": 4,
        "attention_bias": False,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2048,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": [16384] * 35,
        "laurel_rank": 64,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "max_position_embeddings": 32768,
        "model_type": "gemma3n_text",
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "torch_dtype": "bfloat16",
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
    }
    raw = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_model_config(tmp_path)
    assert (config.num_layers, len(config.kv_layers), config.num_experts) == (35, 20, 0)
    assert [(each.first, each.count) for each in config.media] == [(262144, 128), (262272, 128)]
    assert [layer.sparsity for layer in config.layers[9:11]] == [0.95, 0.0]
    assert {layer.rope.theta for layer in config.layers if layer.attention.window} == {10000.0}
    assert {layer.rope.theta for layer in config.layers if not layer.attention.window} == {1000000.0}
    defaults = {"architectures": ["Gemma3nForCausalLM"], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(defaults))
    assert read_model_config(tmp_path).layers == config.layers


class Checkpoint:
    """A model that sees and hears, with an adapter of its text part, and the same in transformers + peft."""

    def __init__(self, path: Path, targets: str = OF_TEXT) -> None:
        import transformers
        from peft import LoraConfig, get_peft_model
        from transformers.models.gemma3n import modeling_gemma3n

        text = {**SHAPES["gemma-3n"][1], "vocab_size": 150, "hidden_size": 64, "intermediate_size": 96}
        config = transformers.Gemma3nConfig(
            text_config={**text, "num_attention_heads": 4, "max_position_embeddings": 256},
            vision_config={"hidden_size": 24, "vocab_size": 7, "vocab_offset": 140},
            audio_config={"hidden_size": 16, "vocab_size": 4, "vocab_offset": 146, **TOWER},
        )
        torch.manual_seed(4)
        of_config = transformers.AutoModel.from_config
        with patch.object(modeling_gemma3n, "AutoModel") as made:  # timm's tower may not be installed
            made.from_config = lambda of: torch.nn.Linear(2, 2) if of is config.vision_config else of_config(of)
            base = transformers.Gemma3nForConditionalGeneration(config).eval()
        randomise(base)
        with torch.no_grad():
            for module in (base.model.embed_vision, base.model.embed_audio):
                module.embedding.weight.normal_()
        base.save_pretrained(path / "model")
        lora = LoraConfig(r=4, lora_alpha=9, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
        self.reference = get_peft_model(base, lora)
        self.reference.save_pretrained(str(path / "adapter"))
        self.model, self.adapters = path / "model", {"adapter": path / "adapter"}

    def greedy(self, prompt: list[int], adapter: str | None) -> list[int]:
        model, tokens = self.reference.base_model, list(prompt)
        (model.disable_adapter_layers if adapter is None else model.enable_adapter_layers)()
        with torch.inference_mode():
            for _ in range(6):
                logits = self.reference(input_ids=torch.tensor([tokens]), use_cache=False).logits
                tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(prompt) :]


@pytest.mark.native
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_text_part_embeds_tokens_of_images_and_sound_as_the_whole_model_does(tmp_path, drive, ranks, kernels):
    it = Checkpoint(tmp_path)
    kernels = kernels if ranks == 1 else "auto"  # ranks have shares of sparse gates
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 150) for _ in range(length)] for length in (9, 40)]
    prompts += [[5, 140, 145, 146, 149, 9], [rng.randrange(3, 140) for _ in range(12)]]
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 128}
    driver = drive(it, tensor_parallel_size=ranks, cpu_kernels=kernels, **limits)
    want = {}
    for index, prompt in enumerate(prompts):
        for adapter in (None, "adapter"):
            want[name := f"{index}{adapter}"] = it.greedy(prompt, adapter)
            driver.add(name, adapter, prompt, max_tokens=6)
    assert told(driver, want) == want


def test_adapters_on_what_embeds_tokens_of_images_are_refused(tmp_path):
    it = Checkpoint(tmp_path, r".*(language_model.*q_proj|embed_vision\.embedding_projection)")
    with pytest.raises(AdapterFormatError, match=r"tensor '[a-z_.]*embed_vision\.embedding_projection"):
        inspect_adapter(it.adapters["adapter"], read_model_config(it.model).module_paths)


def test_tokens_of_sound_need_rows(tiny, tmp_path):
    text = json.loads((tiny("gemma-3n").model / "config.json").read_text())
    raw = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_model_config(tmp_path).media == ()
    (tmp_path / "config.json").write_text(json.dumps({**raw, "audio_config": {"vocab_offset": 140, "vocab_size": 9}}))
    with pytest.raises(UnsupportedModel, match=r"audio_config\.vocab_size is 9: tokens 140 to 149 need rows"):
        read_model_config(tmp_path)


@pytest.mark.slow
def test_random_geometries(tmp_path):
    """Logits of models whose configurations are drawn at random are transformers'."""
    import transformers

    rng = random.Random(5)
    for number in range(12):
        changes = draw(rng)
        path = tmp_path / str(number)
        torch.manual_seed(number)
        config = transformers.Gemma3nTextConfig(**changes)
        model = transformers.Gemma3nForCausalLM(config).eval()
        randomise(model)
        model.save_pretrained(path)
        prompts = [[rng.randrange(3, 100) for _ in range(length)] for length in (3, 30)]
        with torch.inference_mode():
            want = torch.stack([model(torch.tensor([prompt]), use_cache=False).logits[0, -1] for prompt in prompts])
        got = logits_of(executor_of(path, dtype="float32"), prompts)
        assert torch.allclose(got, want, rtol=1e-3, atol=1e-3), changes


def draw(rng: random.Random) -> dict[str, object]:
    """A small configuration."""
    own, shared = rng.randint(2, 5), rng.randint(0, 3)
    types = ["sliding_attention", "full_attention", *rng.choices(["sliding_attention", "full_attention"], k=own - 2)]
    rng.shuffle(types)
    types += rng.choices(types, k=shared)
    kv_heads, streams, count = rng.choice((1, 2, 3)), rng.randint(1, 5), own + shared
    heads = kv_heads * rng.choice((1, 2))
    sizes = [rng.choice((48, 64, 80)) for _ in range(count)]
    return {
        "vocab_size": 100,
        "hidden_size": heads * rng.choice((8, 12, 16)),
        "intermediate_size": rng.choice((sizes, 72)),
        "num_hidden_layers": count,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice((8, 12, 16)),
        "hidden_activation": rng.choice(("gelu_pytorch_tanh", "silu")),
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "layer_types": types,
        "sliding_window": rng.choice((4, 16, 64)),
        "num_kv_shared_layers": shared,
        "vocab_size_per_layer_input": rng.choice((40, 100)),
        "hidden_size_per_layer_input": rng.choice((4, 6)),
        "altup_num_inputs": streams,
        "altup_active_idx": rng.randrange(streams),
        "altup_correct_scale": rng.random() < 0.5,
        "laurel_rank": rng.choice((1, 4, 7)),
        "activation_sparsity_pattern": [rng.choice((0.0, 0.3, 0.5, 0.95)) for _ in range(count)],
        "attention_bias": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.5,
        "final_logit_softcapping": rng.choice((5.0, 30.0)),
        "pad_token_id": 0,
    }
