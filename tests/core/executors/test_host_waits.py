"""Steps on a device that can't be read: whatever would make the host wait for it fails, and copies are counted."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from chorus.core.executors import adapters
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.ops.attention import attention
from chorus.ops.attention.attention import HeadShape, PagedAttention
from chorus.ops.attention.attention_plan import PlanBuffers
from chorus.ops.sampling import sampling
from chorus.perf.bench.idle_engine import StubDevice, idle_engine

pytestmark = pytest.mark.wide

ROWS, PROMPT = 3, 20

PARAMS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.7},
    "cut": {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "edited": {"temperature": 0.0, "presence_penalty": 0.5, "logit_bias": {3: 1.0}, "bad_words": ((5,),)},
    "allowed": {"temperature": 0.7, "allowed_token_ids": (1, 2, 3)},
    "scored": {"temperature": 0.0, "logprobs": 2},
}


class Unreadable(StubDevice):
    """Its tensors have no values (torch's `meta` device), so `item`, `tolist`, masks and the like raise."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_device = torch.device("meta")
        self.num_copies = self.num_waits = 0

    def pinned(self, num_bytes):
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def event(self):
        return _Event(self)

    def copy(self, target, source):
        assert target.device.type != source.device.type
        self.num_copies += 1
        if target.device.type == "cpu":  # every value 1: that token, which can be told
            target.fill_(1)


class _Event:
    """Waits count where a copy has been begun since the last one."""

    def __init__(self, device: Unreadable) -> None:
        self._device, self._recorded = device, False

    def record(self) -> None:
        self._recorded = True

    def synchronize(self) -> None:
        self._device.num_waits += self._recorded
        self._recorded = False


class Copies(TorchDispatchMode):
    """Copies from the host that torch makes itself: of `pinned` memory, and of any other."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: set[int] = set()
        self.num_pinned = 0
        self.pageable: list[str] = []

    def pin(self, values: torch.Tensor) -> torch.Tensor:
        self.pinned.add(values.untyped_storage().data_ptr())
        return values

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [it for it in tree_leaves((args, kwargs, result)) if isinstance(it, torch.Tensor)]
        here = [it for it in tensors if it.device.type == "cpu" and it.dim()]  # a number goes along with the launch
        if here and any(it.device.type == "meta" for it in tensors):
            if all(it.untyped_storage().data_ptr() in self.pinned for it in here) and any(
                it is True for it in tree_leaves((args, kwargs))
            ):
                self.num_pinned += 1
            else:
                self.pageable.append(f"{func} of {[tuple(it.shape) for it in here]}")
        return result


@pytest.fixture
def unread_arena(monkeypatch):
    """Adapters are copied into pages of the host's."""
    inner = adapters.open_dma
    monkeypatch.setattr(
        adapters,
        "open_dma",
        lambda pages, *args, **kwargs: inner(torch.zeros(pages.shape, dtype=pages.dtype), *args, **kwargs),
    )


def _draw(tokens: torch.Tensor, logits: torch.Tensor, draws: torch.Tensor, num_limited: int) -> None:
    """Launches that draw, which compute nothing here."""
    assert tokens.device == logits.device == draws.device


def _ban(logits: torch.Tensor, masks: torch.Tensor) -> None:
    """The same of a launch that bans."""
    assert logits.device == masks.device


@pytest.mark.usefixtures("unread_arena")
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", PARAMS)
def test_a_decode_step_waits_for_its_tokens_alone(kind, lora, ahead, tmp_path):
    device, copies = Unreadable(), Copies()

    def plan_buffers(buffers: PlanBuffers, *args: Any) -> None:
        make(buffers, *args)
        copies.pin(buffers.on_host)

    make = PlanBuffers.__init__
    with (
        patch.object(torch.Tensor, "pin_memory", lambda values: copies.pin(values)),
        patch.object(PlanBuffers, "__init__", plan_buffers),
        patch.object(sampling, "_launch", _draw),
        patch.object(sampling, "_launch_ban", _ban),
        idle_engine(ROWS, 64, lora, tmp_path, device, async_scheduling=ahead) as engine,
    ):
        names = sorted(engine.store.names()) if lora else [None] * ROWS
        for index, name in enumerate(names):
            params = RequestParams(max_tokens=20, ignore_eos=True, **(PARAMS[kind] if index else PARAMS["greedy"]))
            engine.add_request(Request(f"r{index}", [1] * PROMPT, params, name))
        for _ in range(4):
            engine.step()
        assert len(engine.scheduler.running) == ROWS
        waits = device.num_waits
        with copies:
            for _ in range(5):
                engine.step()
        assert copies.pageable == []
        assert copies.num_pinned >= 5 * (1 if kind == "greedy" else 2)  # the plan's and the sampling parameters
        assert device.num_waits - waits == 5 * 3  # pinned memory of two steps ago, and of the last plan; the tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_torchs_attention_waits_for_nothing(dtype):
    """A whole prompt, a later chunk and decode rows, with room in the page table that no row needs."""
    copies = Copies()

    def bias(*size: int) -> torch.Tensor:
        from torch.nn.attention.bias import causal_lower_right  # imports the compiler

        with _disable_current_modes():  # none of which torch lets it be made in
            return causal_lower_right(*size)

    arena = torch.zeros(9, 3, 2, 4, 2, 8, dtype=dtype, device="meta")
    with (
        patch.object(torch.Tensor, "pin_memory", lambda values: copies.pin(values)),
        patch.object(attention, "_bias", lambda: bias),
        copies,
    ):
        planned = PagedAttention(HeadShape(4, 2, 8, 4), "meta")
        planned.plan([0, 5, 8, 9, 10], torch.zeros(4, 9, dtype=torch.long), [5, 12, 7, 1])
        attended = planned.run(torch.zeros(10, 4, 8, dtype=dtype, device="meta"), arena[:, 1, 0], arena[:, 1, 1])
    assert attended.shape == (10, 32)
    assert copies.pageable == []
    assert copies.num_pinned == 4, "pages of prompts; pages, mask and tail of decode rows"
