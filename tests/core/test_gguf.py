"""GGUF files are read as the checkpoints that they were made from, with the values that they hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file

from chorus.core.model.checkpoints.gguf_file import GgufFile
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.shard import Shard
from chorus.server.checkpoints.gguf_model import directory_of

from .model.checkpoints.quantization.twins import weights
from .tiny_families import ADAPTERS, make_tiny, save_family

pytest.importorskip("gguf")
from .gguf_changes import permute
from .gguf_models import BESIDE, CHANGES, MODELS, tensors_of, write_gguf

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


def make(
    root: Path, family: str, kind: str = "F32", spoil=lambda fields, tensors: None, **changes
) -> tuple[Path, Path]:
    """The directory of a GGUF file, and its twin: a checkpoint of the values that the file holds."""
    architecture, arguments = MODELS[family]
    save_family(family, root / "twin", **arguments, **changes)
    (root / "file").mkdir()
    file = root / "file" / f"tiny-{kind}.gguf"
    held = write_gguf(root / "twin", file, architecture, kind, spoil)
    for path in (root / "twin").glob("model*"):
        path.unlink()
    save_file({name: weight.contiguous() for name, weight in held.items()}, root / "twin" / "model.safetensors")
    return directory_of(file, root / "cache", tokenizer=False), root / "twin"


def assert_same(found: Path, want: Path, **options) -> None:
    for ours, theirs in zip(weights(found, **options), weights(want, **options), strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("family", MODELS)
def test_a_file_says_the_configuration_of_its_model(tmp_path, family):
    found, want = (read_model_config(path) for path in make(tmp_path, family))
    served = {"architecture": found.architecture, "dtype": "float32"}  # Mistral's files say that they are Llama's
    assert replace(found, **served) == replace(want, **served)


def test_the_end_of_a_turn_ends_answers(tmp_path):
    """Where it is another token than that of the text's end, as Gemma's."""
    found, _ = make(tmp_path, "gemma", spoil=lambda fields, _: fields.update({"tokenizer.ggml.eot_token_id": 107}))
    assert read_model_config(found).eos_token_ids == (2, 107)


@pytest.mark.parametrize("family", MODELS)
def test_weights_have_the_bits_of_the_twin(tmp_path, family):
    assert_same(*make(tmp_path, family, "Q8_0"))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("shard", [Shard(), Shard(0, 2), Shard(1, 2)])
def test_every_type_and_every_rank(tmp_path, kind, shard):
    paths = make(tmp_path, "llama2", kind)
    assert_same(*paths, shard=shard)
    assert_same(*paths, shard=shard, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_are_dequantised_as_transformers_does(tmp_path, kind):
    reference = pytest.importorskip("transformers.integrations.gguf.dequant")
    import gguf

    of_type = gguf.GGMLQuantizationType[kind]
    blocks = torch.randint(0, 256, (24, gguf.GGML_QUANT_SIZES[of_type][1]), dtype=torch.uint8)
    scales = torch.rand(24, 2).half().view(torch.uint8)
    at = slice(-2, None) if kind == "Q6_K" else slice(0, 4)
    blocks[:, at] = scales[:, : blocks[:, at].shape[1]]

    def spoil(_, tensors):
        tensors["output.weight"] = blocks.numpy(), of_type

    (tmp_path / "model").mkdir()
    sizes = {"hidden_size": 256, "vocab_size": 24, "head_dim": 64}
    save_family("llama2", tmp_path / "model", **sizes)
    write_gguf(tmp_path / "model", tmp_path / "tiny.gguf", "llama", spoil=spoil)
    found = GgufFile(tmp_path / "tiny.gguf").read("output.weight", slice(3, 20))
    assert torch.equal(found, reference.dequantize(blocks, of_type.value).view(24, 256)[3:20])


#: Families that transformers reads from GGUF files → changes of a tiny model that its metadata can say.
READ_BY_TRANSFORMERS = {
    "llama2": {},
    "lfm2": {"block_auto_adjust_ff_dim": False, "block_ff_dim": 96},
    "nemotron": {"head_dim": 16},
    "stablelm": {},
}


@pytest.mark.parametrize("family", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_weights(tmp_path, family):
    """An oracle that knows by itself what llama.cpp's converter changes."""
    import transformers

    architecture = BESIDE.get(family) or MODELS[family][0]
    save_family(family, tmp_path / "model", **READ_BY_TRANSFORMERS[family])
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    tokens = [f"<{index}>" for index in range(150)]

    def spoil(fields, _):
        fields |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, f"{architecture}.vocab_size": 150}
        fields |= {"tokenizer.ggml.token_type": [1] * 150, "tokenizer.ggml.merges": ["a b"]}
        if family == "lfm2":
            heads = [config["num_key_value_heads"] * (kind != "conv") for kind in config["layer_types"]]
            fields |= {"lfm2.attention.head_count_kv": heads, "lfm2.shortconv.l_cache": config["conv_L_cache"]}

    write_gguf(tmp_path / "model", tmp_path / "tiny.gguf", architecture, spoil=spoil)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    original = tensors_of(tmp_path / "model")
    for name, weight in model.state_dict().items():
        rounding = 1e-6 if family == "nemotron" else 0  # of norms, to which 1 was added
        assert torch.allclose(weight, original[name], rtol=0, atol=rounding), name


