"""Logits of the native decoder with adapters on the output projection, at every ISA level: near float64 arithmetic, and
a row's bits are the same alone and in batches, whichever panels of the vocabulary are computed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import pytest
import torch

from chorus.core.model.lora.lora_state import rows_in
from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart
from chorus.memory.pages.layer_projections import model_projections
from chorus.memory.pages.projections import Projections, Role
from chorus.ops.cpu import native
from chorus.ops.library import native_library, native_model
from chorus.ops.lora.sgmv import AdapterRows, Segments
from chorus.ops.sampling.sampling import RowSamplingParams, TorchSampling

from .native_layers import LAYERS, Kind, Model

pytestmark = [pytest.mark.native, pytest.mark.wide]

BOUND = {torch.float32: 2e-6, torch.bfloat16: 0.03}
"""Largest error of a logit, in standard deviations of all."""

VOCAB = (33, 97, 1031, 9001)
"""One panel of the head and a part; a few, which threads share; many; more than are computed together."""

RANKS = (5, 17, 16, 1)
TOKENS = (0, 31, 32, 20, 1030, 9000)
"""That an adapter has rows of its own for, if the vocabulary has them."""

BEYOND = ((0, 1, 3), (*range(2, 40), *range(41, 70)))
"""Tokens beyond the vocabulary that two adapters have rows for, some between them without: of less than a panel, and of
three.
"""


class Own(NamedTuple):
    """What an adapter changes: LoRA on the head, or whole rows of it."""

    rows: AdapterRows
    a: torch.Tensor
    """`[rank, hidden]`; whole rows of the head."""
    b: torch.Tensor | None
    """`[rank, vocab]`, with the scale."""

    def change(self, states: torch.Tensor, logits: torch.Tensor) -> None:
        """Change the logits `[rows, columns]` of states `[rows, hidden]`, all in float64."""
        if self.b is None:
            logits[:, list(self.rows.token_ids)] = states @ self.a.T
        else:
            logits[:, : self.b.shape[1]] += states @ self.a.T @ self.b


@dataclass
class Headed:
    """A small model with a vocabulary of any size and adapters on its head, each in one of `adapters`."""

    vocab: int
    dtype: torch.dtype
    rows: int
    softcap: float = 0.0

    def __post_init__(self) -> None:
        kind = Kind(logits_softcap=self.softcap, logits_scale=0.7 if self.softcap else 1.0)
        self._model = model = Model(kind, self.dtype, pages=1200)
        self.generator = torch.Generator().manual_seed(self.vocab)
        self.head = self._random(self.vocab, kind.hidden, scale=kind.hidden**-0.5)
        self._table = Projections(model.table.layers, model_projections(self.vocab, kind.hidden, self.vocab))
        self._pages = model.take(16 * self.rows)
        self._ids = torch.randint(0, self.vocab, (self.rows,), generator=self.generator)
        wanted = [token for token in sorted(TOKENS) if token < self.vocab]
        self.adapters = [*(self._lora(rank) for rank in RANKS), self._whole(wanted)]
        self.adapters += [self._whole([*wanted[:2], *(self.vocab + token for token in each)]) for each in BEYOND]

    def native(self) -> native_model.NativeModel:
        hidden, modules = self._model.kind.hidden, self._table
        return replace(
            self._model.native(1),
            vocab=self.vocab,
            embed=self._random(self.vocab, hidden, scale=1.0),
            lm_head=native_model.pack(self.head),
            embed_module=modules.of_role(Role.EMBEDDING),
            head_module=modules.of_role(Role.HEAD),
            embed_rows_module=modules.of_role(Role.EMBEDDING_ROWS),
            head_rows_module=modules.of_role(Role.HEAD_ROWS),
        )

    def step(
        self, decoder: native.NativeDecoder, rows: Sequence[tuple[int, Sequence[int]]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and normalised states, of single tokens: each a number of one, and its adapters."""
        count = len(rows)
        pages = torch.tensor([self._pages[index] for index, _ in rows])
        attention = native.NativeRows()
        attention.plan(range(count + 1), pages[:, None], [1] * count)
        zeros, every = torch.zeros(count, dtype=torch.long), torch.arange(count)
        segments = Segments()
        for begin, end, adapters in runs([adapters for _, adapters in rows]):
            for adapter in adapters:
                segments.add(begin, end, self.adapters[adapter].rows)
        ids = self._ids[[index for index, _ in rows]]
        logits = decoder.forward(
            ids, zeros, pages, zeros, attention, every, Segments(), kept_tokens=every, model_segments=segments
        ).clone()
        return logits, decoder.hidden_states(0, count)

    def want(self, states: torch.Tensor, rows: Sequence[tuple[int, Sequence[int]]]) -> torch.Tensor:
        """Logits in float64, -inf for tokens that a row does not have."""
        states = states.double()
        width = max(self.width(adapters) for _, adapters in rows)
        logits = torch.full((len(rows), width), -torch.inf, dtype=torch.float64)
        logits[:, : self.vocab] = states @ self.head.double().T
        for row, (_, adapters) in enumerate(rows):
            for own in sorted((self.adapters[each] for each in adapters), key=lambda own: own.b is not None):
                own.change(states[row : row + 1], logits[row : row + 1])
        if not self.softcap:
            return logits
        return torch.where(logits.isneginf(), logits, self.softcap * torch.tanh(0.7 * logits / self.softcap))

    def width(self, adapters: Sequence[int]) -> int:
        """Columns of a row with these adapters."""
        tokens = chain.from_iterable(self.adapters[each].rows.token_ids for each in adapters)
        return max([self.vocab, *(token + 1 for token in tokens)])

    def _lora(self, rank: int) -> Own:
        hidden, scale = self._model.kind.hidden, 0.5
        a, b = self._random(rank, hidden, scale=hidden**-0.5), self._random(rank, self.vocab, scale=1.0)
        rows = self._place(AdapterPart(rank, scale, (LAYERS - 1,), ("lm_head",)), a, b)
        return Own(rows, a.double(), scale * b.double())

    def _whole(self, tokens: Sequence[int]) -> Own:
        a = self._random(len(tokens), self._model.kind.hidden, scale=1.0)
        part = AdapterPart(len(tokens), 1.0, (LAYERS - 1,), ("lm_head_rows",), token_ids=tuple(tokens))
        return Own(self._place(part, a, torch.empty(len(tokens), 0)), a.double(), None)

    def _place(self, part: AdapterPart, a: torch.Tensor, b: torch.Tensor) -> AdapterRows:
        """Write an adapter of one part to pages that do not follow each other."""
        placed = AdapterLayout.build((part,), self._table, self._model.layout.page_elems, self.dtype.itemsize)
        pages = self._model.take(16 * placed.num_pages)
        run = torch.full((len(pages) * self._model.layout.page_elems,), torch.nan, dtype=self.dtype)
        found = rows_in(part, placed.parts[0], pages)
        module = self._table.id(part.targets[0])
        for r in range(part.rank):
            row = found.first_elem[LAYERS - 1] + r * found.slab_elems
            run[row + found.a_offset[module] :][: a.shape[1]] = a[r]
            run[row + found.b_offset[module] :][: b.shape[1]] = b[r]
        self._model.arena[pages] = run.view(len(pages), -1)
        return found

    def _random(self, *shape: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=self.generator)).to(self.dtype)


