"""Attention over pages.

Tests: tests/core/paths, tests/core/layers/test_relative_attention.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .....ops.attention.blocks import BlockMask
from ...specs.attention import AttentionSpec
from ..op import Op

if TYPE_CHECKING:
    from ..lowering import Lowering
    from ..torch_step import OpContext, Run, Step


#: What a token of a block sees of it, for people.
_BLOCKS = {
    BlockMask.NONE: "",
    BlockMask.IN_WINDOW: ", and those behind it in an image",
    BlockMask.WHOLE: ", and all of the prompt",
}


@dataclass(frozen=True, slots=True)
class Attend(Op):
    """Attention of q over the pages: `[tokens, heads · head_dim]`."""

    READS = ("q", "chosen", "relative")
    WRITES = ("out",)
    IS_CUT = True
    SLOTS = ("sinks", "slopes", "profiles")

    q: str
    out: str
    attention: AttentionSpec
    sinks: str = "sinks"
    slopes: str = "slopes"
    profiles: str = "profiles"
    chosen: str | None = None
    """The blocks that queries attend to; None: all that they see."""

    relative: str | None = None
    """The queries' states that numbers added to scores are made of: see `RelativeSpec`."""

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from .....ops.attention.relative import Relative
        from ...nvtx_spans import span
        from ..torch_heads import attended_of, caches, scores_of

        kv, model = at.model.kv_index[at.index], at.model
        scores, kept = scores_of(self.attention, model.max_model_len), attended_of(self.out, self.attention)
        cache_of, is_sparse = caches(self.attention, model, kv), scores.top_k is not None

        def run(step: Step) -> None:
            with span("attn.run"):
                of_group, (k, v) = step.batch.attention.of(model.page_groups[kv]), cache_of()
                q, out, scales = step.names[self.q], step.kept.get(kept), model.kv_scales[kv]
                own = {"sinks": at.weights.get(self.sinks), "slopes": at.weights.get(self.slopes)}
                if is_sparse and self.chosen is not None:
                    own["chosen"] = step.names[self.chosen]
                if self.relative is not None:
                    states = step.names[self.relative].view(len(q), self.attention.num_heads, -1)
                    own["relative"] = Relative(states, at.weights[self.profiles])
                step.names[self.out] = of_group.run(q, k, v, out, scores, kv_scales=scales, **own)

        return run

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return self.attention.num_heads * self.attention.attended_dim

    def detail(self) -> str:
        """See `Op.detail`."""
        return attention_described(self.attention)


def attention_described(a: AttentionSpec) -> str:
    """What a query sees, and what becomes of scores; for people."""
    seen = "all tokens" if a.window is None else f"the last {a.window:,} tokens"
    if a.chunked and a.window is not None:
        seen = f"its own chunk of {a.window:,} tokens"
    if a.top_k is not None:
        seen = f"the {a.top_k:,} tokens that were chosen"
    cap = "" if a.softcap is None else f", soft cap {a.softcap:g}"
    relative = "" if a.relative is None else f", learned numbers of {a.relative.extent:,} distances"
    terms = f"{', sinks' * a.sinks}{', slopes' * bool(a.slopes)}{relative}"
    return f"sees {seen}{_BLOCKS[a.blocks]}; scale {a.scale:g}{cap}{terms}"