def test_a_permutation_that_is_left_out_would_be_seen(tmp_path):
    weight = torch.arange(64).view(64, 1)
    assert not torch.equal(permute(weight, 4), weight)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_rope_is_known_by_its_frequencies(tmp_path, factor):
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    import gguf

    def spoil(fields, tensors):
        config = read_model_config(tmp_path / "twin").layers[0].attention
        plain = replace(config.rope, type="default", factor=1.0).inverse_frequencies()
        ratio = plain / config.rope.inverse_frequencies()
        tensors["rope_freqs.weight"] = ratio.float().numpy(), gguf.GGMLQuantizationType.F32
        fields["llama.context_length"] = 131072

    paths = make(tmp_path, "llama2", "F32", spoil, rope_parameters=rope, max_position_embeddings=131072)
    found, want = (read_model_config(path) for path in paths)
    assert replace(found, dtype="float32") == replace(want, dtype="float32")
    assert_same(*paths)


def refusal(root: Path, spoil=lambda fields, tensors: None, broken=lambda file: None) -> str:
    architecture, arguments = MODELS["llama2"]
    save_family("llama2", root / "model", **arguments)
    file = root / "tiny.gguf"
    write_gguf(root / "model", file, architecture, "Q8_0", spoil)
    broken(file)
    with pytest.raises(UnsupportedModel) as caught:
        list(weights(directory_of(file, root / "cache", tokenizer=False)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5000])


def not_finite(_, tensors) -> None:
    data, kind = tensors["blk.1.attn_output.weight"]
    data[:2, :2] = 255  # the scale of the first block
    tensors["blk.1.attn_output.weight"] = data, kind


def of_another_shape(_, tensors) -> None:
    data, kind = tensors["blk.1.attn_output.weight"]
    tensors["blk.1.attn_output.weight"] = data[:8], kind


