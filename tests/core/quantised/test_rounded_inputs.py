"""Steps of models whose activations are rounded to 8 bits, against transformers + peft with dequantised weights, whose
inputs a hook rounds.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.config import EngineConfig
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.checkpoints.quantization.rounded_inputs import BLOCK, RoundedInputs
from chorus.core.requests.types import CannotMerge
from chorus.ops.library import native_library
from chorus.ops.library.native_integers import IntegerPanels
from chorus.perf.bench.models import random_model
from chorus.perf.bench.models.sizes import Geometry

from ...conftest import ADAPTERS, ModelSpec, Subject, save_adapter, save_model
from ...tables import LAYER_MATRICES
from ..conftest import KERNELS
from ..executors.thread_ranks import ThreadProcess
from ..merging.test_merged import load
from ..model.checkpoints.quantization.integer_forms import compressed_integers
from ..model.checkpoints.quantization.test_forms import with_experts
from ..model.checkpoints.quantization.test_rounded_inputs import DYNAMIC, with_inputs
from ..model.checkpoints.quantization.twins import write_twins
from ..test_families import logits_of as last_logits
from ..test_parity import add_all, check, make_cases
from .test_quantised_logits import PROMPTS, logits_of

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

NAMES = ("w8a8", "w4a8")
NEEDED = {"a": "r2-qv", "b": "r3-mlp", "c": "r33-all"}

#: Shares of two ranks are whole blocks.
SPEC = ModelSpec(seed=9, hidden=128, ffn=256, heads=4, kv_heads=2)


def dequantised(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The values of the setting's weights, from the definition."""
    weight, half = weight.float().clone(), 1 << (bits - 1)
    inputs = weight.shape[1]
    group = inputs if bits == 8 else next(size for size in (128, 64, 32) if not inputs % size)
    for part in weight.split(group, 1):
        scale = (part.abs().amax(1, keepdim=True) / (half - 0.5)).bfloat16().float()
        part.copy_((part * (1 / scale)).round().clamp(-half, half - 1) * scale)
    return weight


def rounded(x: torch.Tensor, block: int) -> torch.Tensor:
    """Of each block the largest is 127 steps."""
    parts = []
    for part in x.split(block, -1):
        step = part.abs().amax(-1, keepdim=True) / 127
        parts.append(torch.where(step > 0, (part / step).round(), 0) * step)
    return torch.cat(parts, -1)


class RoundingSubject(Subject):
    """A reference that rounds the inputs of the base model's projections, but not those of adapters."""

    bits = 8

    def _reference(self):
        if self._peft is None:
            model = super()._reference()
            for name, module in model.named_modules():
                if isinstance(module, torch.nn.Linear) and name.removesuffix(".base_layer").endswith("_proj"):
                    groups = [size for size in (128, 64, 32) if not module.in_features % size]
                    block = BLOCK if self.bits == 8 else min(BLOCK, groups[0])
                    hook = partial(lambda block, _module, args: (rounded(args[0], block),), block)
                    module.register_forward_pre_hook(hook)
        return self._peft


def rounding_subject(root: Path, model: Path, adapters: dict[str, Path], bits: int) -> RoundingSubject:
    """The reference of a plain checkpoint's quantised form."""
    twin = shutil.copytree(model, root / "twin")
    tensors = load_file(twin / "model.safetensors")
    for key in tensors:
        if key.endswith("_proj.weight"):
            tensors[key] = dequantised(tensors[key], bits)
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    subject = RoundingSubject(twin, adapters)
    subject.bits = bits
    return subject


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Subject:
    root = tmp_path_factory.mktemp("plain")
    save_model(SPEC, root / "model")
    for seed, name in enumerate(NEEDED.values()):
        save_adapter(root / "model", root / name, *ADAPTERS[name], seed=seed)
    return Subject(root / "model", {name: root / name for name in NEEDED.values()})


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> Subject:
    root = tmp_path_factory.mktemp("odd")
    geometry = Geometry(hidden=288, ffn=352, layers=2, heads=4, kv_heads=2, vocab=512)
    model = random_model.checkpoint(random_model.RandomModel(geometry), root)
    for seed, (short, name) in enumerate(NEEDED.items()):
        save_adapter(model, root / short, *ADAPTERS[name], seed=seed)
    return Subject(model, {short: root / short for short in NEEDED})


@pytest.fixture(scope="module", params=NAMES)
def named(request, plain, tmp_path_factory) -> tuple[str, RoundingSubject]:
    bits = 8 if request.param == "w8a8" else 4
    return request.param, rounding_subject(tmp_path_factory.mktemp("twin"), plain.model, plain.adapters, bits)


@pytest.mark.parametrize("kernels", KERNELS)
def test_tokens_are_those_of_the_reference(named, plain, drive, kernels):
    name, reference = named
    cases = make_cases(reference, 12, seed=4, longest=50, tokens=(8, 16))
    driver = drive(plain, quantization=name, cpu_kernels=kernels)
    add_all(driver, cases)
    check(driver, cases)
    assert max(plan.num_adapters for plan in driver.plans) == 3


@pytest.mark.native
@pytest.mark.parametrize("kernels", ["native"])
def test_two_ranks_give_the_tokens_of_the_reference(named, plain, drive, monkeypatch, kernels):
    """Their shares of o and down are whole blocks."""
    monkeypatch.setattr("chorus.core.executors.worker_processes.Popen", ThreadProcess)
    name, reference = named
    cases = make_cases(reference, 8, seed=5, tokens=(8, 12))
    driver = drive(plain, quantization=name, cpu_kernels=kernels, tensor_parallel_size=2, memory_bytes=16 << 20)
    add_all(driver, cases)
    check(driver, cases)


