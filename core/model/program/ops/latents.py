"""Attention over latents.

Tests: tests/core/layers/test_latents.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...specs.attention import AttentionSpec, LatentSpec
from ...specs.rope_config import rope_described
from ..layer_program import Kept
from ..op import NoNativeOp, Op, Read
from .attend import attention_described

if TYPE_CHECKING:
    from ..lowering import Lowering
    from ..torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class Latents(Op):
    """Rotate the queries of latent attention; normalise, rotate and write the latent and key that all heads share.

    x: queries `[tokens, heads · (key + rotated)]`. kept: `[tokens, kv_rank + rotated]`.
    """

    READS = ("x", "kept")
    WRITES = ("q",)
    SLOTS = ("k_norm",)

    x: Read
    kept: Read | None
    """None: they are another layer's."""

    q: str
    attention: AttentionSpec
    latent: LatentSpec
    k_norm: str = "k_norm"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from .....ops.elementwise.elementwise import write_latents
        from .....ops.elementwise.rotation import KvSlots, NewLatents
        from ...nvtx_spans import span
        from ..torch_heads import log_scaling

        if self.kept is None:
            return self._rotated_queries(at)
        mixer, spec, queries, kept_of = self.attention, self.latent, at.reader(self.x), at.reader(self.kept)
        kv, model, scaling = at.model.kv_index[at.index], at.model, log_scaling(self.attention, at.model)
        q_out = Kept(self.q, (mixer.num_heads, mixer.query_dim))

        def run(step: Step) -> None:
            names = step.names
            with span("attn.rope"):
                new = NewLatents(kept_of(names), spec.kv_rank, at.weights[self.k_norm], spec.eps)
                rows = queries(names).unflatten(1, (-1, spec.key_dim + spec.rotated_dim))
                place = step.batch.page[model.page_groups[kv]], step.batch.offset
                k, v = model.arena.kv_layers[kv]
                slots = KvSlots(k[..., : mixer.head_dim], v, *place, model.kv_scales[kv])
                q = write_latents(rows, new, step.rotations[mixer.rope], slots, step.kept.get(q_out))
                if scaling is not None:
                    q.mul_(scaling[step.batch.positions])
                names[self.q] = q

        return run

    def _rotated_queries(self, at: OpContext) -> Run:
        """Rotates queries of a layer that reads another one's latents."""
        import torch

        from .....ops.elementwise.elementwise import rotate
        from ...nvtx_spans import span

        mixer, spec, queries = self.attention, self.latent, at.reader(self.x)
        q_out = Kept(self.q, (mixer.num_heads, mixer.query_dim))

        def run(step: Step) -> None:
            with span("attn.rope"):
                rows = queries(step.names).unflatten(1, (-1, spec.key_dim + spec.rotated_dim))
                own, turned = rows.split((spec.key_dim, spec.rotated_dim), 2)
                turned = rotate(turned, step.rotations[mixer.rope], None, spec.eps)
                step.names[self.q] = torch.cat((own, turned), 2, out=step.kept.get(q_out))

        return run

    def native(self, to: Lowering, at: int) -> None:
        """Write latents to their pages right after the GEMM that makes them, and attend over them."""
        from ..native_attention import latent_arguments

        last = next((i for i in range(at + 1, len(to.ops)) if isinstance(to.ops[i], LatentAttend)), at)
        attend = to.ops[last]
        if not isinstance(attend, LatentAttend) or attend.q != self.q:
            raise NoNativeOp("queries that something else than attention reads")
        latent = latent_arguments(self.attention, self.latent, to.kv_up())
        if self.kept is None:
            raise NoNativeOp("latents of an earlier layer")
        x, column, _ = to.read(at, self.kept)
        to.emit_behind(x, "Keep", x=x, column=column, latent=latent)
        for between in range(at + 1, last):  # what chooses the tokens that are attended to
            to.list_op(between)
        out = to.rounded(to.written(last))
        q, column, _ = to.read(at, self.x)
        own = {} if attend.chosen is None else {"chosen": to.held(last, attend.chosen, "Indices")}
        to.emit("LatentAttend", q=q, out=out, column=column, layer=to.index, latent=latent, **own)
        to.done.add(last)

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return self.attention.num_heads * self.attention.query_dim

    def detail(self) -> str:
        """See `Op.detail`."""
        heads = f"{self.attention.num_heads} heads, {rope_described(self.attention.rope)}"
        if self.kept is None:
            return f"{heads}; an earlier layer's latents"
        size = f"a latent of {self.latent.kv_rank} and a key of {self.latent.rotated_dim}"
        return f"{heads}; writes {size} for all heads"


@dataclass(frozen=True, slots=True)
class LatentAttend(Op):
    """Attention over latents: q goes through kv_b_proj's keys, and the outputs through its values."""

    READS = ("q", "chosen")
    WRITES = ("out",)
    IS_CUT = True
    SLOTS = ("kv_up", "sinks")

    q: str
    out: str
    attention: AttentionSpec
    latent: LatentSpec
    kv_up: str = "kv_up"

    chosen: str | None = None
    """The tokens that queries attend to; None: all that they see."""

    sinks: str | None = None

    @property
    def bias(self) -> str:
        return f"{self.kv_up}_bias"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from .....ops.attention.latents import LatentHeads
        from ...nvtx_spans import span
        from ..torch_heads import attended_of, scores_of

        scores, index, model = scores_of(self.attention, at.model.max_model_len), at.index, at.model
        spec, mixer, kv = self.latent, self.attention, model.kv_index[index]
        kept, head_dim = attended_of(self.out, mixer), mixer.head_dim

        def run(step: Step) -> None:
            weights, lora = step.layers[index], step.batch.lora
            absorbed, kv_up = None if lora is None else lora.absorbed(index), weights[self.kv_up]
            num_heads = len(kv_up) // (spec.key_dim + spec.value_dim)
            with span("attn.run"):
                of_group, (k, _) = step.batch.attention.of(model.page_groups[kv]), model.arena.kv_layers[kv]
                bias = weights.get(self.bias)
                assert self.sinks is None or bias is None, "beside sinks, weights don't add up to one: see `latents`"
                ways = LatentHeads(kv_up, num_heads, spec.key_dim, spec.rotated_dim, absorbed, bias)
                q, cache, out = step.names[self.q], k[..., :head_dim], step.kept.get(kept)
                chosen = None if scores.top_k is None or self.chosen is None else step.names[self.chosen]
                sinks = None if self.sinks is None else at.weights[self.sinks]
                step.names[self.out] = of_group.run_latents(q, cache, ways, out, scores, chosen, sinks)

        return run

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return self.attention.num_heads * self.attention.attended_dim

    def detail(self) -> str:
        """See `Op.detail`."""
        return attention_described(self.attention)