def of_tensor(name: str, after: int, value: int):
    """Alters an entry of the table of tensors. after: bytes behind the name and the number of dimensions."""

    def alter(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[data.index(name.encode()) + len(name) + 4 + after] = value
        file.write_bytes(data)

    return alter


def renamed(old: str, new: str):
    return lambda fields, _: fields.update({new: fields.pop(old)})


VECTOR_TYPE, VECTOR_AT = 8, 8 + 4  # of a vector's entry: behind its length; behind that and the type


@pytest.mark.parametrize(
    ("spoil", "broken", "why"),
    [
        (None, of_tensor("blk.0.attn_norm.weight", VECTOR_TYPE, 2), "begins at byte"),  # Q4_0 for F32
        (None, of_tensor("blk.1.attn_norm.weight", VECTOR_AT, 32), "tensor blk.1.attn_norm.weight begins at byte"),
        (None, lambda file: file.write_bytes(file.read_bytes() + b"x" * 64), "64 bytes after its last tensor"),
        (renamed("llama.rope.freq_base", "llamb.rope.freq_base"), None, "has llamb.rope.freq_base, and is of llama"),
        (renamed("llama.rope.freq_base", "llama/rope.freq_base"), None, "has llama/rope.freq_base, and is of llama"),
        (lambda f, _: f.update({"llama.rope.freq_base": 1176256512}), None, "freq_base is 1176256512: a number stored"),
        (lambda f, _: f.update({"llama.rope.freq_base": 0.5}), None, "rope.freq_base is 0.5: it is at least 1"),
        (
            lambda f, _: f.update({"llama.attention.layer_norm_rms_epsilon": 925353388}),
            None,
            "layer_norm_rms_epsilon is 925353388: a number stored as a float",
        ),
        (
            lambda f, _: f.update({"llama.attention.layer_norm_rms_epsilon": 1.5}),
            None,
            "layer_norm_rms_epsilon is 1.5: it is below 1",
        ),
        (lambda f, _: f.update({"llama.context_length": 256.0}), None, "context_length is 256.0: a whole number"),
        (lambda f, _: f.update({"llama.block_count": 2.0}), None, "block_count is 2.0: a whole number"),
        (None, truncate, "cannot be read as GGUF"),
        (None, lambda file: file.write_bytes(b"GGUF"), "cannot be read as GGUF"),
        (None, lambda file: file.write_bytes(b"nothing of the kind"), "cannot be read as GGUF"),
        (not_finite, None, "tensor blk.1.attn_output.weight has values that are not finite numbers; download"),
        (of_another_shape, None, "o_proj.weight has shape [8, 64], config.json needs [64, 64]"),
        (lambda _, t: t.pop("blk.1.attn_output.weight"), None, "model.layers.1.self_attn.o_proj.weight is missing"),
        (lambda _, t: t.update({"blk.0.odd.weight": t["output_norm.weight"]}), None, "blk.0.odd.weight has no place"),
        (lambda f, _: f.update({"split.count": 3}), None, "is one of 3 files; merge them: llama-gguf-split --merge"),
        (lambda f, _: f.pop("llama.embedding_length"), None, "llama.embedding_length is missing"),
        (lambda f, _: f.update({"llama.attention.head_count": [4, 4]}), None, "head_count is [4, 4]: a whole number"),
        (lambda f, _: f.update({"llama.attention.head_count": 0}), None, "head_count is 0: a whole number of at least"),
        (lambda f, _: f.update({"llama.attention.clamp_kqv": 8.0}), None, "llama.attention.clamp_kqv is 8.0: unknown"),
        (lambda f, _: f.update({"llama.attention.causal": False}), None, "llama.attention.causal is False"),
        (lambda f, _: f.update({"llama.rope.dimension_count": 8}), None, "llama.rope.dimension_count is 8"),
        (lambda f, _: f.update({"llama.rope.scaling.type": "odd"}), None, "rope.scaling.type is 'odd'; supported:"),
        (
            lambda _, t: t.update({"rope_freqs.weight": t["output_norm.weight"]}),
            None,
            "tensor rope_freqs.weight is not of Llama 3's rope scaling; put config.json",
        ),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, spoil, broken, why):
    said = refusal(tmp_path, spoil or (lambda f, t: None), broken or (lambda file: None))
    assert why in said and ("gguf" in said)


def test_an_architecture_that_is_not_served_is_named(tmp_path):
    save_family("llama2", tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "tiny.gguf", "olmo")
    with pytest.raises(UnsupportedModel, match=r"general.architecture is 'olmo'; supported: llama, qwen2"):
        directory_of(tmp_path / "tiny.gguf", tmp_path / "cache", tokenizer=False)


def test_files_beside_it_come_first(tmp_path):
    made, twin = make(tmp_path, "llama2")
    config = json.loads((twin / "config.json").read_text())
    (tmp_path / "file" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 99}))
    again = directory_of(tmp_path / "file" / "tiny-F32.gguf", tmp_path / "cache", tokenizer=False)
    assert again != made and read_model_config(again).max_context == 99
    assert_same(again, twin)
    assert_same(tmp_path / "file", twin)


