"""Experts whose quantised weights are kept answer as transformers + peft do with the dequantised values."""

from __future__ import annotations

import json
import random
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from chorus.core.model.experts import ExpertPack
from chorus.core.model.narrow_bytes import kept_bytes
from chorus.core.model.native_decoder import NativeDecoderModel
from chorus.core.model.quantization.groups import is_packable, pack_scaled
from chorus.core.model.quantization.round_to_nearest import RoundToNearest
from chorus.core.model.read_config import read_model_config
from chorus.core.model.shard import Shard
from chorus.core.model.weight_loader import WeightLoader
from chorus.core.model.weight_plan import Way, WeightPlan
from chorus.ops import native_library
from chorus.ops.expert_products import Panels, pack, unpack
from chorus.ops.native_integers import IntegerPanels

from ..kept import KeptAnswers, kept_files
from .model.quantization.test_forms import with_experts
from .model.quantization.test_mxfp4 import HOW, write_mxfp4
from .model.quantization.twins import write_twins
from .test_expert_adapters import logprobs_of
from .test_families import executor_of, logits_of
from .test_family_paths import answers, told
from .tiny_families import load_peft
from .tiny_mixtures import ADAPTERS, Mixture, make_mixture

pytestmark = [pytest.mark.native, pytest.mark.wide]

FAMILIES = ("qwen3-moe", "gpt-oss", "glm-4-moe")
"""A plain mixture, one with biases whose experts are stacked, and one with a shared expert."""

ROUTERS = (".gate.weight", ".router.weight")
MIXED = [(family, form) for family in FAMILIES for form in ("int8", "int4")] + [("gpt-oss", "mxfp4")]
LEVELS = native_library.levels()


@pytest.fixture
def kernels() -> str:
    """The native decoder where it takes a family; else PyTorch's operators, with the native library's mixtures."""
    return "auto"


def rounded(weight: torch.Tensor, form: str) -> torch.Tensor:
    """A weight `[…, out, in]` quantised to the nearest and dequantised, from the definition."""
    half, inputs = {"int8": 128, "int4": 8}[form], weight.shape[-1]
    group = inputs if form == "int8" else next((each for each in (128, 64, 32) if not inputs % each), 128)
    parts = []
    for part in weight.float().split(group, -1):
        scale = (part.abs().amax(-1, keepdim=True) / (half - 0.5)).bfloat16().float()
        parts.append((part * (1 / scale)).round().clamp(-half, half - 1) * scale)
    return torch.cat(parts, -1)


def write_rounded(source: Path, path: Path, form: str) -> None:
    """A checkpoint of the dequantised weights of `--quantization`."""
    shutil.copytree(source, path)
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.ndim == 3:  # gpt-oss' experts: [experts, in, out]
                tensors[name] = rounded(tensor.transpose(1, 2), form).transpose(1, 2).contiguous()
            elif tensor.ndim == 2 and ".layers." in name and not name.endswith((*ROUTERS, "bias")):
                tensors[name] = rounded(tensor, form)
        save_file(tensors, file)


