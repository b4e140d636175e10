"""Families of models on the CUDA executor, on a CPU: Triton's kernels interpreted, copies as late as a GPU's.

Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

import pytest
import torch

from chorus.core.executors import cuda
from chorus.core.executors.cuda import CudaExecutor
from chorus.core.executors.cuda_ranks import CudaRanksExecutor
from chorus.core.model.moe.stacked_experts import StackedExperts
from chorus.graphs.runner import EagerReason, StepMode
from chorus.ops.attention import attention_flashinfer
from chorus.ops.attention.attention_backend import Obstacle
from chorus.ops.attention.attention_flashinfer import FlashInferBackend
from chorus.ops.attention.attention_triton import TritonBackend
from chorus.ops.elementwise import elementwise
from chorus.ops.library import native_library

from ...graphs.late_device import LateDevice
from ...ops.attention.fake_flashinfer import FakeFlashInfer, Stream
from ..adapters.adapter_zoo import save_zoo
from ..merging.test_merged import merge
from ..paths.family_rows import FAMILY_ROWS
from ..tiny_families import make_all_linear, make_tiny
from .family_drivers import EVERY, drivers
from .test_cuda_ranks_interpreted import DEVICES, one_launch_at_a_time  # noqa: F401 - a fixture

#: Every row of the table, or multipliers; layers side by side; norms with biases, and no gate; a table of positions.
FAMILIES = [row.name for row in FAMILY_ROWS] if EVERY else ["granite", "cohere-2", "starcoder-2", "gpt-2"]
#: Mixtures of experts: a plain one; with dense layers between; with biases, sinks and windows; with shared experts and
#: states; with chunks of attention and weighted inputs; with a sparse mixer and LayerNorms.
MIXTURES = [
    "mixtral",
    "qwen3-moe-mixed",
    "gpt-oss",
    "qwen3.5-moe",
    "llama-4",
    *(["llama-4-several", "phi-moe"] if EVERY else []),
    *(["lfm2-moe", "granite-4-h-moe", "ernie-4.5-moe", "qwen3-next", "gemma-4-moe"] if EVERY else []),
    *(["olmoe", "granite-moe", "glm-4-moe", "glm-4-moe-groups"] if EVERY else []),
    *(["afmoe", "cohere-2-moe", "flint", "kolibri-1", "jetmoe", "zaya"] if EVERY else []),
]
#: With windows in all layers; in some.
WINDOWS = ["mistral-window", *(["gemma-3", "qwen2-window"] if EVERY else [])]
#: With one launch for a step's pieces, and with captured ones.
MIXED = [0, 24] if EVERY else [24]
#: With several page groups of one window; with a window, a soft cap and a scale; with a window in every layer.
ON_A_GPU = ["gemma-3", "gemma-2-untied", "mistral-window"]


def open_interpreted(settings):
    if settings.tensor_parallel_size > 1:
        return CudaRanksExecutor(settings, DEVICES)
    return CudaExecutor(settings, LateDevice())


@pytest.fixture(autouse=True)
def elementwise_kernels(monkeypatch):
    """Norms, rotary embeddings and activations by a GPU's kernels, too."""
    monkeypatch.setattr(elementwise, "_uses_kernels", lambda _: True)


@pytest.fixture
def drive():
    yield from drivers(
        open_interpreted, dtype="float32", device="cuda", max_num_seqs=4, max_num_batched_tokens=24, block_tokens=8,
        memory_bytes=8 << 20, max_lora_rank=32, threads=1, mixed_graph_tokens=0, max_model_len=128,
        graph_capture="lazy",
    )  # fmt: skip


def check(it, driver, *requests):
    """Requests of (adapter, prompt length, tokens) get the answers that transformers and peft give."""
    want = {}
    for index, (adapter, length, count) in enumerate(requests):
        prompt, want[f"{index}"] = it.case(adapter, length, seed=index, count=count)
        driver.add(f"{index}", adapter, prompt, max_tokens=count)
    answers = driver.drain()
    assert {name: answers[name].tokens for name in want} == want


def test_a_dense_family(tiny, drive):
    """Wide norms after parts, and norms of all heads at once."""
    it = tiny("olmo-2")
    check(it, drive(it, ["r3-all"]), (None, 9, 3), ("r3-all", 5, 3))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families(tiny, drive, family):
    it = tiny(family)
    check(it, drive(it, ["r3-all"]), (None, 30, 3), ("r3-all", 9, 5))


@pytest.mark.slow
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("mixed_graph_tokens", [0, 24])
def test_mixtures(tiny, drive, family, mixed_graph_tokens):
    """Experts by tiles whose tables steps make themselves: in captured steps, in pieces and in ragged ones."""
    it = tiny(family)
    driver = drive(it, ["r3-all"], mixed_graph_tokens=mixed_graph_tokens)
    check(it, driver, (None, 30, 4), ("r3-all", 9, 6), ("r3-all", 17, 5), (None, 5, 4))
    layers = driver.engine.executor.inner.steps.decoder.layers
    assert all(isinstance(layer["experts"], StackedExperts) for layer in layers if "experts" in layer)
    assert driver.engine.executor.inner.captured