#: Errors of logits by their norms: of the median row, and of all. A value between two steps may become either, and the
#: steps of later layers follow; in bfloat16 no row is without such values.
BOUNDS = {"float32": (1e-5, 0.03), "bfloat16": (0.03, 0.03)}


@pytest.mark.parametrize("level", ["none", *native_library.levels()])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_the_base_and_three_adapters(odd, tmp_path, monkeypatch, level, dtype, name):
    """Rows of 288 and of 352 inputs: their last blocks are shorter, or they are in groups of 32."""
    monkeypatch.setenv(native_library.ISA, level)
    options = {"dtype": dtype, "cpu_kernels": "torch" if level == "none" else "native"}
    found = logits_of(odd.model, odd.adapters, quantization=name, **options)
    reference = rounding_subject(tmp_path, odd.model, odd.adapters, 8 if name == "w8a8" else 4)
    want = torch.stack([reference.logits(each, prompt)[-1] for each, prompt in PROMPTS.items()])
    errors = (found - want).norm(dim=-1) / want.norm(dim=-1)
    median, most = BOUNDS[dtype]
    assert errors.median() < median and errors.max() < most
    fine = logits_of(odd.model, odd.adapters, quantization="int8" if name == "w8a8" else "int4", **options)
    assert (found - fine).norm() > 2e-3 * fine.norm(), "activations are not rounded"


@pytest.mark.parametrize("kernels", KERNELS)
def test_adapters_are_served_unmerged(named, plain, drive, kernels):
    name, reference = named
    cases = make_cases(reference, 4, seed=6, adapters=["r2-qv"], tokens=(6, 8))
    driver = drive(plain, quantization=name, cpu_kernels=kernels)
    load(driver, "r2-qv")
    for _ in range(2):
        with pytest.raises(CannotMerge, match="activations are rounded to 8 bits"):
            driver.engine.merge("r2-qv")
    assert not driver.engine.merging.is_under_way
    driver.answers.clear()
    add_all(driver, cases)
    check(driver, cases)


@pytest.mark.native
@pytest.mark.parametrize(
    ("inputs", "want"),
    [
        (DYNAMIC, (8, BLOCK)),
        ({**DYNAMIC, "strategy": "group", "group_size": 8}, (8, 8)),
        ({**DYNAMIC, "dynamic": False}, (16, 256)),
        (None, (16, 256)),
    ],
)
def test_a_checkpoint_is_obeyed(tmp_path, inputs, want):
    quantised, _ = write_twins(tmp_path, with_inputs(inputs))
    config = EngineConfig(model=quantised, memory_bytes=4 << 20, threads=1, cpu_kernels="native")
    executor = CpuExecutor(config)
    kept = [layer[name] for layer in executor.decoder.layers for name in LAYER_MATRICES]
    executor.close()
    assert all(isinstance(each, IntegerPanels) for each in kept)
    assert {(each.input_bits, each.input_block) for each in kept} == {want}


def test_projections_that_are_multiplied_together_must_agree(tmp_path):
    """Else their activations stay as they are."""
    form = compressed_integers(8, "channel", is_packed=False)
    group = form.how["config_groups"]["group_0"]
    groups = {
        "group_0": {**group, "input_activations": DYNAMIC},
        "group_1": {**group, "targets": [r"re:.*\.v_proj$"]},
    }
    quantised, _ = write_twins(tmp_path, replace(form, how={**form.how, "config_groups": groups}))
    config = EngineConfig(model=quantised, memory_bytes=4 << 20, threads=1, cpu_kernels="torch")
    executor = CpuExecutor(config)
    layer = executor.decoder.layers[0]
    assert [hasattr(layer[name], "inputs") for name in LAYER_MATRICES] == [False, True, True, True]
    executor.close()


def test_experts_get_their_activations_as_they_are(tmp_path):
    """They are dequantised; attention of the same layers is not."""
    of_experts = with_experts("compressed int8", "MixtralForCausalLM")
    form = with_inputs(DYNAMIC)
    quantised, _ = write_twins(
        tmp_path, replace(form, plain=of_experts.plain, config=of_experts.config), "MixtralForCausalLM"
    )
    config = EngineConfig(model=quantised, memory_bytes=4 << 20, threads=1, cpu_kernels="torch")
    executor = CpuExecutor(config)
    layer = executor.decoder.layers[0]
    assert layer["qkv"].inputs == layer["o"].inputs == RoundedInputs()
    found = last_logits(executor, [[3, 7, 11, 4, 5, 9]])
    assert found.isfinite().all() and found.std() > 0


@pytest.mark.native
@pytest.mark.parametrize("name", NAMES)
def test_the_output_projection_rounds_its_inputs_too(odd, name):
    options = {"dtype": "float32", "quantization": name, "quantize_lm_head": True}
    native, torch_s = (logits_of(odd.model, odd.adapters, cpu_kernels=each, **options) for each in ("native", "torch"))
    errors = (native - torch_s).norm(dim=-1) / torch_s.norm(dim=-1)
    assert errors.median() < 1e-5 and errors.max() < 0.03
    weights_alone = logits_of(odd.model, odd.adapters, cpu_kernels="torch", dtype="float32", quantization=name)
    assert (torch_s - weights_alone).norm() > 2e-3 * torch_s.norm()
