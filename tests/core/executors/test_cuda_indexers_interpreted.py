"""Families with indexers on the CUDA executor, on a CPU: attention is chosen as on a GPU without FlashInfer, and the
backend names the reason why steps are not captured there.

Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from chorus.core.executors import cuda
from chorus.core.executors.cuda import CudaExecutor
from chorus.graphs.runner import StepMode
from chorus.ops.attention import attention_backend, attention_triton
from chorus.ops.attention.attention_backend import choose_attention
from chorus.ops.elementwise import elementwise

from ...graphs.late_device import LateDevice
from ...ops.attention.fake_flashinfer import Stream
from .family_drivers import drivers
from .test_cuda_families_interpreted import check

GPU = torch.device("cuda", 0)

#: Families whose layers attend to the tokens that an indexer chooses.
INDEXED = ["deepseek-v3.2", "glm-5", "ax-k2"]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """The choice of attention that a GPU without FlashInfer makes, and a GPU's kernels of norms and activations."""
    for name in ("flashinfer_obstacle", "triton_obstacle"):
        plain = getattr(attention_backend, name)
        monkeypatch.setattr(
            attention_backend, name, lambda *it, plain=plain, **how: plain(*it[:3], GPU, *it[4:], **how)
        )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(attention_backend, "_num_sms", lambda _: 8)
    ours = partial(attention_triton.TritonBackend, new_event=Stream().new_event)
    monkeypatch.setattr(attention_triton, "TritonBackend", ours)
    monkeypatch.setattr(elementwise, "_uses_kernels", lambda _: True)


@pytest.fixture
def chosen(monkeypatch):
    """The backends of attention that were chosen."""
    found = []

    def choose(setup, wanted):
        found.append(choose_attention(setup, wanted))
        return found[-1]

    monkeypatch.setattr(cuda, "choose_attention", choose)
    return found


@pytest.fixture
def drive():
    yield from drivers(
        lambda settings: CudaExecutor(settings, LateDevice()), dtype="float32", device="cuda", max_num_seqs=2,
        max_num_batched_tokens=24, block_tokens=8, memory_bytes=8 << 20, max_lora_rank=32, threads=1,
        mixed_graph_tokens=24, max_model_len=128, graph_capture="lazy",
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", INDEXED)
def test_attention_by_an_indexer_is_answered_and_its_obstacle_named(tiny, drive, chosen, family):
    """On a GPU these steps are not captured; mocked captures are closures, with any attention."""
    it = tiny(family)
    driver = drive(it, ["r3-all"])
    check(it, driver, (None, 30, 4), ("r3-all", 9, 5), (None, 5, 4))
    assert StepMode.LORA in {each.form.mode for each in driver.engine.executor.inner.captured}
    assert not all(each.captures for each in chosen)
    assert any("tokens that an indexer chooses" in each.reason for each in chosen)
