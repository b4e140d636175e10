"""Experts that stay narrow on the CUDA executor, on a CPU: Triton's kernels interpreted.

Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

import json
import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.executors import cuda_gemm_backends, cuda_memory
from chorus.core.model.batch import GemmBackend
from chorus.core.model.weights.narrow_bytes import weight_bytes
from chorus.ops.gemm.narrow_weights import NarrowWeight

from ...kept import KeptAnswers, kept_files
from ..paths.quantised import quantised_mixture
from ..tiny_families import load_peft
from ..tiny_mixtures import Mixture, make_mixture
from . import test_cuda_experts_interpreted as plain_experts
from .test_cuda_experts_interpreted import captured_groups, check

drive = plain_experts.drive  # a fixture

#: With biases, of rows that words of 4 bits divide; with a shared expert and dense layers.
QUANTISED = [("gpt-oss", "int4"), ("glm-4-moe", "int8")]


@pytest.fixture(scope="module")
def quantised():
    return cache(quantised_mixture)


def stacks(driver) -> list:
    """The experts of all layers."""
    layers = driver.executor.inner.steps.decoder.layers
    experts = [layer["experts"] for layer in layers if "experts" in layer]
    return [each.data for own in experts for each in (own.gate_up, own.down)]


def check_kept(driver, bits: int, *, float4: bool = False, float8: bool = False) -> None:
    kept = stacks(driver)
    assert {(type(each), each.bits, each.float4, each.float8) for each in kept} == {
        (NarrowWeight, bits, float4, float8)
    }
    experts = weight_bytes(driver.executor.inner.whole, 4, driver.executor.inner.quantiser).experts
    assert experts == sum(each.nbytes for each in kept)


def test_mxfp4_stays_as_it_is_in_captured_steps_beside_adapters(quantised, drive):
    """Base rows and adapters on experts and routers in one batch: tokens of the dequantised twin."""
    it = quantised("gpt-oss", "mxfp4")
    driver = drive(it, **it.options)
    check_kept(driver, 4, float4=True)
    check(it.twin, driver, ("r2-experts", 20, 4), (None, 5, 5), ("r4-router", 7, 3))
    assert captured_groups(driver)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), QUANTISED)
def test_families(quantised, drive, family, form):
    it = quantised(family, form)
    driver = drive(it, **it.options)
    check_kept(driver, 8 if form == "int8" else 4)
    requests = ("r2-experts", 13, 4), (None, 9, 3), ("r5-shared", 5, 4), ("r6-down", 4, 4)
    check(it.twin, driver, *requests)


@pytest.mark.parametrize(
    ("family", "form"), [("gpt-oss", "mxfp4"), *(pytest.param(*each, marks=pytest.mark.slow) for each in QUANTISED)]
)
def test_operands_are_swapped_in_prompts_and_decode_steps(quantised, drive, monkeypatch, family, form):
    """Beside adapters on experts, of which the activation is then apart."""
    monkeypatch.setitem(cuda_gemm_backends.TOLERANCE, torch.float32, 1e-4)
    it = quantised(family, form)
    driver = drive(it, small_gemm="swapped", **it.options)
    steps = driver.executor.inner.steps
    for backends in (steps.mixed.backends.of(24), *steps.decoding.backends.values()):
        assert {each for kind, each in backends.items() if kind.experts} == {GemmBackend.SWAPPED}
    check(it.twin, driver, (None, 9, 3), ("r2-experts", 6, 3))


@pytest.mark.slow
def test_fp8_experts_stay_so(drive):
    """A tensor for each expert, with a scale per output."""
    base = make_mixture("qwen3-moe")

    def write(root) -> None:
        for name in ("fp8", "twin"):
            shutil.copytree(base.model, root / name)
        tensors = load_file(base.model / "model.safetensors")
        twin, stored = dict(tensors), {}
        for key, tensor in tensors.items():
            if not key.endswith("_proj.weight"):
                stored[key] = tensor
                continue
            scale = tensor.abs().amax(1, keepdim=True) / 448
            stored[key], stored[f"{key}_scale"] = (tensor / scale).to(torch.float8_e4m3fn), scale
            twin[key] = stored[key].float() * scale
        save_file(stored, root / "fp8" / "model.safetensors", {"format": "pt"})
        save_file(twin, root / "twin" / "model.safetensors", {"format": "pt"})
        config = root / "fp8" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))

    root = kept_files("fp8 mixture", write)
    twin = Mixture(root / "twin", base.adapters, load_peft, KeptAnswers(root))
    driver = drive(Mixture(root / "fp8", base.adapters, load_peft, twin.kept))
    check_kept(driver, 8, float8=True)
    check(twin, driver, ("r2-experts", 13, 4), (None, 9, 3))


@pytest.mark.slow
def test_without_the_kernels_for_narrow_weights_they_are_dequantised(quantised, drive):
    it = quantised("gpt-oss", "mxfp4")
    driver = drive(it, small_gemm="off")
    assert {type(each) for each in stacks(driver)} == {torch.Tensor}
    check(it.twin, driver, ("r2-experts", 6, 3), (None, 4, 3))


@pytest.mark.slow
def test_memory_is_checked_for_what_is_kept(quantised, drive, monkeypatch):
    """A mixture that fits a GPU only in few bits is loaded."""
    asked = {}
    monkeypatch.setattr(cuda_memory, "check_weights", lambda weights, *_: asked.setdefault(small_gemm, weights))
    it = quantised("gpt-oss", "mxfp4")
    for small_gemm in ("off", "auto"):
        kept = stacks(drive(it, small_gemm=small_gemm))
        asked[small_gemm, "experts"] = sum(each.nbytes for each in kept)
    assert asked["off"] - asked["auto"] == asked["off", "experts"] - asked["auto", "experts"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("small_gemm", ["on", "fused"])
def test_other_projections_are_multiplied_by_the_kernel_for_few_rows(quantised, drive, monkeypatch, small_gemm):
    """Those of attention, and logits: widened in registers, too, beside adapters on experts."""
    monkeypatch.setitem(cuda_gemm_backends.TOLERANCE, torch.float32, 1e-5)
    it = quantised("qwen3-moe", "int4")
    driver = drive(it, small_gemm=small_gemm, **it.options)
    backends = {*driver.executor.inner.steps.decoding.backends.values()}
    own = GemmBackend.EXPANDED if small_gemm == "fused" else GemmBackend.SMALL
    assert backends == {(own, own, GemmBackend.LIBRARY, GemmBackend.LIBRARY, GemmBackend.SMALL)}
    check(it.twin, driver, ("r2-experts", 6, 4), (None, 4, 3), ("r4-router", 3, 3))
