"""Models with a mixture of experts: what is computed, their checkpoints, and what is refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.config import EngineConfig
from chorus.core.executors.adapters import check_tables
from chorus.core.executors.base import EngineLimits, ModelExecutor
from chorus.core.executors.cuda import CudaShapes
from chorus.core.model.moe import experts as mixture
from chorus.core.model.moe import listed_experts
from chorus.core.model.program import native_decoder
from chorus.core.model.program.op import NoNativeOp
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.open_weights import open_weights
from chorus.core.model.weights.shard import Shard
from chorus.memory.files.composed import composed
from chorus.memory.files.config import MAX_RANK
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.pages.layer_projections import dense_projections
from chorus.ops.library import native_library
from chorus.ops.moe.expert_gemms import Panels

from ..graphs.host_device import HostDevice
from .test_families import executor_of, logits_of
from .tiny_families import EXPERTS, load_model, save_family

pytestmark = pytest.mark.wide

every_family = pytest.mark.parametrize("family", EXPERTS)


@pytest.fixture
def kernels() -> str:
    """The native decoder where it takes a family; else PyTorch's operators, with the native library's mixtures."""
    return "auto"


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "qwen3.5-moe"])
def test_only_the_experts_of_a_step_are_computed(tiny, drive, family, monkeypatch):
    """By PyTorch's operators; the native library is tested in `test_native_mixture`."""
    monkeypatch.setenv(native_library.ISA, "none")
    it, seen, counts = tiny(family), [], []
    driver = drive(it, max_num_seqs=1, prefix_cache=False)
    multiply, choose = mixture.multiply_each, mixture.choose

    def noted(*inputs: Any) -> mixture.ExpertChoice:
        choice = choose(*inputs)
        counts.append(len(choice.experts.unique()))
        return choice

    for module in (mixture, listed_experts):
        monkeypatch.setattr(module, "multiply_each", lambda *inputs: seen.append(len(inputs[2])) or multiply(*inputs))
        monkeypatch.setattr(module, "choose", noted)
    driver.run("it", None, [5, 6, 7], max_tokens=4)
    spec = driver.executor.rank.config.experts
    # a router's product, and two of each expert
    assert sum(seen) == sum(1 + 2 * (count + bool(spec.shared_size)) for count in counts)
    if spec.routing.per_token < spec.count:
        assert min(counts) == spec.routing.per_token < spec.count


@pytest.mark.parametrize("cpu_kernels", ["auto", "torch"])
def test_experts_are_packed_for_the_kernels_that_are_asked_for(tmp_path, cpu_kernels):
    save_family("qwen3-moe", tmp_path)
    layers = executor_of(tmp_path, cpu_kernels=cpu_kernels).decoder.layers
    packed = [matrix for layer in layers for matrix in (*layer["experts"].gate_up, *layer["experts"].down)]
    assert packed
    by_library = cpu_kernels == "auto" and native_library.available(torch.float32)
    assert {isinstance(matrix, Panels) for matrix in packed} == {by_library}


@pytest.mark.native
def test_what_computes_experts_is_said(tiny, caplog, monkeypatch):
    """Where the native decoder lacks another part of a model."""

    def lacks(*_: object, **__: object) -> None:
        raise NoNativeOp("such part")

    monkeypatch.setattr(native_decoder, "NativeProgram", lacks)
    with caplog.at_level("WARNING", logger="chorus"):
        executor_of(tiny("qwen3-moe").model, cpu_kernels="auto")
    want = "steps run on torch's operators, but for mixtures of experts, which the native library computes: it has no "
    assert [record.message.startswith(want) for record in caplog.records].count(True) == 1


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.native)])
def test_a_bias_of_logits_is_in_log_probabilities_of_prompts_too(tiny, drive, ranks):
    """Each rank has its own columns of it."""
    it = tiny("phi-moe")
    driver = drive(it, max_num_seqs=4, max_num_batched_tokens=24, tensor_parallel_size=ranks)
    prompt, _ = it.case("r3-all", 30, seed=8)
    driver.add("it", "r3-all", prompt, max_tokens=4, logprobs=1, prompt_logprobs=1)
    answer = driver.drain()["it"]
    model = it.use("r3-all")
    assert bool(model.get_base_model().lm_head.bias.any())
    with torch.inference_mode():
        every = model(torch.tensor([prompt + answer.tokens])).logits[0].log_softmax(-1)
    found = [entry.logprob for entry in (*answer.prompt_logprobs, *answer.logprobs)]
    want = [float(every[at, token]) for at, token in enumerate([*prompt[1:], *answer.tokens])]
    assert found == pytest.approx(want, abs=2e-4)


# -- checkpoints


