"""States in pages: what a GPU's launch reads and writes there is what PyTorch's operators gather and scatter.

Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from chorus.core.model.paged_states import PagedStates
from chorus.core.model.paged_states_cuda import CudaPagedStates
from chorus.core.model.specs.config import ModelConfig
from chorus.core.model.specs.recurrent import GatedDeltaSpec
from chorus.core.requests.request_params import RequestParams
from chorus.core.requests.types import ScheduledSequence
from chorus.memory.pages.arena import Arena
from chorus.memory.pages.states import StateLayout, StateShape, StateSlots

from ...ops.mixers.delta_layers import DeltaLayer

EPS, LAYERS, MOST = 1e-6, 2, 3
#: heads of keys and of values, their widths, and what the convolution sees
SHAPES = [(1, 2, 16, 16, 4), (2, 2, 24, 40, 3)]
TOLERANCE = {"rtol": 5e-4, "atol": 5e-5}


class Paged:
    """Layers with states, in pages that hold parts of several, and the same pages twice."""

    def __init__(self, shape, most_drafts: int) -> None:
        k_heads, v_heads, k_dim, v_dim, conv = shape
        self.spec = spec = GatedDeltaSpec(k_heads, v_heads, k_dim, v_dim, EPS, conv)
        self.layers = [DeltaLayer(*shape) for _ in range(LAYERS)]
        state = StateShape(
            LAYERS,
            (conv - 1) * spec.channels,
            v_heads,
            k_dim * v_dim,
            spec.draft_size if most_drafts else 0,
            most_drafts,
        )
        page = 4 * -(-2 * max(state.conv_elems, state.head_elems, state.draft_elems) // 4 + 1)
        self.layout = layout = StateLayout(state, 4 * page)
        config: Any = SimpleNamespace(recurrent=spec, lookup=None, layers=[SimpleNamespace(recurrent=spec)] * LAYERS)
        self.config = cast(ModelConfig, config)
        pages = 1 + 2 * 8 * layout.num_pages
        whole = SimpleNamespace(states=layout)
        self.pages = [torch.full((pages, page), torch.nan) for _ in range(2)]
        arenas: list[Any] = [SimpleNamespace(pages=each, layout=whole) for each in self.pages]
        self.by_torch = PagedStates(self.config, cast(Arena, arenas[0]))
        self.by_kernel = CudaPagedStates(self.config, cast(Arena, arenas[1]), 12)
        self._free = list(range(1, pages))

    def sequence(self) -> ScheduledSequence:
        size = self.layout.num_pages
        slots = [[self._free.pop() for _ in range(size)] for _ in range(2)]
        return ScheduledSequence("", -1, [], 0, [], RequestParams(), 0, True, [], 0, states=StateSlots(slots))

    def step(self, sequences, known, drafts, dtype, spare=0, empty=0):
        """A step of all layers, with padding of two tokens and `empty` entries without any; both ways must agree."""
        for each, count, drafted in zip(sequences, known, drafts, strict=True):
            each.tokens, each.drafts = [0] * (count + drafted), drafted
            each.state_step = each.states.steps
        ends = list(accumulate(len(each.tokens) for each in sequences))
        indptr = [0, *ends, ends[-1] + 1, ends[-1] + 2]
        self.by_torch.set_step(sequences, indptr)
        self.by_kernel.set_step(sequences, indptr + [indptr[-1]] * empty)
        for index, layer in enumerate(self.layers):
            mixed = layer.normal(indptr[-1], layer.width + spare).to(dtype)[:, : layer.width]
            want = self.by_torch.mix(index, mixed, layer.weights)
            got = self.by_kernel.mix(index, mixed, layer.weights)
            assert got.dtype == dtype
            rounding = {"rtol": 2e-2, "atol": 1e-4} if dtype == torch.bfloat16 else TOLERANCE
            torch.testing.assert_close(got, want, **rounding)
        for each, count in zip(sequences, known, strict=True):
            written = each.states.written_by(each.state_step)
            one, other = (self.kept(pages[written], each.drafts) for pages in self.pages)
            torch.testing.assert_close(other, one, equal_nan=True, **TOLERANCE)
            each.states.advance()
            each.start += count

    def kept(self, pages: torch.Tensor, drafts: int) -> torch.Tensor:
        """What a slot has: the state, and the inputs of so many drafts."""
        width, places = self.spec.draft_size, [self.layout.draft(*at) for at in product(range(LAYERS), range(drafts))]
        rows = [pages[page, at : at + width] for page, at in places]
        return torch.cat((pages[: self.layout.first_draft_page].flatten(), *rows))


@pytest.mark.parametrize(
    ("shape", "dtype", "spare"), [(SHAPES[0], torch.bfloat16, 3), (SHAPES[1], torch.float32, 0)], ids=str
)
def test_a_decode_step_is_torchs(shape, dtype, spare):
    """Without speculation: sequences that begin, and that go on."""
    it = Paged(shape, 0)
    sequences = [it.sequence() for _ in range(3)]
    for _ in range(3):
        it.step(sequences, [1] * 3, [0] * 3, dtype, spare)
        sequences[0] = it.sequence()


@pytest.mark.parametrize(("shape", "dtype"), [(SHAPES[0], torch.float32), (SHAPES[1], torch.bfloat16)], ids=str)
def test_drafts_are_torchs(shape, dtype):
    """Accepted as a whole, in part and not at all, next to parts of prompts; only what a state keeps is written."""
    it, rng = Paged(shape, MOST), random.Random(3)
    sequences = [it.sequence() for _ in range(3)]
    it.step(sequences, [5, 2, 1], [0] * 3, dtype)
    for step in range(3):
        drafts = [rng.randint(0, MOST) for _ in sequences] if step else [MOST, 0, 1]
        known = [1] * 3 if step % 2 else [3, 1, 1]
        if known[0] > 1:
            drafts[0] = 0
        order = sorted(range(3), key=lambda at: known[at] + drafts[at] == 1)
        it.step(*([each[at] for at in order] for each in (sequences, known, drafts)), dtype, empty=step)
        for each, count in zip(sequences, drafts, strict=True):
            each.states.accepted = rng.choice([0, count, rng.randint(0, count)])
            each.start += each.states.accepted


def test_more_drafts_than_states_keep_are_an_error():
    it = Paged(SHAPES[0], MOST)
    sequence = replace(it.sequence(), tokens=[0] * (MOST + 2), drafts=MOST + 1)
    with pytest.raises(RuntimeError, match="a sequence has 4 drafts, and states keep the inputs of 3"):
        it.by_kernel.set_step([sequence], [0, MOST + 2])
    with pytest.raises(RuntimeError, match="no pages for its states"):
        it.by_kernel.set_step([replace(sequence, drafts=0, states=None)], [0, MOST + 2])
