"""Parts of quantised matrices and matrices one below the other have the weights of the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chorus.core.model.checkpoints.quantization.group_scaled import GroupScaled
from chorus.core.model.checkpoints.quantization.groups import (
    evenly_grouped,
    pack_scaled,
    part_of,
    plain,
    stacked,
    with_signed_values,
)
from chorus.core.model.program.native_decoder import PackedWeights
from chorus.core.model.read_config import read_model_config
from chorus.core.model.weights.shard import Shard
from chorus.core.model.weights.weight_loader import WeightLoader
from chorus.core.model.weights.weight_plan import PACKED
from chorus.ops.library.native_integers import IntegerPanels
from chorus.ops.moe.expert_gemms import unpack

from .....tables import LAYER_MATRICES
from .forms import FORMS
from .twins import write_twins


def matrix(rows=6, group_of=None, zeros=False, bits=4, low=-8):
    generator = torch.Generator().manual_seed(rows)
    group_of = torch.arange(48) // 16 if group_of is None else group_of
    shape = (rows, int(group_of.max()) + 1)
    values = torch.randint(low, low + 16, (rows, len(group_of)), generator=generator).to(torch.int8)
    zero = torch.randint(low, low + 16, shape, generator=generator).to(torch.int16) if zeros else None
    return GroupScaled(values, bits, torch.rand(shape, generator=generator), zero, group_of)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("columns", [slice(0, 16), slice(16, 48), slice(24, 48), slice(5, 19), slice(None)])
def test_a_part_has_its_weights(zeros, columns):
    whole = matrix(zeros=zeros)
    part = part_of(whole, slice(1, 4), columns)
    assert torch.equal(part.dequantised(), whole.dequantised()[1:4, columns])
    assert part.scales.shape[1] == len(whole.group_of[columns].unique())


@pytest.mark.parametrize("other", [torch.arange(48) // 16, torch.arange(48) // 8, torch.zeros(48, dtype=torch.long)])
def test_matrices_with_other_groups_are_stacked(other):
    parts = [matrix(6), matrix(3, other, zeros=True), matrix(2, torch.arange(48) // 12)]
    both = stacked(parts)
    assert torch.equal(both.dequantised(), torch.cat([part.dequantised() for part in parts]))


def test_matrices_of_other_bits_are_not_stacked():
    with pytest.raises(ValueError, match="matrices of 4 and 8 bits can't be stacked"):
        stacked([matrix(), matrix(bits=8)])


@pytest.mark.parametrize(
    ("group_of", "size"),
    [
        (torch.arange(48) // 16, 16),
        (torch.arange(48) // 20, 20),
        (torch.zeros(48, dtype=torch.long), 48),
        (torch.tensor([0] * 8 + [1] * 16 + [2] * 24), 8),
        (torch.tensor([0] * 16 + [1] * 32), 16),
        (torch.arange(48) % 3, 1),
    ],
)
def test_groups_become_even(group_of, size):
    uneven = matrix(group_of=group_of, zeros=True)
    even, found = evenly_grouped(uneven)
    assert found == size
    assert torch.equal(even.group_of, torch.arange(48) // size)
    assert torch.equal(even.dequantised(), uneven.dequantised())


def test_unsigned_values_become_signed():
    for zeros in (False, True):
        unsigned = matrix(zeros=zeros, low=0)
        found = with_signed_values(unsigned)
        assert found.values.min() >= -8 and found.values.max() <= 7
        assert torch.equal(found.dequantised(), unsigned.dequantised())


def test_what_can_not_be_multiplied_as_whole_numbers_is_dequantised():
    packed = PackedWeights(torch.bfloat16)
    assert isinstance(packed.add(matrix(zeros=True, low=0)), IntegerPanels)
    mixed = matrix(group_of=torch.arange(48) % 3)  # as with act order
    found = packed.add(mixed)
    assert isinstance(found, torch.Tensor)
    weights = found.transpose(1, 2).flatten(2).flatten(0, 1)[:6]
    assert torch.equal(weights, plain(mixed, torch.bfloat16))


@pytest.mark.parametrize("columns", [slice(0, 16), slice(0, 32), slice(16, 32), slice(32, 48)])
def test_groups_that_a_share_does_not_use_are_left_out(columns):
    """A share of columns whose groups the checkpoint lists (`g_idx`) comes with the scales of all of them."""
    whole = matrix(zeros=True)
    share = replace(whole, values=whole.values[:, columns], group_of=whole.group_of[columns])
    even, size = evenly_grouped(share)
    assert even.scales.shape[1] == even.zeros.shape[1] == -(-len(share.group_of) // size)
    assert torch.equal(even.dequantised(), whole.dequantised()[:, columns])


@pytest.mark.parametrize("form", ["awq", "gptq", "compressed packed, zero points", "compressed int8"])
def test_integers_of_ranks_are_their_shares(tmp_path, form):
    """Whole, and of each of two ranks, whose columns may cut groups; also as the native library keeps them."""
    path, _ = write_twins(tmp_path, FORMS[form])
    config = read_model_config(path)
    for shard in (Shard(), Shard(0, 2), Shard(1, 2)):
        kept, plainly = (WeightLoader(path, config, torch.float32, shard=shard) for _ in range(2))
        kept.plan = PACKED
        seen = []

        def pack(weight, seen=seen):
            seen.append(isinstance(weight, GroupScaled))
            weight_of = plain(weight, torch.float32).clone()
            if isinstance(weight, GroupScaled):
                torch.testing.assert_close(unpack(pack_scaled(weight)), weight_of, rtol=1e-6, atol=1e-6)
            return weight_of

        for found, want in zip(kept.layers(pack), plainly.layers(), strict=True):
            assert all(torch.equal(found[name], want[name]) for name in LAYER_MATRICES)
        assert any(seen)