@pytest.mark.slow
def test_a_mixtures_merged_steps(tiny, drive):
    it = tiny("qwen3-moe-mixed")
    driver = drive(it, ["r3-all", "r8-qv"])
    merge(driver, "r3-all")
    check(it, driver, (None, 20, 4), ("r3-all", 9, 6), ("r8-qv", 12, 4))
    assert StepMode.MERGED in {plan.mode for plan in driver.plans}


@pytest.mark.slow
@pytest.mark.parametrize("family", WINDOWS)
def test_windows(tiny, drive, family):
    """Beyond the window, so that pages leave."""
    it = tiny(family)
    driver = drive(it, ["r3-all"])
    assert driver.engine.executor.layout.has_windows
    check(it, driver, (None, 60, 4), ("r3-all", 40, 4))


@pytest.fixture
def flashinfer(monkeypatch):
    """Attention by FlashInfer's wrappers, as on a GPU; the stand-in for its package."""
    monkeypatch.setattr(attention_flashinfer, "FLOAT_WORKSPACE_BYTES", 1)
    fake = FakeFlashInfer(Stream())

    def choose(setup, wanted):
        return FlashInferBackend(setup, num_sms=2, module=fake, new_event=fake.stream.new_event)

    monkeypatch.setattr(cuda, "choose_attention", choose)
    return fake


@pytest.fixture
def triton(monkeypatch):
    """Attention by our kernel, as on a GPU without FlashInfer."""

    def choose(setup, wanted):
        return TritonBackend(setup, num_sms=8, reason="", new_event=Stream().new_event)

    monkeypatch.setattr(cuda, "choose_attention", choose)


@pytest.mark.slow
@pytest.mark.parametrize("family", ON_A_GPU)
def test_windows_and_soft_caps_by_flashinfer(tiny, drive, flashinfer, family):
    it = tiny(family)
    check(it, drive(it, ["r3-all"]), (None, 60, 4), ("r3-all", 30, 6))
    assert flashinfer.fast_plans, "no bucket was planned twice"


@pytest.mark.slow
@pytest.mark.parametrize("family", [*ON_A_GPU, "gpt-oss"])
def test_windows_soft_caps_and_sinks_by_our_kernel(tiny, drive, triton, family):
    it = tiny(family)
    driver = drive(it, ["r3-all"])
    check(it, driver, (None, 50, 3), ("r3-all", 22, 4))
    assert driver.executor.inner.captured


@pytest.mark.slow
@pytest.mark.parametrize("mixed_graph_tokens", MIXED)
def test_attention_of_several_shapes(tiny, drive, triton, mixed_graph_tokens):
    """In captured steps, and in pieces, which hand queries of either shape to attention."""
    it = tiny("gemma-4")
    driver = drive(it, ["r3-all"], mixed_graph_tokens=mixed_graph_tokens)
    assert len({heads.head_dim for heads in driver.executor.inner.steps.decoder.heads}) == 2
    check(it, driver, (None, 24, 2), ("r3-all", 5, 3))
    assert driver.executor.inner.captured


@pytest.mark.slow
@pytest.mark.parametrize("mixed_graph_tokens", [0, 24])
@pytest.mark.parametrize("family", ["deepseek-v3", "longcat-flash"])
def test_latents(tiny, drive, triton, family, mixed_graph_tokens):
    """Decode steps are captured, also those whose adapters change keys and values of latents; in pieces, layers leave
    mixtures to the next ones.
    """
    it = tiny(family)
    driver = drive(it, ["r3-all", "r17-o-mlp", "r8-qv"], mixed_graph_tokens=mixed_graph_tokens)
    check(it, driver, (None, 30, 4), ("r17-o-mlp", 9, 6), ("r3-all", 17, 5), ("r8-qv", 7, 3), (None, 5, 4))
    executor = driver.engine.executor.inner
    assert StepMode.LORA in {captured.form.mode for captured in executor.captured}
    assert not executor.eager_steps[EagerReason.LATENTS]


@pytest.mark.slow
def test_latents_in_merged_steps(tiny, drive, triton):
    it = tiny("deepseek-v3")
    driver = drive(it, ["r3-all", "r8-qv"])
    merge(driver, "r3-all")
    check(it, driver, (None, 9, 4), ("r3-all", 9, 6), ("r8-qv", 12, 4))
    assert StepMode.MIXTURE in {captured.form.mode for captured in driver.engine.executor.inner.captured}
    assert not driver.engine.executor.inner.eager_steps[EagerReason.LATENTS]


@pytest.mark.slow
def test_latents_that_adapters_scale(drive, triton):
    """By PyTorch's operators, in eager steps."""
    it = make_tiny("deepseek-v3", use_dora=True)
    driver = drive(it, ["r3-all"])
    check(it, driver, (None, 9, 4), ("r3-all", 9, 6))
    assert driver.engine.executor.inner.eager_steps[EagerReason.LATENTS] > 3