@every_family
def test_random_weights_need_no_checkpoint(tmp_path, family):
    save_family(family, tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    prompts = [[5, 6, 7], [8, 9]]
    one, other = (logits_of(executor_of(tmp_path, load_format="dummy"), prompts) for _ in range(2))
    assert torch.equal(one, other)
    assert bool(one.isfinite().all())


def stack_experts(directory: Path) -> None:
    """Rewrite a checkpoint with one tensor for all experts' matrices, as transformers has them in memory."""
    model = load_model(directory, dtype=torch.float32)
    tensors = {
        name.replace("_moe.router.w", "_moe.router.layer.w"): tensor.contiguous()
        for name, tensor in model.state_dict().items()
    }
    if model.config.model_type == "phimoe":  # no file has its router's name in memory
        tensors = {name.replace("mlp.router", "mlp.gate"): tensor for name, tensor in tensors.items()}
    if getattr(model.config, "tie_word_embeddings", False):
        del tensors["lm_head.weight"]
    for file in [*directory.glob("*.safetensors"), *directory.glob("*.index.json")]:
        file.unlink()
    save_file(tensors, directory / "model.safetensors")
    assert any(name.endswith(("experts.gate_up_proj", "experts.up_proj")) for name in tensors)


@every_family
def test_stacked_experts_are_read_as_the_same(tmp_path, family):
    save_family(family, tmp_path)
    config = read_model_config(tmp_path)

    def weights() -> tuple[Any, int]:
        with open_weights(tmp_path, config, torch.float32) as found:
            return list(found.layers()), found.num_bytes

    each, num_bytes = weights()
    stack_experts(tmp_path)
    stacked, stacked_bytes = weights()
    assert num_bytes == stacked_bytes
    for one, other in zip(each, stacked, strict=True):
        assert one.keys() == other.keys()
        if "experts" not in one:
            continue
        one, other = one["experts"], other["experts"]
        assert torch.equal(one.router.to_dense(), other.router.to_dense())
        for name in ("gate_up", "down"):
            pairs = zip(getattr(one, name), getattr(other, name), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)


# -- what is refused


def settings(model: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(model=model, memory_bytes=4 << 20, threads=1, **{"device": "cpu", **changes})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"moe_intermediate_size": 42}, "width of experts, 42, is not divisible by it; set it to one of 1, 2$"),
        ({"shared_expert_intermediate_size": 22}, "width of the shared expert, 22, is not divisible by it; .* 1, 2$"),
    ],
)
def test_ranks_that_can_not_have_equal_shares_of_experts_are_refused(tmp_path, changes, why):
    save_family("qwen3.5-moe", tmp_path, **changes, linear_num_key_heads=4)
    config = read_model_config(tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"tensor_parallel_size is 4, and the model's {why}"):
        Shard(0, 4).config(config)
    assert Shard(0, 2).config(config).experts.size == config.experts.size // 2


def test_gpus_refuse_mixtures_beside_offload_workers(tiny):
    config = settings(tiny("qwen3-moe").model, device="cuda:0", offload_workers=1)
    with pytest.raises(UnsupportedModel, match=r"offload_workers is 1, and the model has 16 experts, .*set it to 0"):
        CudaShapes(config, device=HostDevice())
    CudaShapes(settings(tiny("qwen3-moe").model, device="cuda:0"), device=HostDevice())


def test_a_gpu_limits_ranks_of_adapters_further(tiny):
    config = settings(tiny("qwen3-moe").model, max_lora_rank=64)
    limits = CudaShapes(config.model_copy(update={"device": "cuda:0"}), device=HostDevice()).model.limits
    assert limits == EngineLimits(config.max_num_seqs, config.max_num_batched_tokens, 64)
    assert ModelExecutor(config).model.limits == replace(limits, max_lora_rank=MAX_RANK)


def test_gpus_refuse_adapters_on_experts_of_many_ranks(tiny, tmp_path):
    modules = read_model_config(tiny("qwen3-moe").model).module_paths
    path = every_expert(tmp_path / "it", 1, modules)
    check_tables(inspect_adapter(path, modules), path, 64)
    config = json.loads((path / "adapter_config.json").read_text())
    patterns = {rf".*layers\.0\.mlp\.experts\.{expert}\..*": 2 + expert for expert in range(16)}
    (path / "adapter_config.json").write_text(json.dumps(config | {"alpha_pattern": patterns}))
    with pytest.raises(
        AdapterFormatError, match=r"make 17 different parts; a GPU serves at most 16: set device to 'cpu'"
    ):
        check_tables(inspect_adapter(path, modules), path, 64)