def runs(adapters: Sequence[Sequence[int]]) -> list[tuple[int, int, Sequence[int]]]:
    """Neighbours with the same adapters: first, end, and these."""
    begins = [at for at in range(len(adapters)) if not at or adapters[at] != adapters[at - 1]]
    return [(begin, end, adapters[begin]) for begin, end in zip(begins, [*begins[1:], len(adapters)], strict=True)]


def mixed(count: int) -> list[tuple[int, tuple[int, ...]]]:
    """Rows of the base model, of each adapter and of two at once, in runs of one to seven rows."""
    return in_runs(count, [(), (0,), (1,), (), (2,), (0, 3), (4,), (1, 4), (3,)])


def beyond(count: int) -> list[tuple[int, tuple[int, ...]]]:
    """Rows of adapters with tokens beyond the vocabulary, and of others."""
    return in_runs(count, [(5,), (), (6,), (1, 5), (4,), (6,), (0,)])


def in_runs(count: int, kinds: Sequence[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """Rows of each kind, in runs of one to seven rows."""
    lengths = (1, 2, 7, 1, 3, 1, 2, 5)
    every = chain.from_iterable([kinds[i % len(kinds)]] * lengths[i % len(lengths)] for i in range(count))
    return list(zip(range(count), every, strict=False))


@pytest.fixture(params=native_library.levels())
def level(request, monkeypatch) -> str:
    monkeypatch.setenv(native_library.ISA, request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 3.0], ids=["", "capped"])
@pytest.mark.parametrize("vocab", VOCAB)
def test_logits_and_their_bits(level, dtype, softcap, vocab):
    made = Headed(vocab, dtype, 40, softcap)
    model = made.native()
    alone, rows = native.NativeDecoder(model, 1), mixed(40)
    single = torch.cat([made.step(alone, [row])[0] for row in rows])
    for threads in (1, 3):
        decoder = native.NativeDecoder(model, threads)
        logits, states = made.step(decoder, rows)
        want = made.want(states, rows)
        assert ((logits - want).abs().max() / want.std()).item() < BOUND[dtype]
        assert torch.equal(logits, single)
        assert decoder.best == logits.argmax(-1).tolist()
        assert torch.equal(decoder.prompt_logits(0, len(rows)), single)
        assert torch.equal(decoder.prompt_logits(3, 17), single[3:17])
        some = [1, 4, 5, 30]
        for kept in ([], some):
            decoder.kept = kept
            found, _ = made.step(decoder, rows)
            assert torch.equal(found, single[kept])
            assert decoder.best == logits.argmax(-1).tolist()
        decoder.close()
    alone.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 3.0], ids=["", "capped"])
