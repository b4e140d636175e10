"""An adapter that found no pinned memory: it moves there once there is room, and its tokens stay the reference's."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors.adapters import check_tables
from chorus.core.executors.choice import open_executor
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.host.images import ThreadReads
from chorus.memory.transfers.dma import Dma
from chorus.memory.transfers.pinned import PinnedBuffers
from chorus.perf.inline_reads import InlineReads

from ...memory.transfers.test_pinned import PlainMemory

ROOM = 4 << 20
NAME, COUNT = "r64-qkv-up", 6


class Tried:
    """An engine on a CPU that reads images into memory that stands for pinned memory."""

    def __init__(self, subject, reads) -> None:
        config = EngineConfig(model=subject.model, dtype="float32", memory_bytes=8 << 20, threads=1, device="cpu")
        executor = open_executor(config)
        self.memory = PlainMemory()
        self.buffers = PinnedBuffers(self.memory, ROOM, ROOM)
        executor.adapters.dma = Dma(executor.adapters.dma.copies, self.buffers)
        self.engine = Engine(config, executor, reads=reads)
        self.store = self.engine.store
        self.adapter = self.store.register(NAME, subject.adapters[NAME])
        self.prompt = subject.prompt(NAME, 9, COUNT, seed=4)

    def answer(self) -> list[int]:
        """The tokens of a request, for which the adapter is loaded anew."""
        if self.adapter.pages:
            self.store.evict(self.adapter)
        params = RequestParams(temperature=0.0, ignore_eos=True, max_tokens=COUNT)
        self.engine.add_request(Request("one", self.prompt, params, NAME))
        tokens = []
        while self.engine.has_work():
            tokens += [token for output in self.engine.step() for token in output.token_ids]
        return tokens

    @property
    def image(self) -> torch.Tensor:
        return self.store.images.peek(self.adapter).data


@pytest.mark.parametrize("reads", [InlineReads, ThreadReads], ids=["inline", "threads"])
def test_an_adapter_in_ordinary_memory_moves_to_pinned_memory_when_it_is_loaded_again(subject, reads):
    tried = Tried(subject("gqa"), reads())
    want = subject("gqa").greedy(NAME, tried.prompt, COUNT)
    others = tried.buffers.take((ROOM,), torch.uint8)
    assert tried.answer() == want
    assert not tried.memory.holds(tried.image), "others take all pinned memory"
    assert tried.answer() == want
    assert not tried.memory.holds(tried.image)
    del others
    assert tried.answer() == want
    deadline = time.monotonic() + 30
    while not tried.memory.holds(tried.image):
        assert time.monotonic() < deadline, "it stays in ordinary memory"
        time.sleep(0.01)
    assert tried.answer() == want


@pytest.mark.parametrize(
    ("rank", "is_larger", "advice"),
    [
        (17, False, "above max_lora_rank 16; raise max_lora_rank$"),
        (256, True, "above max_lora_rank 16; raise max_lora_rank$"),
        (
            257,
            False,
            "above max_lora_rank 16; a GPU serves ranks up to 256: set device to 'cpu', or use a smaller rank$",
        ),
        (257, True, "set device to 'cpu', or convert it with PEFT: peft.save_as_lora"),
    ],
)
def test_the_advice_for_a_large_rank_on_a_gpu_is_one_that_helps(rank, is_larger, advice):
    manifest = SimpleNamespace(rank=rank, num_tokens=0, parts=(), is_larger=is_larger)
    with pytest.raises(AdapterFormatError, match=f"has rank {rank}, .*{advice}"):
        check_tables(manifest, Path("a"), 16)
