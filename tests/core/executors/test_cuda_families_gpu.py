"""Families, quantised weights, FP8 KV caches, drafts and adapter forms on a GPU, captured and eager.

In float32: the tokens of the CPU executor, which its own tests hold against transformers + peft. These are no reference
here, because some versions of transformers ignore soft caps (5.17, Gemma 2) or limits of experts (5.17, gpt-oss).
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from chorus.core.executors.cpu import CpuExecutor
from chorus.core.executors.cuda import CudaExecutor
from chorus.core.model.checkpoints.quantization.round_to_nearest import RoundToNearest
from chorus.core.model.moe.stacked_experts import StackedExperts
from chorus.core.model.read_config import read_model_config
from chorus.graphs.runner import StepMode
from chorus.ops.gemm.narrow_weights import NarrowWeight
from chorus.perf.bench.models.random_model import RandomModel, adapters, checkpoint
from chorus.perf.bench.models.sizes import Geometry

from ...conftest import ModelSpec, Subject, save_model
from ...greedy import MIN_MARGIN
from ..adapters.adapter_zoo import save_zoo
from ..adapters.model_module_forms import FORMS as MODULE_FORMS
from ..adapters.model_module_forms import save_form
from ..conftest import Driver
from ..merging.test_merged import merge
from ..paths.float8_caches import CLEAR
from ..paths.quantised import quantised_mixture
from ..speculation.stand_ins import Free
from ..tiny_families import ADAPTERS, EXPERTS, FAMILIES, HYBRIDS, ONE_PART, RENAMED, SHAPES
from ..tiny_mixtures import make_mixture
from .family_drivers import drivers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

SPEC = ModelSpec(seed=7, hidden=32, ffn=48, layers=2, heads=2, kv_heads=1, vocab=96, positions=64, tied=True)

#: One of each kind: they come first, so that a run that is cut short has seen them.
KINDS = ["qwen3", "mixtral", "qwen3.5", "gpt-oss", "gemma-3", "qwen3.5-moe", "glm-4-moe-groups", "cohere-2", "olmo-2"]
KINDS += ["gemma-4", "gemma-4-moe", "deepseek-v3", "lfm2", "granite-4-h", "apertus", "hunyuan", "qwen3-next"]
KINDS += ["nemotron-h", "nemotron-3", "llama-4", "phi-moe"]
CONFIGS = frozenset(dir(transformers))  # to get each would import all of them
OTHERS = [
    name
    for name, (config, *_) in (FAMILIES | SHAPES | HYBRIDS | ONE_PART | EXPERTS | RENAMED).items()
    if name not in KINDS and config in CONFIGS  # InternLM 3 came after 5.17
]


@pytest.fixture
def drive() -> Iterator[Callable[..., Driver]]:
    """`drive(it, names, **config)`: an engine on the GPU with these adapters of `it`."""
    yield from drivers(
        CudaExecutor,
        dtype="float32",
        device="cuda",
        max_num_seqs=8,
        max_num_batched_tokens=24,
        block_tokens=16,
        memory_bytes=32 << 20,
        max_lora_rank=40,
        threads=1,
        mixed_graph_tokens=24,
        max_model_len=128,
        graph_capture="lazy",
    )


@pytest.fixture
def on_cpu() -> Iterator[Callable[..., Driver]]:
    """`on_cpu(it, names, **config)`: an engine on PyTorch's operators, for a request at a time."""
    yield from drivers(
        CpuExecutor,
        dtype="float32",
        device="cpu",
        cpu_kernels="torch",
        memory_bytes=64 << 20,
        threads=1,
        prefix_cache=False,
    )


def case(cpu: Driver, adapter: str | None, length: int, count: int, seed: int) -> tuple[list[int], list[int]]:
    """A random prompt and the CPU's `count` greedy tokens, all clear choices."""
    generator = torch.Generator().manual_seed(seed)
    for turn in itertools.count():
        prompt = torch.randint(3, 90, (length,), generator=generator).tolist()
        answer = cpu.run(f"{seed}.{turn}.{length}", adapter, prompt, max_tokens=count, logprobs=2)
        if min(each.top[0][1] - each.top[1][1] for each in answer.logprobs) >= MIN_MARGIN:
            return prompt, answer.tokens
    raise AssertionError


def check(cpu: Driver, driver: Driver, *requests: tuple[str | None, int, int]) -> None:
    """Requests of (adapter, prompt length, tokens), all at once, get the answers that the CPU gives to each alone."""
    want = {}
    for index, (adapter, length, count) in enumerate(requests):
        prompt, want[f"{index}"] = case(cpu, adapter, length, count, seed=index)
        driver.add(f"{index}", adapter, prompt, max_tokens=count)
    answers = driver.drain()
    assert {name: answers[name].tokens for name in want} == want


