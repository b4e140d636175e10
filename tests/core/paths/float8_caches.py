"""Tiny models whose keys and values are kept in FP8, in transformers + peft, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache

from chorus.ops.elementwise.float8_kv import UNSCALED, KvScales

from ...greedy import after_drafts
from ..tiny_families import Tiny

#: Least lead of a choice. Keys that differ in the last bit of float32 may be rounded to two neighbours in FP8.
CLEAR = 0.03


def as_stored(x: torch.Tensor, scale: float) -> torch.Tensor:
    """What FP8 makes of x."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


@contextmanager
def rounded_caches(scales: list[KvScales] | None = None) -> Iterator[None]:
    """Have caches of transformers keep keys and values in FP8."""
    update = Cache.update

    def rounded(self: Any, k: torch.Tensor, v: torch.Tensor, layer: int, *args: Any, **more: Any) -> Any:
        of_layer = UNSCALED if scales is None else scales[layer]
        return update(self, as_stored(k, of_layer.k), as_stored(v, of_layer.v), layer, *args, **more)

    Cache.update = rounded
    try:
        yield
    finally:
        Cache.update = update


@dataclass(eq=False)
class Float8Cache:
    """A tiny model, to be served with `kv_cache_dtype="fp8"`, and what transformers answers whose cache rounds."""

    plain: Tiny

    @property
    def model(self) -> Path:
        return self.plain.model

    @property
    def adapters(self) -> dict[str, Path]:
        return self.plain.adapters

    def case(self, adapter: str | None, length: int, seed: int, count: int = 8) -> tuple[list[int], list[int]]:
        """A random prompt and its `count` greedy tokens, all clear choices."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            prompt = torch.randint(3, 150, (length,), generator=generator).tolist()
            compute = partial(self._greedy, adapter, prompt, count)
            tokens, margin = self.plain.kept.get(["fp8", adapter, prompt, count], compute)
            if margin >= CLEAR:
                return prompt, tokens

    def _greedy(self, adapter: str | None, prompt: list[int], count: int) -> tuple[list[int], float]:
        """Greedy tokens, and by how much the closest one leads. The drafts are an engine's, whose cache doesn't round.
        It ends at a choice that is not clear.
        """
        model = self.plain.use(adapter)
        self.plain.router_margins.clear()

        def logits(tokens: list[int]) -> torch.Tensor:
            with rounded_caches():
                return model(torch.tensor([tokens]), use_cache=True).logits[0]

        tokens, margin = after_drafts(logits, partial(self.plain.draft, adapter), prompt, count, CLEAR)
        return tokens, min(margin, *(10 * each for each in self.plain.router_margins), 1.0)