def make_beside(
    root: Path, family: str, kind: str = "Q8_0", spoil=lambda fields, tensors: None, *, older: bool = False, **changes
) -> tuple[Path, Path]:
    """A directory with a GGUF file and its model's config.json, and its twin."""
    save_family(family, root / "twin", **CHANGES.get(family, {}), **changes)
    (root / "file").mkdir()
    held = write_gguf(root / "twin", root / "file" / "tiny.gguf", BESIDE[family], kind, spoil, older=older)
    (root / "file" / "config.json").write_bytes((root / "twin" / "config.json").read_bytes())
    for path in (root / "twin").glob("model*"):
        path.unlink()
    save_file({name: weight.contiguous() for name, weight in held.items()}, root / "twin" / "model.safetensors")
    return root / "file", root / "twin"


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2)])
@pytest.mark.parametrize("family", BESIDE)
def test_other_architectures_are_read_with_the_models_configuration(tmp_path, family, shard):
    assert_same(*make_beside(tmp_path, family), shard=shard)


#: Families of `BESIDE` whose files have tensors made of others, changed values, or experts.
CHANGED = [
    "deepseek-v2", "deepseek-v3", "dots-1", "ernie-4.5-moe", "glm-4-moe", "gpt-neox", "granite-moe-shared", "lfm2",
    "lfm2-moe", "qwen2-moe", "qwen3-next", "mamba-1", "mamba-2", "jamba", "dots-3-note", "minimax-m3", "step-3.7",
    "hy-v4", "glm-5.3-flash", "nemotron-3-super", "dbrx", "bloom", "falcon-40b", "gpt-2",
]  # fmt: skip


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("family", CHANGED)
def test_a_file_answers_as_transformers_and_peft(tmp_path, drive, family, kernels):
    it = make_tiny(family, CHANGES.get(family))
    (tmp_path / "config.json").write_bytes((it.model / "config.json").read_bytes())
    write_gguf(it.model, tmp_path / "tiny.gguf", BESIDE[family])
    want = {}
    driver = drive(replace(it, model=tmp_path), cpu_kernels=kernels, max_num_seqs=4, max_num_batched_tokens=24)
    for index, adapter in enumerate((None, *ADAPTERS)):
        prompt, want[str(index)] = it.case(adapter, 20 + 9 * index, seed=index)
        driver.add(str(index), adapter, prompt, max_tokens=8)
    assert {name: answer.tokens for name, answer in driver.drain().items()} == want


def test_factors_of_latents_are_taken_out_of_norms(tmp_path):
    """The converter multiplies norms by them, which transformers computes without."""
    file, twin = make_beside(tmp_path, "dots-3-note", "F32", apply_mla_qkv_lora_rescale=True)
    for ours, theirs in zip(weights(file), weights(twin), strict=True):
        assert ours is theirs is None or torch.allclose(ours.float(), theirs.float(), rtol=1e-2)
    (file / "config.json").write_bytes((file / "config.json").read_bytes().replace(b"true", b"false"))
    pairs = [pair for pair in zip(weights(file), weights(twin), strict=True) if pair[0] is not None]
    assert not all(torch.allclose(ours.float(), theirs.float(), rtol=0.1) for ours, theirs in pairs)


@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3", "glm-4.7-flash", "qwen3-next"])
def test_files_of_earlier_converters_are_read(tmp_path, family):
    assert_same(*make_beside(tmp_path, family, older=True))


@pytest.mark.parametrize("shard", [Shard(), Shard(0, 2), Shard(1, 2)])
def test_latents_keys_and_values_are_dequantised_by_head(tmp_path, shard):
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 64}

    def spoil(_, tensors):
        assert {tensors[f"blk.1.attn_{each}_b.weight"][1].name for each in "kv"} == {"Q8_0"}

    assert_same(*make_beside(tmp_path, "deepseek-v3", "Q8_0", spoil, **sizes), shard=shard, dtype=torch.float32)


def fuse_experts(_, tensors) -> None:
    """Do as the converter with `--fuse-gate-up-exps`."""
    for name in [name for name in tensors if ".ffn_gate_exps." in name]:
        (gate, kind), (up, _) = tensors.pop(name), tensors.pop(name.replace("gate_exps", "up_exps"))
        tensors[name.replace("gate_exps", "gate_up_exps")] = numpy.concatenate([gate, up], axis=1), kind


@pytest.mark.parametrize("family", ["glm-4-moe", "lfm2-moe", "qwen3-next"])
def test_gates_and_ups_of_experts_in_one_tensor_are_read(tmp_path, family):
    assert_same(*make_beside(tmp_path, family, "Q8_0", fuse_experts))