def write_packed(source: Path, quantised: Path, twin: Path) -> None:
    """gpt-oss with random MXFP4 experts about as large as before, and the dequantised twin."""
    for path in (quantised, twin):
        shutil.copytree(source, path)
    plain, packed = load_file(twin / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in plain.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        packed[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        packed[f"{name}_scales"] = torch.randint(122, 125, shape, dtype=torch.uint8, generator=generator)
        values = convert_moe_packed_tensors(packed[f"{name}_blocks"], packed[f"{name}_scales"])
        plain[name] = values.float().contiguous()
    save_file(packed, quantised / "model.safetensors")
    save_file(plain, twin / "model.safetensors")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": HOW}))


class Quantised:
    """A served model with adapters, and `transformers` + `peft` with its dequantised values."""

    def __init__(self, family: str, form: str) -> None:
        base = make_mixture(family)

        def write(root: Path) -> None:
            if form == "mxfp4":
                write_packed(base.model, root / "quantised", root / "twin")
            else:
                write_rounded(base.model, root / "twin", form)

        root = kept_files(f"quantised mixture {family} {form}", write)
        self.options = {} if form == "mxfp4" else {"quantization": form}
        self.model, self.adapters = root / "quantised" if form == "mxfp4" else base.model, base.adapters
        self.twin = Mixture(root / "twin", base.adapters, load_peft, KeptAnswers(root))
        self.case = self.twin.case


def experts_of(executor) -> list:
    return matrices_of(executor.decoder.layers)


def matrices_of(layers) -> list:
    found = [layer["experts"] for layer in layers if "experts" in layer]
    return [each for own in found for each in (*own.gate_up, *own.down)]


@pytest.mark.numerics
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("family", "form"), MIXED)
def test_mixed_batch_equals_transformers_and_peft(drive, family, form, ranks):
    """Exact tokens in float32; among the adapters are such on experts, routers and shared experts."""
    it = Quantised(family, form)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "max_model_len": 128}
    driver = drive(it, tensor_parallel_size=ranks, **limits, **it.options)
    want = answers(it, driver, 8, seed=1, adapters=(None, *ADAPTERS))
    assert told(driver, want) == want
    assert max(plan.num_adapters for plan in driver.plans) == len(ADAPTERS)
    assert {type(each) for each in experts_of(driver.executor.rank)} == {IntegerPanels}


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(("family", "form"), [("gpt-oss", "mxfp4"), ("glm-4-moe", "int8")])
def test_at_every_level(drive, monkeypatch, family, form, isa):
    monkeypatch.setenv(native_library.ISA, isa)
    it = Quantised(family, form)
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24, tensor_parallel_size=1, **it.options)
    want = answers(it, driver, 6, seed=1, adapters=("r2-experts", None, "r4-router"))
    assert told(driver, want) == want


@pytest.mark.parametrize(("family", "form"), [("gpt-oss", "mxfp4"), ("qwen3-moe", "int4")])
def test_bits_of_base_rows_do_not_change_beside_adapters(drive, family, form):
    it, rng = Quantised(family, form), random.Random(family)
    prompts = [[rng.randrange(3, 150) for _ in range(rng.randint(5, 40))] for _ in range(6)]
    found = [
        logprobs_of(
            drive(it, max_num_seqs=8, max_num_batched_tokens=48, **it.options),
            prompts[0],
            list(zip(names, prompts[1:], strict=True)),
        )
        for names in ([*ADAPTERS, "r2-experts"], [None] * 5)
    ]
    assert found[0] == found[1]


PROMPTS = [[5, 6, 7], [8, 9], list(range(20, 90))]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_is_kept_exactly_in_8_bits(tmp_path, dtype):
    """Its values are those of transformers' dequantisation, with the rows of gate and up in the same order."""
    quantised, twin = write_mxfp4(tmp_path)
    executor, other = (executor_of(path, dtype=dtype) for path in (quantised, twin))
    kept, plain = experts_of(executor), experts_of(other)
    assert {(each.bits, each.group) for each in kept} == {(8, 32)}
    assert all(isinstance(each, Panels) for each in plain)
    assert all(torch.equal(unpack(one), unpack(two).float()) for one, two in zip(kept, plain, strict=True))
    want = logits_of(executor_of(twin, dtype="float32", cpu_kernels="torch"), PROMPTS)
    found, dense = ((logits_of(it, PROMPTS) - want).norm() / want.norm() for it in (executor, other))
    assert found < (2e-5 if dtype == "float32" else 1.25 * dense), (found, dense)


FORMS_KEPT = ("awq", "gptq", "bnb int8", "compressed packed, zero points", "compressed int8", "compressed nvfp4")
FORMS_NOT = ("gptq act order", "fp8 blocks", "bnb nf4")