@pytest.mark.parametrize("vocab", VOCAB)
def test_tokens_beyond_the_vocabulary(level, dtype, softcap, vocab):
    """Their logits, the argmax among them, and the bits of a row, whose neighbours have other tokens or none."""
    made = Headed(vocab, dtype, 40, softcap)
    model = made.native()
    alone, rows = native.NativeDecoder(model, 1), beyond(40)
    single = torch.full((40, vocab + 70), -torch.inf)
    for place, row in zip(single, rows, strict=True):
        own = made.step(alone, [row])[0]
        assert own.shape == (1, made.width(row[1]))
        place[: own.shape[1]] = own[0]
        assert alone.best == [int(own.argmax())]
    for threads in (1, 3):
        decoder = native.NativeDecoder(model, threads)
        logits, states = made.step(decoder, rows)
        want = made.want(states, rows)
        there = want.isfinite()
        assert torch.equal(there, logits.isfinite())
        assert ((logits - want)[there].abs().max() / want[there].std()).item() < BOUND[dtype]
        assert torch.equal(logits, single)
        best = logits.argmax(-1).tolist()
        assert decoder.best == best
        assert vocab <= max(best) and min(best) < vocab
        assert torch.equal(decoder.prompt_logits(0, 40), single)
        assert torch.equal(decoder.prompt_logits(3, 17), single[3:17])
        for kept in ([], [0, 1, 4, 5, 30]):
            decoder.kept = kept
            found, _ = made.step(decoder, rows)
            assert torch.equal(found, single[kept])
            assert decoder.best == best
        decoder.kept = None
        without, _ = made.step(decoder, [(index, ()) for index, _ in rows])
        assert torch.equal(without[1:3], logits[1:3, :vocab])
        decoder.close()
    alone.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_rows_than_stay_in_the_cache(level, dtype):
    """Rows in several chunks, and so many that few panels are computed together."""
    made = Headed(1031, dtype, 230)
    model = made.native()
    alone, decoder, rows = native.NativeDecoder(model, 1), native.NativeDecoder(model, 2), mixed(230)
    logits, _ = made.step(decoder, rows)
    for row in (0, 2, 9, 14, 100, 191, 192, 193, 229):
        assert torch.equal(logits[row], made.step(alone, [rows[row]])[0][0]), row
    alone.close()
    decoder.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [97, 9001])
def test_base_rows_have_the_bits_of_a_batch_without_adapters(level, dtype, vocab):
    made = Headed(vocab, dtype, 8)
    decoder = native.NativeDecoder(made.native(), 1)
    rows = [(index, (index % 3,) if index % 2 else ()) for index in range(8)]
    without, _ = made.step(decoder, [(index, ()) for index in range(8)])
    logits, _ = made.step(decoder, rows)
    assert torch.equal(logits[::2], without[::2])
    assert not torch.equal(logits[1::2], without[1::2])
    decoder.close()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [97, 9001])
@pytest.mark.parametrize("rows", [mixed(16), beyond(16)], ids=["mixed", "beyond"])
def test_a_sample_is_of_the_adapters_logits_whether_they_are_kept_or_not(vocab, threads, rows):
    """Logits that are not kept are computed again for the panels that a draw needs."""
    made = Headed(vocab, torch.float32, 16)
    decoder = native.NativeDecoder(made.native(), threads)
    drawn = []
    for kept in (None, []):
        decoder.kept = kept
        for seed in range(6):
            params = RowSamplingParams(0.9, (seed + 0.5) / 6, top_k=20 * (seed % 2), top_p=0.8 if seed % 3 else 1.0)
            decoder.row_params = dict.fromkeys(range(0, 16, 2), params)
            logits, _ = made.step(decoder, rows)
            drawn.append(decoder.best)
            for row in range(0, 16, 2) if kept is None else ():
                own = logits[row : row + 1, : made.width(rows[row][1])]
                assert decoder.sampling.sample(own, [0], [params]) == [decoder.best[row]]
                assert TorchSampling().sample(own, [0], [params]) == [decoder.best[row]]
    assert drawn[:6] == drawn[6:]
    assert any(drawn[0] != other for other in drawn[1:6])
    decoder.close()
