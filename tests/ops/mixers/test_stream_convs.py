"""Short convolutions of streams: transformers' own, in channels of one state beside others, and with drafts."""

from __future__ import annotations

import pytest
import torch

from chorus.core.model.families.inkling.stream_convs import StreamConvSpec
from chorus.ops.mixers.conv_place import ConvPlace
from chorus.ops.mixers.recurrent import RecurrentState
from chorus.ops.mixers.stream_convs import StreamConvWeights

TAPS, CHANNELS = 4, 10


@pytest.fixture
def module():
    from transformers.models.inkling.modeling_inkling import InklingShortConvolution

    torch.manual_seed(1)
    return InklingShortConvolution(CHANNELS, TAPS, 0, 0)


@pytest.fixture
def weights(module):
    return StreamConvWeights(module.conv1d.weight.detach().squeeze(1).T.contiguous(), 6)


def state(sequences: int, drafts: int = 0) -> RecurrentState:
    kept = torch.full((sequences, drafts, CHANNELS), torch.nan) if drafts else None
    return RecurrentState(torch.zeros(sequences, TAPS - 1, CHANNELS), torch.zeros(sequences, 0), kept)


@pytest.mark.parametrize("cuts", [[13], [1] * 13, [5, 1, 1, 6], [2, 11]], ids=str)
def test_a_stream_is_transformers_own_however_it_is_cut(module, weights, cuts):
    x, own, found, done = torch.randn(13, CHANNELS), state(1), [], 0
    for length in cuts:
        found.append(weights.mix(x[done : done + length], own, [0, length]))
        done += length
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(found), module(x[None])[0])


def test_rejected_drafts_leave_nothing(weights):
    x, own, alone = torch.randn(9, CHANNELS), state(1, 3), state(1)
    want = weights.mix(x, alone, [0, 9])
    rows = torch.cat((x[:5], torch.randn(2, CHANNELS)))  # the first of its three drafts is right
    first = weights.mix(torch.cat((rows[:5], rows[5:])), own, [0, 7], drafts=[3])
    torch.testing.assert_close(first[:5], want[:5])
    found = weights.mix(x[5:], own, [0, 4], accepted=[1])
    torch.testing.assert_close(found, want[5:])


def test_the_parts_of_a_state_lie_side_by_side():
    spec = StreamConvSpec(20, ((2, 8), (1, 12)), form=1, conv_size=TAPS)
    assert (spec.kv_size, spec.channels, spec.conv_shape, spec.draft_size) == (12, 72, (3, 72), 72)
    assert spec.common == StreamConvSpec(20, ((2, 8), (1, 12)), conv_size=TAPS)
    made = spec.weights({path: torch.randn(each.shape) for path, each in spec.tensors.items()})
    parts = {place: made.by_place[place].part for place in ConvPlace}
    channels = [part.channels for part in parts.values()]
    assert channels == [slice(0, 24), slice(32, 52), slice(52, 72)], "keys and values have room for the widest"
    assert all(part.drafts == part.channels and part.has_conv and not part.has_heads for part in parts.values())
    assert made.to(torch.device("cpu")).by_place.keys() == made.by_place.keys()
    share = spec.share(2)
    assert (share.heads, share.kv_size, share.hidden) == (((1, 8), (1, 12)), 12, 20)
