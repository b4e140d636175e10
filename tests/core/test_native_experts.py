"""Mixtures of experts inside the native decoder: which models it takes, their bits, and adapters on their way."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch

from chorus.core.cold_start import ColdStart
from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.model.program.native_decoder import NativeDecoderModel, why_unsupported
from chorus.core.model.read_config import read_model_config
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams

from .executors.slow_link import slow_down
from .executors.test_lora_offload import Link
from .layers.test_hybrid_paths import speculating
from .paths.asked import answers, told
from .speculation.stand_ins import Drawn, Right
from .speculation.test_speculation import same
from .test_families import executor_of, logits_of
from .tiny_families import EXPERTS, RENAMED, make_tiny, save_family
from .tiny_mixtures import ADAPTERS, make_mixture

pytestmark = [pytest.mark.native, pytest.mark.wide]

#: Families with what it does not compute: experts of queries, convolved heads, tables of n-grams.
NOT_NATIVE = ("jetmoe", "zaya", "qwen4-exp")

#: Families that ranks can't share: see `LayerSpec.why_whole`.
WHOLE = ("muse-spark", "longcat-flash")

#: Families whose layers the native decoder computes.
NATIVE = [family for family in EXPERTS if not family.startswith(NOT_NATIVE)]
WITH_EXPERTS = [
    family
    for family, (_, changes, _) in RENAMED.items()
    if any("expert" in name for name in changes)
    and changes.get("num_experts") != 1
    and not family.startswith((*NOT_NATIVE, "qwen4", "inkling"))  # experts of all tokens that a router weighs
]
BITS = ["qwen3-moe-mixed", "glm-4-moe-groups", "qwen3.5-moe", "granite-4-h-moe", "deepseek-v2", "glm-4.7-flash"]
"""Layers with and without experts, groups of experts beside a shared one, recurrent states, and latents."""


@pytest.fixture
def kernels() -> str:
    return "native"


@pytest.mark.parametrize("family", [*NATIVE, *WITH_EXPERTS])
def test_the_decoder_computes_all_mixtures(tmp_path, family):
    save_family(family, tmp_path)
    config = read_model_config(tmp_path)
    assert config.num_experts
    assert why_unsupported(config, torch.float32) is None


@pytest.mark.native(needed=False)
@pytest.mark.parametrize(
    ("family", "ranks"), [(family, ranks) for family in NATIVE for ranks in (1, 2) if ranks == 1 or family not in WHOLE]
)
def test_several_threads_give_the_tokens_of_transformers_and_peft(tiny, drive, family, ranks):
    it = tiny(family)
    driver = drive(
        it, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128, threads=3 * ranks, tensor_parallel_size=ranks
    )
    assert isinstance(driver.executor.rank.decoder, NativeDecoderModel)
    want = answers(it, driver, 8, seed=3)
    assert told(driver, want) == want


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 150, (length,), generator=generator).tolist() for length in (5, 17, 40, 90)]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", BITS)
def test_bits_do_not_depend_on_the_batch_or_on_threads(tmp_path, prompts, family, dtype, quantization):
    save_family(family, tmp_path, initializer_range=0.1)

    def logits(own: list[list[int]], threads: int) -> torch.Tensor:
        config: dict[str, Any] = {"dtype": dtype, "quantization": quantization, "cpu_kernels": "native"}
        executor = executor_of(tmp_path, threads=threads, **config)
        assert isinstance(executor.decoder, NativeDecoderModel)
        return logits_of(executor, own, state_checkpoint_tokens=0)

    together = logits(prompts, 3)
    for index in (0, 2, 3):
        assert torch.equal(logits([prompts[index]], 1)[0], together[index])


@pytest.mark.parametrize("family", BITS)
def test_bits_do_not_depend_on_how_a_prompt_is_cut(tmp_path, prompts, family):
    save_family(family, tmp_path, initializer_range=0.1)
    found = []
    for chunk in (7, 90):
        config = {"dtype": "float32", "cpu_kernels": "native", "max_num_seqs": 1, "state_checkpoint_tokens": 0}
        executor = executor_of(tmp_path, threads=2, **config)
        engine = Engine(EngineConfig(model=".", max_num_batched_tokens=chunk, **config), executor)
        engine.add_request(Request("a", prompts[3], RequestParams(4, temperature=0, logprobs=3, ignore_eos=True)))
        outputs = [output for _ in range(20) if engine.has_work() for output in engine.step()]
        found.append([score for output in outputs for score in output.logprobs])
    assert found[0] == found[1]
    assert len(found[0]) == 4


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_bits_beside_an_adapter_of_a_mixture_are_those_alone(drive, adapter):
    """Of the adapter's own rows as well, in a batch in which its experts have other rows, too."""
    it, rng = make_mixture("qwen3-moe"), random.Random(adapter)
    asked = [([adapter, None, *ADAPTERS][index % 6], [rng.randrange(3, 150) for _ in range(30)]) for index in range(6)]
    found = []
    for count, threads in ((6, 3), (1, 1)):
        driver = drive(it, dtype="bfloat16", max_num_seqs=6, max_num_batched_tokens=200, threads=threads)
        for index, (name, prompt) in enumerate(asked[:count]):
            driver.add(f"{index}", name, prompt, max_tokens=8, logprobs=2)
        found.append(driver.drain()["0"].logprobs)
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["qwen3-moe-mixed", "qwen3.5-moe"])
def test_outputs_are_those_without_speculation(drive, family):
    """To the bit, of adapters on experts, routers and shared experts."""
    it, rng = make_mixture(family), random.Random(family)
    asked = [
        ([None, *ADAPTERS][index % 5], [rng.randrange(3, 150) for _ in range(rng.randint(3, 30))])
        for index in range(10)
    ]
    limits = {"dtype": "bfloat16", "max_num_seqs": 6, "max_num_batched_tokens": 40, "max_model_len": 128, "threads": 2}

    def ask(driver):
        for index, (adapter, prompt) in enumerate(asked):
            driver.add(f"r{index}", adapter, prompt, max_tokens=30, logprobs=2)
        return driver.drain()

    want = ask(drive(it, **limits))

    def answer(request):
        return want[request.id].tokens

    for proposer in (Right(answer), Drawn(answer, random.Random(7))):
        driver = speculating(drive, it, proposer, **limits)
        same(ask(driver), want, "native")
        assert driver.engine.stats().num_accepted_tokens > 10