@pytest.mark.slow
@pytest.mark.parametrize("mixed_graph_tokens", MIXED)
def test_inputs_of_layers(drive, triton, mixed_graph_tokens):
    """Beside layers that share keys; the adapter changes them before captured steps, and in these."""
    it = make_all_linear("gemma-4-inputs")
    driver = drive(it, ["all"], mixed_graph_tokens=mixed_graph_tokens)
    check(it, driver, (None, 24, 2), ("all", 5, 3))
    assert driver.executor.inner.captured


@pytest.mark.slow
@pytest.mark.parametrize("mixed_graph_tokens", MIXED)
def test_several_streams(drive, triton, mixed_graph_tokens):
    """In captured steps, and in pieces, which hand them on; the adapter changes what is beside attention, too."""
    it = make_all_linear("gemma-3n", exclude_modules=r".*altup.*")
    driver = drive(it, ["all"], mixed_graph_tokens=mixed_graph_tokens)
    check(it, driver, (None, 24, 2), ("all", 5, 3))
    assert driver.executor.inner.captured


@pytest.mark.slow
@pytest.mark.parametrize("mixed_graph_tokens", MIXED)
def test_adapters_that_begin_within_a_prompt(tmp_path, drive, mixed_graph_tokens):
    it = save_zoo(tmp_path)
    driver = drive(it, ["plain", "alora", "alora-qkv"], mixed_graph_tokens=mixed_graph_tokens)
    check(it, driver, ("alora", 30, 4), ("alora-qkv", 12, 4), ("plain", 9, 3), (None, 10, 3), ("alora", 9, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "obstacle", "limit"),
    [("auto", None, 256), ("auto", Obstacle("it is not installed"), 24), ("triton", None, 24)],
)
def test_requests_leave_the_window_by_default_where_flashinfer_serves(
    tiny, drive, flashinfer, monkeypatch, attention, obstacle, limit
):
    monkeypatch.setattr(cuda, "flashinfer_obstacle", lambda *_, **how: obstacle)
    driver = drive(tiny("mistral-window"), attention=attention, max_model_len=None)
    model = driver.engine.executor.model
    assert (model.max_model_len, model.window) == (limit, 24 if limit == 24 else None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3.5", "lfm2", "granite-4-h", "nemotron-3", "lfm3", "olmo-hybrid", "falcon-h1", "falcon-mamba", "jamba"),
        "zamba-2",
    ],
)
@pytest.mark.parametrize("mixed_graph_tokens", MIXED)
def test_recurrent_states(tiny, drive, family, mixed_graph_tokens):
    it = tiny(family)
    driver = drive(it, ["r3-all"], mixed_graph_tokens=mixed_graph_tokens, max_num_seqs=2)
    check(it, driver, (None, 30, 4), (None, 7, 9), ("r3-all", 7, 5))
    assert driver.engine.stats().num_async_steps
    assert driver.executor.inner.captured


@pytest.mark.slow
@pytest.mark.parametrize("mixed_graph_tokens", MIXED)
def test_states_whose_channels_decay_beside_latents(tiny, drive, triton, mixed_graph_tokens):
    """PyTorch's operators step the states within captured steps, whose adapters are on latents of gates, too."""
    it = tiny("kimi-linear")
    driver = drive(it, ["r3-all"], mixed_graph_tokens=mixed_graph_tokens, max_num_seqs=2)
    check(it, driver, (None, 30, 4), (None, 7, 6), ("r3-all", 7, 5))
    assert driver.engine.stats().num_async_steps
    assert StepMode.LORA in {captured.form.mode for captured in driver.executor.inner.captured}


on_ranks = pytest.mark.skipif(not native_library.available(torch.float32), reason="ranks meet by the native library")


@pytest.mark.slow
@on_ranks
def test_ranks_norm_all_heads_at_once(tiny, drive):
    """Of four ranks, each has one head of queries, and two have the same head of keys."""
    it = tiny("olmo-2")
    driver = drive(it, tensor_parallel_size=4, max_num_seqs=1)
    check(it, driver, (None, 9, 3))
    assert driver.executor.inner.first.captured


@pytest.mark.slow
@on_ranks
@pytest.mark.parametrize("family", ["qwen3.5-tied", "granite-4-h", "falcon-h1-normed", "jamba", "zamba-2"])
def test_ranks_share_recurrent_states(tiny, drive, family):
    """Captured steps ahead of tokens, with an adapter on layers of both kinds; ranks share a group of heads."""
    it = tiny(family)
    driver = drive(it, ["r3-all"], tensor_parallel_size=2, max_num_seqs=2, block_tokens=16)
    assert driver.engine.executor.layout.state_slots == driver.executor.inner.first.layout.state_slots == 3
    check(it, driver, (None, 3, 3), ("r3-all", 5, 4))
    assert driver.engine.stats().num_async_steps
    assert driver.executor.inner.first.captured


@pytest.mark.slow
@on_ranks
def test_ranks_serve_a_window_by_default(tiny, drive):
    """As one GPU does: the first rank's limits are those of all ranks."""
    it = tiny("mistral-window")
    driver = drive(it, tensor_parallel_size=2, max_model_len=None, graph_capture="off")
    assert driver.engine.executor.model.max_model_len == driver.executor.inner.first.model.max_model_len == 24