@pytest.mark.parametrize("form", [*FORMS_KEPT, *FORMS_NOT])
def test_experts_of_stored_forms(tmp_path, form):
    """Integers in even groups are kept, with the values of the twin; all else is dequantised."""
    quantised, twin = write_twins(tmp_path, with_experts(form, "Qwen3MoeForCausalLM"), "Qwen3MoeForCausalLM")
    executor, other = (executor_of(path, dtype="float32") for path in (quantised, twin))
    kept, plain = experts_of(executor), experts_of(other)
    assert {isinstance(each, IntegerPanels) for each in kept} == {form in FORMS_KEPT}
    for one, two in zip(kept, plain, strict=True):
        torch.testing.assert_close(unpack(one), unpack(two), rtol=1e-6, atol=1e-7)
    prompts = [[3, 7, 11], [9, 2], list(range(1, 40))]
    found, want = logits_of(executor, prompts), logits_of(other, prompts)
    assert (found - want).norm() < 1e-4 * want.norm()


@pytest.mark.parametrize("form", ["int8", "int4", "w8a8", "w4a8", "mxfp4"])
def test_bytes_are_those_that_are_kept(form):
    it = Quantised("gpt-oss", "mxfp4" if form == "mxfp4" else "int8")
    executor = executor_of(it.model, **({} if form == "mxfp4" else {"quantization": form}), dtype="float32")
    config = executor.whole
    kept = sum(each.nbytes for each in experts_of(executor))
    number = 4 * sum(each.num_weights for layer in config.projections.layers for each in layer if each.experts)
    quantiser = executor.quantiser if isinstance(executor.decoder, NativeDecoderModel) else None
    assert executor.weight_bytes == kept_bytes(config, 4, WeightPlan(Way.PACK), quantiser=quantiser) - number + kept
    assert kept < number * 0.4


@pytest.mark.parametrize("form", ["mxfp4", "int4"])
def test_ranks_keep_columns_of_the_same_numbers(form):
    it = Quantised("gpt-oss", form)
    config = read_model_config(it.model)

    def down_of(shard: Shard) -> list:
        loader = WeightLoader(it.model, config, torch.float32, shard=shard)
        loader.quantiser = None if form == "mxfp4" else RoundToNearest("int4")
        as_it_is = ExpertPack(torch.float32, pack, lambda found: found, is_packable)
        return [each for layer in loader.layers(pack_expert=as_it_is) for each in layer["experts"].down]

    whole, *shares = (down_of(shard) for shard in (Shard(), Shard(0, 2), Shard(1, 2)))
    for one, *parts in zip(whole, *shares, strict=True):
        assert torch.equal(torch.cat([part.dequantised() for part in parts], 1), one.dequantised())
        assert [part.values.dtype for part in parts] == [torch.int8] * 2


@pytest.mark.parametrize("form", ["mxfp4", "int4"])
def test_a_load_holds_one_matrix_beside_those_that_are_kept(form):
    """Each matrix of an expert is packed and gone before the next one is read."""
    it = Quantised("gpt-oss", form)
    loader = WeightLoader(it.model, read_model_config(it.model), torch.float32)
    loader.quantiser = None if form == "mxfp4" else RoundToNearest("int4")
    seen: list[weakref.ref] = []

    def pack_integers(found):
        assert [each() for each in seen] == [None] * len(seen)
        assert found.values.dtype == torch.int8
        seen.append(weakref.ref(found.values))
        return pack_scaled(found)

    layers = loader.layers(pack_expert=ExpertPack(torch.float32, pack, pack_integers, is_packable))
    kept = matrices_of(layers)
    assert len(kept) == len(seen) == 3 * 2 * 8
    assert {type(each) for each in kept} == {IntegerPanels}


def test_torch_kernels_dequantise_them():
    it = Quantised("gpt-oss", "int8")
    executor = executor_of(it.model, quantization="int8", dtype="float32", cpu_kernels="torch")
    twin = executor_of(it.twin.model, dtype="float32", cpu_kernels="torch")
    assert not any(isinstance(each, IntegerPanels) for each in experts_of(executor))
    assert executor.weight_bytes == kept_bytes(executor.whole, 4)
    assert torch.equal(logits_of(executor, [[5, 6, 7]]), logits_of(twin, [[5, 6, 7]]))