# -- adapters that are still coming


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_layer_of_a_mixture_is_waited_for_until_its_adapter_is_late(drive, adapter):
    """The step waits for the adapter's layer in the mixture; a row that misses it is void, and runs again."""
    it = make_mixture("qwen3.5-moe")
    driver = drive(it, max_load_stall_seconds=0.0, clock=time.monotonic, max_num_batched_tokens=200)
    driver.has_stalled_link = True
    executor, link = driver.executor.inner, Link()
    slow_down(executor.adapters, executor.arena.pages, link)
    lora = executor.steps._lora  # noqa: SLF001
    want = answers(it, driver, 1, seed=1, adapters=(adapter,)) | answers(it, driver, 1, seed=2, adapters=(None,))
    driver.step()
    (plan,) = driver.plans
    assert lora.late_requests(plan.sequences) == ["1.0"]
    assert lora.of_mixtures.segments.late, "its segments of mixtures are not marked"
    link.let(1000)
    assert told(driver, want) == want


@pytest.mark.parametrize("adapter", ["r2-experts", "r5-shared"])
def test_a_prefill_follows_the_layers_as_they_come(drive, adapter):
    it = make_mixture("qwen3.5-moe")
    driver = drive(it, max_load_stall_seconds=60.0, clock=time.monotonic, max_num_batched_tokens=200)
    driver.has_stalled_link = True
    executor, link = driver.executor.inner, Link()
    slow_down(executor.adapters, executor.arena.pages, link)
    want = answers(it, driver, 1, seed=1, adapters=(adapter,))
    timers = [threading.Timer(0.05 * layer, link.let, [layer]) for layer in range(1, 6)]
    for timer in timers:
        timer.start()
    assert told(driver, want) == want
    for timer in timers:
        timer.join()


@pytest.mark.parametrize("of_mixture", [False, True])
def test_offload_workers_compute_layers_and_adapters_of_mixtures_are_waited_for(drive, of_mixture):
    """Workers compute products of layers alone: a step with the others' adapter must wait for each layer anyway."""
    it = make_mixture("qwen3-moe") if of_mixture else make_tiny("qwen3-moe")
    driver = drive(it, offload_workers=1, memory_bytes=16 << 20, max_load_stall_seconds=60.0, clock=time.monotonic)
    driver.has_stalled_link = True
    executor, link = driver.executor.inner, Link()
    slow_down(executor.adapters, executor.arena.pages, link)
    offload = executor._offload  # noqa: SLF001
    offload.cold_start = ColdStart.OFFLOAD
    want = answers(it, driver, 2, seed=1, adapters=("r2-experts" if of_mixture else "r8-qv", None))
    if of_mixture:
        threading.Timer(0.3, link.let, [1000]).start()
    assert told(driver, want) == want
    assert link.most == (1000 if of_mixture else 0)
    assert (offload.starts.num_offloaded, offload.starts.num_streamed) == (not of_mixture, of_mixture)
