"""`chorus quantize`: checkpoints that compressed-tensors reads, with the weights of `--quantization`."""

from __future__ import annotations

import json
import resource
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.checkpoints.quantization.round_to_nearest import RoundToNearest
from chorus.perf.bench.models import random_model
from chorus.perf.bench.models.sizes import Geometry
from chorus.server.cli.command import main

from ...core.test_families import executor_of, logits_of
from ...core.tiny_families import save_family

pytestmark = pytest.mark.wide

GEOMETRY = Geometry(hidden=128, ffn=192, layers=2, heads=4, kv_heads=2, vocab=320)
DOWN = "model.layers.1.mlp.down_proj."


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return random_model.checkpoint(random_model.RandomModel(GEOMETRY), tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["int8", "int4"])
def quantised(request, model, tmp_path):
    assert main(["quantize", str(model), str(tmp_path / "out"), "--quantization", request.param]) == 0
    return request.param, tmp_path / "out"


def unpacked(packed, bits, shape):
    """The values, word by word."""
    values = torch.empty(shape, dtype=torch.int8)
    for row in range(shape[0]):
        for column in range(shape[1]):
            word = int(packed[row, column * bits // 32]) & 0xFFFFFFFF
            stored = word >> (column * bits % 32) & (1 << bits) - 1
            values[row, column] = stored - (1 << (bits - 1))
    return values


def test_tensors_hold_the_weights_of_the_setting(model, quantised):
    name, out = quantised
    plain, found = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    want = RoundToNearest(name)(plain[DOWN + "weight"])
    assert DOWN + "weight" not in found
    assert found[DOWN + "weight_shape"].tolist() == [128, 192]
    assert torch.equal(unpacked(found[DOWN + "weight_packed"], want.bits, (128, 192)), want.values)
    assert torch.equal(found[DOWN + "weight_scale"].float(), want.scales)
    kept = {key for key in plain if not key.endswith("_proj.weight")}
    assert kept == found.keys() & plain.keys()
    assert all(torch.equal(found[key], plain[key]) for key in kept)
    assert {file.name for file in model.iterdir()} == {file.name for file in out.iterdir()}


def test_the_configuration_describes_them(quantised):
    name, out = quantised
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (section["quant_method"], section["format"]) == ("compressed-tensors", "pack-quantized")
    assert section["ignore"] == ["lm_head"]
    groups = [(group["targets"], group["weights"]["group_size"]) for group in section["config_groups"].values()]
    by_name = {each: 64 if each == "down_proj" else 128 for each in ("q_proj", "down_proj")}
    if name == "int8":
        assert groups == [(["Linear"], None)]
    else:
        for each, size in by_name.items():
            assert [f"re:.*\\.{each}$" in targets for targets, _ in groups] == [size == it for _, it in groups]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_linear_weights_that_stay_as_they_are_are_named(model, tmp_path, name):
    """Others read `Linear` as every linear module: a score head, or those of a vision tower."""
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_bytes((model / "config.json").read_bytes())
    more = {
        "score.weight": torch.ones(3, 128),
        "vision.blocks.0.fc1.weight": torch.ones(4, 8),
        "vision.bias": torch.ones(4),
    }
    save_file({**load_file(model / "model.safetensors"), **more}, source / "model.safetensors")
    assert main(["quantize", str(source), str(tmp_path / "out"), "--quantization", name]) == 0
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["ignore"] == ["lm_head", "score", "vision.blocks.0.fc1"]


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")
def test_compressed_tensors_reads_the_same_weights(quantised):
    from compressed_tensors.compressors.pack_quantized import unpack_from_int32
    from compressed_tensors.quantization import QuantizationConfig

    name, out = quantised
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    scheme = list(QuantizationConfig.model_validate(section).config_groups.values())[-1]
    bits = {"int8": 8, "int4": 4}[name]
    assert (scheme.weights.num_bits, scheme.weights.symmetric) == (bits, True)
    found = load_file(out / "model.safetensors")
    packed = found[DOWN + "weight_packed"]
    values = unpack_from_int32(packed, bits, torch.Size(found[DOWN + "weight_shape"].tolist()))
    assert torch.equal(values, unpacked(packed, bits, (128, 192)))


@pytest.fixture(scope="module")
def float8(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("float8") / "out"
    assert main(["quantize", str(model), str(out), "--quantization", "fp8"]) == 0
    return out


def test_fp8_is_written_as_float_quantized(model, float8):
    """As vLLM reads it: `weight` and one float32 scale per row, for each quantised module."""
    section = json.loads((float8 / "config.json").read_text())["quantization_config"]
    assert (section["format"], section["ignore"]) == ("float-quantized", ["lm_head"])
    (group,) = section["config_groups"].values()
    assert (group["targets"], group["input_activations"]) == (["Linear"], None)
    asked = {each: group["weights"][each] for each in ("num_bits", "type", "symmetric", "strategy", "dynamic")}
    assert asked == {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
    plain, found = load_file(model / "model.safetensors"), load_file(float8 / "model.safetensors")
    assert found.keys() == plain.keys() | {key + "_scale" for key in plain if key.endswith("_proj.weight")}
    weight, scale = plain[DOWN + "weight"].float(), found[DOWN + "weight_scale"]
    assert (scale.dtype, scale.shape) == (torch.float32, (128, 1))
    assert torch.equal(scale, weight.abs().amax(1, keepdim=True) / 448)
    want = (weight.double() / scale.double()).float().to(torch.float8_e4m3fn)
    assert torch.equal(found[DOWN + "weight"].float(), want.float())


@pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed")
def test_compressed_tensors_decompresses_fp8_to_the_served_weights(model, float8):
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    section = json.loads((float8 / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(section).config_groups.values()
    assert scheme.weights.type == "float"
    found = load_file(float8 / "model.safetensors")
    its = dequantize(found[DOWN + "weight"], found[DOWN + "weight_scale"], args=scheme.weights, dtype=torch.float32)
    assert torch.equal(
        its, RoundToNearest("fp8")(load_file(model / "model.safetensors")[DOWN + "weight"]).dequantised()
    )


def test_weights_that_are_not_finite_are_refused_by_name(model, tmp_path, capsys):
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_bytes((model / "config.json").read_bytes())
    for name, value in (("fp8", torch.nan), ("int8", torch.inf), ("int4", torch.nan)):
        tensors = load_file(model / "model.safetensors")
        tensors[DOWN + "weight"][3, 5] = value
        save_file(tensors, source / "model.safetensors")
        assert main(["quantize", str(source), str(tmp_path / "out"), "--quantization", name]) == 1
        assert f"{DOWN}weight has numbers that are not finite" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=pytest.mark.native)])
def test_served_fp8_has_the_bits_of_the_setting(model, float8, kernels):
    options = {"dtype": "bfloat16", "cpu_kernels": kernels}
    found = logits_of(executor_of(float8, **options), [[3, 7, 11], [9, 2]])
    assert torch.equal(found, logits_of(executor_of(model, quantization="fp8", **options), [[3, 7, 11], [9, 2]]))
    assert not torch.equal(found, logits_of(executor_of(model, **options), [[3, 7, 11], [9, 2]]))


def test_a_disk_without_room_is_a_line_with_numbers(model, tmp_path, capsys):
    """safetensors reports it by an error of its own; nothing of the copy is left."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most[1]))
        assert main(["quantize", str(model), str(tmp_path / "out")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    told = capsys.readouterr().err
    assert told.startswith(f"chorus: error: {tmp_path}/out can't be written: the file is larger than ulimit -f, 4 KiB,")
    assert " were written; " in told and told.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_shards_keep_their_index(model, tmp_path):
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    tensors = load_file(model / "model.safetensors")
    files = {key: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, key in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({key: tensors[key] for key in tensors if files[key] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (sharded / "config.json").write_bytes((model / "config.json").read_bytes())
    assert main(["quantize", str(sharded), str(tmp_path / "out")]) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index[DOWN + "weight_packed"] == index[DOWN + "weight_scale"] == files[DOWN + "weight"]
    for key, file in index.items():
        assert key in load_file(tmp_path / "out" / file)


def test_refusals(model, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    assert main(["quantize", str(model), str(tmp_path / "there")]) == 1
    assert "exists already; name a new directory" in capsys.readouterr().err
    shape = Geometry(hidden=48, ffn=64, layers=1, heads=2, kv_heads=1, vocab=300)
    odd = random_model.checkpoint(random_model.RandomModel(shape), tmp_path)
    assert main(["quantize", str(odd), str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err
    assert "has rows of 48 weights, which no group of 128, 64 or 32 divides; quantise to int8" in told
    assert not (tmp_path / "out").exists()
    assert main(["quantize", str(odd), str(tmp_path / "out"), "--quantization", "int8"]) == 0
    config = json.loads((model / "config.json").read_text())
    stored = tmp_path / "stored"
    stored.mkdir()
    (stored / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert main(["quantize", str(stored), str(tmp_path / "again")]) == 1
    assert "the checkpoint is quantised already" in capsys.readouterr().err


@pytest.mark.native
def test_served_it_has_the_bits_of_the_setting(model, quantised):
    name, out = quantised
    options = {"dtype": "bfloat16", "cpu_kernels": "native"}
    found = logits_of(executor_of(out, **options), [[3, 7, 11], [9, 2]])
    want = logits_of(executor_of(model, quantization=name, **options), [[3, 7, 11], [9, 2]])
    assert torch.equal(found, want)


@pytest.fixture(params=["w8a8", "w4a8"])
def with_activations(request, model, tmp_path):
    assert main(["quantize", str(model), str(tmp_path / "out"), "--quantization", request.param]) == 0
    return request.param, tmp_path / "out"


def test_activations_are_described_where_they_are_rounded(model, with_activations):
    """Weights are int8 tensors: others read no packed ones with activations."""
    name, out = with_activations
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    assert section["format"] == "int-quantized"
    for group in section["config_groups"].values():
        assert group["weights"]["num_bits"] == (8 if name == "w8a8" else 4)
        inputs = group["input_activations"]
        assert (inputs["num_bits"], inputs["dynamic"], inputs["strategy"]) == (8, True, "token")
    found = load_file(out / "model.safetensors")
    want = RoundToNearest(name)(load_file(model / "model.safetensors")[DOWN + "weight"])
    assert torch.equal(found[DOWN + "weight"], want.values)
    assert torch.equal(found[DOWN + "weight_scale"].float(), want.scales)
    if find_spec("compressed_tensors") is not None:
        from compressed_tensors.quantization import QuantizationConfig

        scheme = list(QuantizationConfig.model_validate(section).config_groups.values())[-1]
        assert scheme.input_activations.num_bits == 8 and scheme.input_activations.dynamic is True


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=pytest.mark.native)])
def test_served_with_activations_it_has_the_bits_of_the_setting(model, with_activations, kernels):
    name, out = with_activations
    options = {"dtype": "bfloat16", "cpu_kernels": kernels}
    found = logits_of(executor_of(out, **options), [[3, 7, 11], [9, 2]])
    want = logits_of(executor_of(model, quantization=name, **options), [[3, 7, 11], [9, 2]])
    weights_alone = "int8" if name == "w8a8" else "int4"
    other = logits_of(executor_of(model, quantization=weights_alone, **options), [[3, 7, 11], [9, 2]])
    assert torch.equal(found, want) and not torch.equal(found, other)


#: family → an expert's matrix in the quantised checkpoint. Experts of the second are in stacks, which become matrices.
MIXTURES = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.2.w2.",
    "qwen3.5-moe": "model.layers.1.mlp.experts.2.down_proj.",
}


@pytest.mark.native
@pytest.mark.parametrize("name", ["int8", "w8a8"])
@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_has_the_bits_of_the_setting(tmp_path, family, name):
    """Each expert's matrices are tensors of their own, under the names of the family; routers stay as they are."""
    save_family(family, tmp_path / "model", torch.bfloat16)
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--quantization", name]) == 0
    plain, found = (load_file(tmp_path / each / "model.safetensors") for each in ("model", "out"))
    end = MIXTURES[family].removeprefix("model.")
    keys = [key for key in found if end in key]
    ends = ("weight", "weight_scale") if name == "w8a8" else ("weight_packed", "weight_scale", "weight_shape")
    assert {key.rpartition(".")[2] for key in keys} == set(ends)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    routers = [key for key in plain if key.endswith((".gate.weight", "shared_expert_gate.weight"))]
    assert routers and {key.removesuffix(".weight") for key in routers} <= set(section["ignore"])
    assert all(torch.equal(found[key], plain[key]) for key in routers)
    options = {"dtype": "bfloat16"}
    served = logits_of(executor_of(tmp_path / "out", **options), [[3, 7, 11], [9, 2]])
    want = logits_of(executor_of(tmp_path / "model", quantization=name, **options), [[3, 7, 11], [9, 2]])
    assert torch.equal(served, want)


@pytest.mark.native
def test_groups_of_experts_may_differ_from_those_of_dense_layers(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32}
    save_family("qwen3-moe-mixed", tmp_path / "model", torch.bfloat16, **sizes)
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--quantization", "int4"]) == 0
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    groups = {tuple(it["targets"]): it["weights"]["group_size"] for it in section["config_groups"].values()}
    of_experts = r"re:.*\.mlp\.experts\.\d+\.down_proj$"
    assert {size for targets, size in groups.items() if of_experts in targets} == {32}
    assert {size for targets, size in groups.items() if r"re:.*\.mlp\.down_proj$" in targets} == {128}
    served = logits_of(executor_of(tmp_path / "out", dtype="float32"), [[3, 7, 11], [9, 2]])
    want = logits_of(executor_of(tmp_path / "model", dtype="float32", quantization="int4"), [[3, 7, 11], [9, 2]])
    assert torch.equal(served, want)


@pytest.mark.parametrize("family", ["gpt-oss", "granite-moe"])
def test_stacks_that_others_read_in_no_other_form_are_refused(tmp_path, family, capsys):
    save_family(family, tmp_path / "model", torch.bfloat16)
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "--quantization", "int8"]) == 1
    assert "has the weights of all experts, and programs that read compressed-tensors" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
