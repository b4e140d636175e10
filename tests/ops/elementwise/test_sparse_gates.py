"""Gates of which most become 0."""

from __future__ import annotations

import torch

from chorus.ops.elementwise.sparse_gates import sparse_gates


def test_the_share_of_a_normal_distribution_becomes_0():
    gates = torch.randn(3, 20000, generator=torch.Generator().manual_seed(0)) * 2 + 1
    up = torch.arange(20000.0).expand(3, -1)
    found, same = sparse_gates(torch.cat((gates, up), 1), 0.9).chunk(2, 1)
    assert torch.equal(same, up)
    assert torch.allclose((found == 0).float().mean(1), torch.full((3,), 0.9), atol=0.01)
    is_kept = found > 0
    taken = (gates - found)[is_kept]
    assert torch.allclose(taken, torch.full_like(taken, 1 + 2 * 1.2816), atol=0.1)


def test_ranks_have_one_cutoff():
    class Both:
        """The sums of a rank, of two with equal gates."""

        rank, size = 0, 2

        def add_up(self, part):
            return part * 2

    gate_up = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    gates, up = gate_up.chunk(2, 1)
    whole = sparse_gates(torch.cat((gates, gates, up, up), 1), 0.5)
    assert torch.allclose(whole[:, :32], sparse_gates(gate_up, 0.5, Both())[:, :32], atol=1e-6)