def test_a_vector_of_a_gate_is_a_matrix_of_one_row(tmp_path):
    """As `llama-quantize` writes it, which leaves out dimensions of 1."""

    def spoil(_, tensors):
        for name in [name for name in tensors if "gate_inp_shexp" in name]:
            data, kind = tensors[name]
            tensors[name] = data[0], kind

    assert_same(*make_beside(tmp_path, "qwen3-next", "F32", spoil))


def add_draft(fields, tensors) -> None:
    arch = next(name for name in fields if name.endswith(".block_count")).partition(".")[0]
    layers = fields[f"{arch}.block_count"]
    fields |= {f"{arch}.block_count": layers + 1, f"{arch}.nextn_predict_layers": 1}
    tensors[f"blk.{layers}.nextn.eh_proj.weight"] = tensors[f"blk.{layers}.attn_norm.weight"] = tensors[
        "output_norm.weight"
    ]


@pytest.mark.parametrize("family", ["glm-4-moe", "glm-4.7-flash"])
def test_draft_layers_are_left_out(tmp_path, family):
    assert_same(*make_beside(tmp_path, family, spoil=add_draft))


def test_draft_layers_that_the_configuration_lacks_are_refused(tmp_path):
    paths = make_beside(tmp_path, "glm-4-moe", spoil=add_draft, num_nextn_predict_layers=0)
    with pytest.raises(UnsupportedModel, match=r"tensor model.layers.3.\S+ has no place in this model"):
        list(weights(paths[0]))


def spoil_decay(_, tensors) -> None:
    data, kind = tensors["blk.0.ssm_a"]
    tensors["blk.0.ssm_a"] = -data, kind


def flatten_keys(_, tensors) -> None:
    data, kind = tensors["blk.0.attn_k_b.weight"]
    tensors["blk.0.attn_k_b.weight"] = data[0], kind


@pytest.mark.parametrize(
    ("family", "spoil", "why"),
    [
        ("gpt-neox", lambda f, _: f.update({"gptneox.attention.head_count": 5}), "count is 5, which does not divide"),
        ("gpt-neox", lambda f, _: f.pop("gptneox.attention.head_count"), "count is None, which does not divide 64"),
        ("qwen3-next", lambda f, _: f.pop("qwen3next.ssm.group_count"), "group_count is None, which does not divide"),
        ("qwen3-next", spoil_decay, "tensor blk.0.ssm_a has values that model.layers.0.linear_attn.A_log cannot have"),
        ("deepseek-v3", flatten_keys, "model.layers.0.self_attn.kv_b_proj.weight is missing"),
        ("deepseek-v3", lambda _, t: t.pop("blk.1.attn_v_b.weight"), "layers.1.self_attn.kv_b_proj.weight is missing"),
        ("granite-moe-shared", lambda _, t: t.pop("blk.1.ffn_up_shexp.weight"), "input_linear.weight is missing"),
        ("lfm2", lambda _, t: t.pop("blk.0.shortconv.conv.weight"), "model.layers.0.conv.conv.weight is missing"),
    ],
)  # fmt: skip
def test_broken_files_of_other_architectures_are_refused(tmp_path, family, spoil, why):
    with pytest.raises(UnsupportedModel) as caught:
        list(weights(make_beside(tmp_path, family, "F32", spoil)[0]))
    assert why in str(caught.value) and "\n" not in str(caught.value)


def test_an_architecture_whose_order_of_rows_is_not_known_is_refused(tmp_path):
    """Also where a config.json says what model it is."""
    save_family("llama2", tmp_path)
    write_gguf(tmp_path, tmp_path / "tiny.gguf", "apertus")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        UnsupportedModel, match=r"general.architecture is 'apertus': not supported as GGUF; supported: "
    ):
        list(weights(tmp_path))


def test_of_several_files_in_a_directory_one_must_be_named(tmp_path):
    _, twin = make(tmp_path, "llama2")
    (tmp_path / "file" / "other.gguf").write_bytes(b"")
    (tmp_path / "file" / "config.json").write_bytes((twin / "config.json").read_bytes())
    with pytest.raises(UnsupportedModel, match=r"has several GGUF files \(other.gguf, tiny-F32.gguf\); give the file"):
        list(weights(tmp_path / "file"))
