"""DoRA and biases: versions, the base weights that they are computed with, and bfloat16. For paths, see `paths`."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.config import EngineConfig
from chorus.core.executors.base import ModelExecutor
from chorus.core.requests.types import CannotMerge
from chorus.memory.files.error import AdapterFormatError

from ..tiny_families import save_family
from .adapter_zoo import FORMS, kept_zoo, save_zoo

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]


@pytest.fixture(scope="module")
def zoo():
    return kept_zoo(biased=True)


def ask(driver, it, seed, names=None, lengths=(1, 60), tokens=6, mark=""):
    rng, want = random.Random(seed), {}
    for index, name in enumerate((None, *it.adapters) if names is None else names):
        request_id = f"{mark}{index}.{name}"
        prompt, want[request_id] = it.case(name, rng.randint(*lengths), seed=seed, count=tokens)
        driver.add(request_id, name, prompt, max_tokens=tokens)
    return want


def answered(driver, want):
    answers = driver.drain()
    return {name: answers[name].tokens for name in want}


@pytest.mark.parametrize("kernels", ["native"])
def test_two_versions_share_no_vectors(zoo, drive):
    """A request of the old version runs on beside one of the new."""
    driver = drive(zoo, max_num_seqs=4, adapters={"it": zoo.adapters["dora"]})
    old, want = zoo.case("dora", 12, 20, seed=6)
    driver.add("old", "it", old, max_tokens=20)
    for _ in range(4):
        driver.step()
    driver.engine.store.register("it", zoo.adapters["dora-bias-all"])
    new, want_new = zoo.case("dora-bias-all", 12, 20, seed=6)
    driver.add("new", "it", new, max_tokens=20)
    assert answered(driver, {"old": want, "new": want_new}) == {"old": want, "new": want_new}


def base_weights(model, **settings):
    return ModelExecutor(EngineConfig(model=model, **settings)).base_weights


class TestBaseWeights:
    """What vectors are computed with."""

    def test_are_those_that_are_served(self, zoo):
        stored = load_file(zoo.model / "model.safetensors")
        key = "model.layers.1.mlp.down_proj"
        base = base_weights(zoo.model)
        assert torch.equal(base.weight(1, "down_proj"), stored[f"{key}.weight"])
        assert torch.equal(base.bias(1, "down_proj"), stored[f"{key}.bias"])
        quantised = base_weights(zoo.model, quantization="int8").weight(1, "down_proj")
        assert 0 < float((quantised - stored[f"{key}.weight"]).norm() / quantised.norm()) < 0.02

    def test_of_one_matrix_of_several(self, tmp_path):
        save_family("phi-3", tmp_path)
        packed = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.qkv_proj.weight"]
        base = base_weights(tmp_path)
        parts = [base.weight(0, name) for name in ("q_proj", "k_proj", "v_proj")]
        assert torch.equal(torch.cat(parts), packed)
        assert base.bias(0, "q_proj") is None

    def test_dummy_weights_are_refused(self, zoo):
        with pytest.raises(AdapterFormatError, match="load_format is 'dummy'"):
            base_weights(zoo.model, load_format="dummy").weight(0, "q_proj")

    def test_a_checkpoint_that_is_gone(self, zoo, tmp_path):
        save_family("qwen2-untied", tmp_path)
        base = base_weights(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(AdapterFormatError, match="can't be read again"):
            base.weight(0, "q_proj")


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("chunk", [8, 96])
def test_bfloat16_is_near_float32(zoo, drive, chunk):
    """Vectors stay in float32 beside rank-rows in bfloat16."""
    names = ("plain", "dora", "bias-all", "dora-bias-all", "both-biases")
    prompts = {name: zoo.case(name, 40, 1, seed=8)[0] for name in names}

    def scores(dtype):
        driver = drive(zoo, dtype=dtype, max_num_batched_tokens=chunk, max_num_seqs=8)
        for name, prompt in prompts.items():
            driver.add(name, name, prompt, max_tokens=1, prompt_logprobs=0)
        return {name: answer.prompt_logprobs for name, answer in driver.drain().items()}

    want, got = scores("float32"), scores("bfloat16")
    for name in names:
        errors = [abs(a.logprob - b.logprob) for a, b in zip(want[name], got[name], strict=True)]
        assert sum(errors) / len(errors) < 0.12, name


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_magnitude_of_0_is_served_and_not_merged(tmp_path, drive):
    """What is merged could not be taken off other requests again."""
    it = save_zoo(tmp_path, forms={"dora": FORMS["dora"]})
    file = it.adapters["dora"] / "adapter_model.safetensors"
    tensors = load_file(file)
    next(tensor for name, tensor in tensors.items() if "o_proj.lora_magnitude" in name)[5] = 0
    save_file(tensors, file)
    driver = drive(it, max_num_seqs=4)
    driver.run("load", "dora", [5, 6], max_tokens=1)
    driver.engine.merge("dora")
    driver.add("beside", None, [5, 6, 7], max_tokens=40)
    want = ask(driver, it, seed=7)
    assert answered(driver, want) == want
    assert driver.engine.stats().merged_adapter is None
    with pytest.raises(CannotMerge, match="makes a row of layer"):
        driver.engine.merge("dora")