def is_captured(it: Subject, family: str) -> bool:
    """True if our attention kernel, the only one for float32, takes the family: it has no sinks, and values of a
    multiple of 16 elements.
    """
    model = read_model_config(it.model)
    sizes = {(mixer.kept_value_dim or mixer.head_dim) % 16 for mixer in model.attention_shapes}
    return sizes == {0} and "gpt-oss" not in family


@pytest.mark.parametrize("family", [*KINDS, *OTHERS])
def test_families(tiny, drive, on_cpu, family):
    """Chunks, captured pieces of mixed steps, captured decode steps, adapters beside the base model."""
    it = tiny(family)
    driver = drive(it, [*ADAPTERS])
    check(
        on_cpu(it, ADAPTERS),
        driver,
        (None, 60, 6),
        ("r3-all", 9, 12),
        ("r8-qv", 40, 9),
        ("r17-o-mlp", 17, 8),
        (None, 5, 10),
    )
    executor = driver.executor.inner
    if is_captured(it, family):
        assert executor.captured
    if family in EXPERTS:
        layers = executor.steps.decoder.layers
        assert all(isinstance(layer["experts"], StackedExperts) for layer in layers if "experts" in layer)


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss", "qwen3.5-moe", "glm-4-moe-groups"])
def test_adapters_on_routers_and_experts(drive, on_cpu, family):
    """In runs of one expert in prompts, one by one in decode steps, which are captured if attention is."""
    it = make_mixture(family)
    driver = drive(it, [*it.adapters])
    requests = [(None, 30, 8), *((name, 7 + 9 * index, 10) for index, name in enumerate(it.adapters))]
    check(on_cpu(it, it.adapters), driver, *requests)
    if is_captured(it, family):
        assert any(captured.form.mixture for captured in driver.executor.inner.captured)


@pytest.mark.parametrize(("family", "form"), [("gpt-oss", "mxfp4"), ("gpt-oss", "int4"), ("glm-4-moe", "int8")])
def test_experts_that_stay_narrow(drive, on_cpu, family, form):
    """The dequantised twin's answers, beside adapters on routers and experts."""
    it = quantised_mixture(family, form)
    driver = drive(it, [*it.adapters], **it.options)
    requests = [(None, 30, 8), *((name, 7 + 9 * index, 10) for index, name in enumerate(it.adapters))]
    check(on_cpu(it.twin, it.adapters), driver, *requests)
    layers = driver.executor.inner.steps.decoder.layers
    experts = [layer["experts"] for layer in layers if "experts" in layer]
    kept = [each.data for own in experts for each in (own.gate_up, own.down)]
    assert {type(each) for each in kept} == {NarrowWeight}


@pytest.mark.parametrize("family", ["qwen3-moe-mixed", "qwen3.5", "gemma-2"])
def test_merged_steps(tiny, drive, on_cpu, family):
    it = tiny(family)
    driver = drive(it, ["r3-all", "r8-qv"])
    merge(driver, "r3-all")
    check(on_cpu(it, ADAPTERS), driver, (None, 20, 4), ("r3-all", 9, 6), ("r8-qv", 12, 4))
    assert StepMode.MERGED in {plan.mode for plan in driver.plans}


