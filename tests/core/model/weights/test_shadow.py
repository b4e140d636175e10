"""Pauses in which a shadow is made: their lengths, by a clock that only its work moves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from chorus.core.model.weights import shadow
from chorus.core.model.weights.shadow import PIECE_BYTES, ShadowWeights

PIECE_SECONDS, BYTE_SECONDS = 0.004, 1e-9


class Clock:
    now = 0.0

    def perf_counter(self):
        return self.now


class Slow(ShadowWeights):
    """Matrices of some pieces each; the system takes its time to give memory for one, and making takes some too."""

    def __init__(self, clock, pieces, monkeypatch):
        monkeypatch.setattr(shadow, "time", clock)
        self.clock, self.log = clock, []
        self.pages = torch.full((sum(-(-size // PIECE_BYTES) for size in pieces), PIECE_BYTES // 4), 7.0)
        self.origins = [torch.empty(1, size // 4) for size in pieces]
        layer: dict[str, None] = {}
        model = SimpleNamespace(
            layers=[layer],
            merge=self.make,
            merged_form=lambda layer, product: (self.origins[int(product)].shape, torch.float32),
            use_merged=lambda layers: None,
        )
        layout = SimpleNamespace(page_elems=PIECE_BYTES // 4)
        lora = SimpleNamespace(in_layers=SimpleNamespace(rows_of=lambda adapter: []), modules=lambda layer, product: [])
        super().__init__(model, SimpleNamespace(pages=self.pages, layout=layout), lora)
        start, runs = 0, []
        for size in pieces:
            runs.append(range(start, start - (-size // PIECE_BYTES)))
            start = runs[-1].stop
        self.begin(SimpleNamespace(manifest=SimpleNamespace(vectors=(), modules=None)), runs)

    def _targets(self, adapter):
        return [(0, f"{product}") for product in range(len(self.origins))]

    def _origin(self, layer, product):
        return self.origins[int(product)]

    def _touch(self, matrix):
        self.clock.now += PIECE_SECONDS
        self.log.append("piece")
        return super()._touch(matrix)

    def make(self, layer, product, parts, origin, place):
        if place.numel() * 4 > PIECE_BYTES:
            assert (place.view(-1)[::1024] == 0).all(), "each page has been written"
        self.clock.now += place.numel() * 4 * BYTE_SECONDS
        self.log.append(f"matrix {product}")
        return 1.0

    def pauses(self, seconds):
        """Make all of it; returns how long each call took."""
        taken, whole = [], False
        while not whole:
            began = self.clock.now
            whole = self.advance(seconds)
            taken.append(self.clock.now - began)
        return taken


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.006, 0.02])
def test_memory_that_the_system_is_slow_to_give_is_asked_for_piece_by_piece(monkeypatch, seconds):
    """A matrix of five pieces is 20 ms of waiting: a pause is over in time, but for one piece or matrix at least."""
    slow = Slow(Clock(), [5 * PIECE_BYTES - 4096, PIECE_BYTES, 3 * PIECE_BYTES], monkeypatch)
    taken = slow.pauses(seconds)
    making = 5 * PIECE_BYTES * BYTE_SECONDS
    assert max(taken) <= max(seconds, making, PIECE_SECONDS) + 1e-9
    assert slow.log.count("piece") == 8
    assert [what for what in slow.log if what != "piece"] == ["matrix 0", "matrix 1", "matrix 2"]
    assert slow.log[:6] == ["piece"] * 5 + ["matrix 0"]
    assert slow.share_made == 1.0


def test_another_shadow_begins_with_its_own_memory(monkeypatch):
    slow = Slow(Clock(), [4 * PIECE_BYTES], monkeypatch)
    assert not slow.advance(0.006)
    assert slow.log == ["piece"]
    slow.begin(SimpleNamespace(manifest=SimpleNamespace(vectors=(), modules=None)), [range(4)])
    slow.pauses(0.006)
    assert slow.log.count("piece") == 1 + 4