def qwen_adapter(path: Path, targets: list[str], tensor: str, **fields: Any) -> Path:
    """An adapter on one module of layer 0, [rank 2] of 64 inputs and 16 outputs."""
    name = f"base_model.model.model.layers.0.{tensor}"
    tensors = {f"{name}.lora_A.weight": torch.zeros(2, 64), f"{name}.lora_B.weight": torch.zeros(16, 2)}
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": targets, **fields}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("targets", "tensor", "fields", "message"),
    [
        (["gate"], "mlp.experts.0.gate_proj", {}, "match none of q_proj"),
        (
            ["q_proj", "gate"],
            "mlp.experts.0.gate_proj",
            {},
            r"layers\.0\.mlp\.experts\.0\.gate_proj\.lora_A\.weight' is not targeted by adapter_config",
        ),
        (["gate_proj"], "mlp.experts.16.gate_proj", {}, "match none of q_proj"),
        (
            ["q_proj", "gate_proj"],
            "mlp.experts.16.gate_proj",
            {},
            r"layers\.0\.mlp\.experts\.16\.gate_proj\.lora_A\.weight' is not .* of one of q_proj",
        ),
        (
            ["gate_proj"],
            "mlp.experts.0.gate_proj",
            {"use_dora": True},
            r"DoRA or a bias is on experts\.0\.gate_proj of layer 0, .* plain LoRA alone is served",
        ),
        (
            ["gate"],
            "mlp.gate",
            {"lora_bias": True},
            "DoRA, a bias or a scale is on gate of layer 0, .* plain LoRA alone",
        ),
        (
            ["q_proj", "gate_proj"],
            "mlp.shared_expert.gate_proj",
            {},
            r"layers\.0\.mlp\.shared_expert\.gate_proj\.lora_A\.weight' is not .* of one of q_proj",
        ),
        (
            [],
            "mlp.experts.base_layer",
            {"target_parameters": ["mlp.experts.down_proj"]},
            r"is of experts whose A and B are \[2, 64\] and \[16, 2\], .* or \[experts · rank, 40\] and \[64, ",
        ),
        (
            [],
            "mlp.gate",
            {"target_parameters": ["mlp.gate.scale"]},
            "target_parameters has 'mlp.gate.scale'",
        ),
        ([], "mlp.gate", {"target_parameters": "mlp.gate.weight"}, "target_parameters is .*: a list of names"),
        (
            ["gate"],
            "mlp.gate",
            {"target_parameters": ["mlp.gate.weight"]},
            r"target_parameters matches model\.layers\.0\.mlp\.gate\.weight, and target_modules its module",
        ),
        (
            [],
            "mlp.gate",
            {"target_parameters": ["mlp.gate.weight"], "use_dora": True},
            "use_dora is True: PEFT has no target_parameters with it",
        ),
    ],
)
def test_adapters_on_parts_that_are_not_served_are_refused(tiny, tmp_path, targets, tensor, fields, message):
    path = qwen_adapter(tmp_path / "it", targets, tensor, **fields)
    with pytest.raises(AdapterFormatError, match=message):
        inspect_adapter(path, read_model_config(tiny("qwen3-moe").model).module_paths)


def test_a_trained_bias_of_a_router_that_has_one_is_refused_as_of_a_mixture(tiny, tmp_path):
    """PEFT saves every bias of gpt-oss with bias="all", the router's too, whatever has LoRA."""
    path = qwen_adapter(tmp_path / "it", ["q_proj"], "self_attn.q_proj", bias="all")
    tensors = load_file(path / "adapter_model.safetensors")
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"] = torch.zeros(64, 2)
    tensors["base_model.model.model.layers.0.mlp.router.bias"] = torch.ones(8)
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(
        AdapterFormatError, match=r"a bias or a scale is on gate of layer 0, a part of a mixture .* bias='none'"
    ):
        inspect_adapter(path, read_model_config(tiny("gpt-oss").model).module_paths)


def test_adapters_on_experts_are_not_composed(tiny, tmp_path):
    modules = read_model_config(tiny("qwen3-moe").model).module_paths
    manifest = inspect_adapter(every_expert(tmp_path / "it", 1, modules), modules)
    with pytest.raises(AdapterFormatError, match="changes experts, which can't be composed"):
        composed([(manifest, 0.5)])


def every_expert(path: Path, rank: int, modules: Any, dtype: torch.dtype = torch.float32) -> Path:
    """A random adapter on each expert of a model shaped like Qwen3-MoE."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer, name in itertools.product(range(modules.projections.num_layers), modules.projections.mixture):
        whole = modules.projections[name]
        for number in range(whole.experts):
            at = f"base_model.model.model.layers.{layer}.{whole.of_expert(number).path}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, whole.inputs, generator=generator).to(dtype)
            tensors[f"{at}.lora_B.weight"] = torch.randn(whole.outputs, rank, generator=generator).to(dtype)
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.wide
def test_as_many_tensors_are_read_as_a_model_has_of_experts(tmp_path):
    """More than of any other model: 64 experts in 30 layers, 11,520 tensors."""
    changes = {"num_experts": 64, "num_hidden_layers": 30, "hidden_size": 8, "moe_intermediate_size": 8}
    save_family("qwen3-moe", tmp_path / "model", **changes, head_dim=4)
    modules = read_model_config(tmp_path / "model").module_paths
    manifest = inspect_adapter(every_expert(tmp_path / "it", 1, modules), modules)
    (part,) = manifest.parts
    assert (part.rank, part.experts, len(part.layers)) == (1, tuple(range(64)), 30)
    assert manifest.num_params(modules.projections) == 30 * 64 * 3 * 16
    small = replace(modules, projections=dense_projections(2, 8, 8, 2, 1, 4), stacked_experts=(), absent=frozenset())
    with pytest.raises(AdapterFormatError, match=r"a header of .* at most 1048576 are read"):
        inspect_adapter(tmp_path / "it", small)
