"""Gated DeltaNet in the native library: the values of `DeltaWeights.mix`, and bits that depend on a sequence alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from chorus.ops.cpu.native_delta import run_delta
from chorus.ops.library import native_library
from chorus.ops.mixers.recurrent import RecurrentState

from ..mixers.delta_layers import DeltaLayer, copy, verified_steps

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not native_library.available(torch.float32), reason="the native library is not built"),
    pytest.mark.wide,
]

#: heads of keys and of values, their widths, what the convolution sees, and whether decays are of channels
SHAPES = [
    *((2, 4, 16, 24, 4), (1, 1, 8, 8, 2), (3, 3, 40, 80, 3), (2, 6, 128, 128, 4), (1, 2, 16, 112, 4)),
    *((2, 2, 16, 24, 4, True), (3, 3, 40, 80, 3, True), (2, 2, 128, 128, 4, True)),
]


class Layer(DeltaLayer):
    def run(self, rows: Sequence[torch.Tensor], state: RecurrentState, threads: int = 1) -> list[torch.Tensor]:
        """One step of sequences with these rows."""
        lengths = [len(each) for each in rows]
        indptr = [0, *itertools.accumulate(lengths)]
        return list(run_delta(torch.cat(list(rows)), self.weights, state, indptr, threads=threads)[0].split(lengths))


def assert_same(one: RecurrentState, other: RecurrentState) -> None:
    assert torch.equal(one.conv, other.conv)
    assert torch.equal(one.recurrent, other.recurrent)


@pytest.fixture(params=SHAPES, ids=str)
def layer(request) -> Layer:
    return Layer(*request.param)


@pytest.fixture(params=native_library.levels())
def level(request, monkeypatch) -> str:
    monkeypatch.setenv(native_library.ISA, request.param)
    return request.param


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (70,), (130, 2, 1, 1)])
def test_values_are_those_of_torch(layer, level, lengths):
    rows, state = layer.rows(lengths), layer.state(len(lengths))
    want_state = copy(state)
    want = layer.weights.mix(torch.cat(rows), want_state, [0, *itertools.accumulate(lengths)])
    got = torch.cat(layer.run(rows, state, threads=2))
    torch.testing.assert_close(got, want, rtol=2e-4, atol=5e-5)
    torch.testing.assert_close(state.conv, want_state.conv, rtol=0, atol=0)
    torch.testing.assert_close(state.recurrent, want_state.recurrent, rtol=2e-4, atol=5e-5)


def test_a_sequence_has_the_same_bits_in_any_batch_and_on_any_threads(layer, level):
    rows, together = layer.rows((1, 40, 1, 3)), layer.state(4)
    before = copy(together)
    got = layer.run(rows, together, threads=3)
    for index, own in enumerate(rows):
        alone = before.of(slice(index, index + 1))
        assert torch.equal(layer.run([own], alone)[0], got[index])
        assert_same(alone, together.of(slice(index, index + 1)))


@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_prompt_has_the_same_bits_however_it_is_cut(layer, level, size):
    (rows,), whole = layer.rows((100,)), layer.state(1)
    cut = copy(whole)
    (want,) = layer.run([rows], whole)
    got = torch.cat([layer.run([part], cut)[0] for part in rows.split(size)])
    assert torch.equal(got, want)
    assert_same(cut, whole)


@pytest.mark.parametrize("length", [1, 2, 30])
def test_a_state_may_go_to_another_place(layer, level, length):
    (rows,), state = layer.rows((length,)), layer.state(1)
    before, after = copy(state), layer.state(1)
    out, _ = run_delta(rows, layer.weights, state, [0, length], after=after)
    assert_same(state, before)
    (want,) = layer.run([rows], state)
    assert torch.equal(out, want)
    assert_same(after, state)


@pytest.mark.parametrize("length", [1, 2, 30])
def test_what_is_in_a_new_sequences_memory_does_not_matter(layer, level, length):
    (rows,), zeros = layer.rows((length,)), layer.state(1)
    zeros.conv.zero_()
    zeros.recurrent.zero_()
    (want,) = layer.run([rows], zeros)
    for garbage in (torch.nan, 3.0):
        state = RecurrentState(torch.full_like(zeros.conv, garbage), torch.full_like(zeros.recurrent, garbage))
        out, _ = run_delta(rows, layer.weights, state, [0, length], begins=[True])
        assert torch.equal(out, want)
        assert_same(state, zeros)


@pytest.mark.skipif(len(native_library.levels()) < 2, reason="one level at most is built")
def test_levels_give_the_same_bits(layer, monkeypatch):
    rows, state = layer.rows((50, 1, 1)), layer.state(3)
    found = []
    for level in native_library.levels():
        monkeypatch.setenv(native_library.ISA, level)
        own = copy(state)
        found.append((torch.cat(layer.run(rows, own)), own))
    for out, own in found[1:]:
        assert torch.equal(out, found[0][0])
        assert_same(own, found[0][1])


def test_large_inputs_stay_finite(layer, level):
    rows = [1e4 * each for each in layer.rows((5, 1))]
    state = layer.state(2)
    assert all(each.isfinite().all() for each in layer.run(rows, state))
    assert state.recurrent.isfinite().all()


@pytest.mark.parametrize("seed", range(4))
def test_rejected_drafts_change_no_bit(layer, level, seed):
    """Steps that verify drafts give the known and the accepted tokens the bits of steps of one token each."""
    most, lengths = 8, (30, 17, 24)
    rows, steps = verified_steps(layer, lengths, most, seed)
    state = layer.state(len(lengths), most)
    plain = copy(state)
    want = [
        torch.cat([layer.run([row], plain.of(slice(i, i + 1)))[0] for row in own.split(1)])
        for i, own in enumerate(rows)
    ]
    done = [0] * len(rows)
    for at, (parts, accepted, drafts) in enumerate(steps):
        counts = [len(part) for part in parts]
        after = layer.state(len(lengths), most)
        out, _ = run_delta(
            torch.cat(parts),
            layer.weights,
            state,
            [0, *itertools.accumulate(counts)],
            after=after,
            accepted=accepted,
            drafts=drafts,
            threads=2,
        )
        following = steps[at + 1][1] if at + 1 < len(steps) else [0] * len(parts)
        for index, own in enumerate(out.split(counts)):
            kept = counts[index] - drafts[index] + following[index]
            begin, end = done[index], min(done[index] + kept, lengths[index])
            assert torch.equal(own[: max(0, end - begin)], want[index][begin:end])
            done[index] += kept
        state = after


def test_a_call_without_room_for_drafts_is_refused(layer):
    (rows,), state = layer.rows((3,)), layer.state(1)
    with pytest.raises(ValueError, match="states keep the inputs of 0 drafts"):
        run_delta(rows, layer.weights, state, [0, 3], drafts=[2], after=layer.state(1))