@pytest.mark.parametrize("family", ["qwen3", "gpt-oss", "gemma-3", "qwen3.5"])
def test_fp8_kv_caches(tiny, drive, on_cpu, family):
    """In float32 PyTorch's operators attend."""
    it = tiny(family)
    driver = drive(it, [*ADAPTERS], kv_cache_dtype="fp8")
    assert driver.executor.layout.float8_kv
    cpu = on_cpu(it, ADAPTERS, kv_cache_dtype="fp8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.MIN_MARGIN", CLEAR)
        check(cpu, driver, (None, 50, 8), ("r3-all", 9, 8), ("r8-qv", 40, 8), ("r17-o-mlp", 17, 8))


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "gpt-oss", "qwen3.5"])
def test_drafts(tiny, drive, on_cpu, family):
    """Right ones, and ones that are wrong from some token on, beside prompts and in captured steps."""
    it = tiny(family)
    cpu = on_cpu(it, ADAPTERS)
    driver = drive(it, [*ADAPTERS], speculation="ngram")
    driver.engine.speculation.cost = Free()
    want = {}
    for index, adapter in enumerate([None, *ADAPTERS, None]):
        prompt, tokens = case(cpu, adapter, 9 + index, 14, seed=index)
        want[str(index)] = tokens
        said = [*tokens[:7], 9, *tokens[8:]] if index % 2 else tokens
        driver.add(str(index), adapter, prompt, max_tokens=14, prediction=said)
    answers = driver.drain()
    assert {name: answers[name].tokens for name in want} == want
    stats = driver.engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_proposed_tokens


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Adapters of every form on projections: DoRA, biases, rank patterns and the like."""
    return save_zoo(tmp_path_factory.mktemp("zoo"), biased=True)


def test_adapter_forms(zoo, drive, on_cpu):
    driver = drive(zoo, [*zoo.adapters], max_num_seqs=4, max_lora_rank=64)
    check(
        on_cpu(zoo, zoo.adapters, max_lora_rank=64),
        driver,
        *((name, 3 + index, 5) for index, name in enumerate([None, *zoo.adapters])),
    )
    assert driver.executor.inner.captured


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """Adapters on the head, on embeddings, on both and on layers too."""
    root = tmp_path_factory.mktemp("modules")
    save_model(SPEC, root / "model")
    for seed, (name, arguments) in enumerate(MODULE_FORMS.items()):
        save_form(root / "model", root / name, seed, **arguments)
    return Subject(root / "model", {name: root / name for name in MODULE_FORMS})


@pytest.mark.parametrize("mixed", [0, 24])
def test_adapters_on_heads_and_embeddings(modules, drive, mixed):
    driver = drive(modules, [*MODULE_FORMS], max_model_len=64, mixed_graph_tokens=mixed)
    want = {}
    for index, name in enumerate([None, *MODULE_FORMS, None]):
        prompt = modules.prompt(name, 4 + 2 * index, 5, seed=index)
        want[str(index)] = modules.greedy(name, prompt, 5)
        driver.add(str(index), name, prompt, max_tokens=5)
    answers = driver.drain()
    assert {name: answers[name].tokens for name in want} == want


#: Two units in the last place of a bfloat16 between 4 and 8, as large as these logits are.
NEAR = 2 * 2.0**-5

GEOMETRY = Geometry(hidden=256, ffn=512, layers=2, heads=4, kv_heads=2, vocab=512, positions=256)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Subject:
    """A random model in bfloat16 with heads of 64 and adapters of two ranks."""
    model = RandomModel(GEOMETRY, ranks=(8, 16), dtype="bfloat16", seed=12)
    root = tmp_path_factory.mktemp("plain")
    return Subject(checkpoint(model, root), adapters(model, root))


@pytest.mark.parametrize("small_gemm", ["off", "on", "fused"])
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantised_weights_give_the_values_of_what_they_stand_for(plain, drive, tmp_path, quantization, small_gemm):
    """Prompts and decode steps beside adapters, captured. Tokens and log-probabilities are the same floats if the
    library multiplies. Our kernel's matrix instructions take a step's inputs in another order, so the last bits of some
    logits may differ, and a token where two are that near.
    """
    twin = tmp_path / "twin"
    shutil.copytree(plain.model, twin)
    for file in Path(twin).glob("*.safetensors"):
        tensors = load_file(file)
        for key, tensor in tensors.items():
            if key.endswith("_proj.weight"):
                tensors[key] = RoundToNearest(quantization)(tensor.float()).dequantised().to(tensor.dtype)
        save_file(tensors, file, {"format": "pt"})
    found = []
    for model, config in ((plain.model, {"quantization": quantization}), (twin, {})):
        it = Subject(model, plain.adapters)
        driver = drive(it, it.adapters, dtype="bfloat16", small_gemm=small_gemm, max_num_batched_tokens=64, **config)
        layer = driver.executor.inner.steps.decoder.layers[0]
        is_kept = bool(config) and small_gemm != "off"  # they are dequantised once where our kernel is off
        assert isinstance(layer["down"], NarrowWeight) == is_kept
        generator = torch.Generator().manual_seed(3)
        for index, name in enumerate([None, *it.adapters, None, None]):
            prompt = torch.randint(3, GEOMETRY.vocab, (5 + 9 * index,), generator=generator).tolist()
            driver.add(str(index), name, prompt, max_tokens=8, logprobs=3)
        answers = driver.drain()
        found.append({key: (each.tokens, [one.top for one in each.logprobs]) for key, each in answers.items()})
    if small_gemm == "off":
        assert found[0] == found[1]
        return
    for key, (tokens, tops) in found[0].items():
        its_tokens, its_tops = found[1][key]
        for token, top, its_token, its_top in zip(tokens, tops, its_tokens, its_tops, strict=True):
            mine, its = dict(top), dict(its_top)
            for each in mine.keys() & its.keys():
                assert mine[each] == pytest.approx(its[each], abs=NEAR), key
            if token != its_token:
                assert top[0][1] - top[1][1] <= 2 * NEAR, key
                break
