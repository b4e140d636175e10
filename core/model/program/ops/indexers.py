"""Indexers, which choose the tokens, or blocks of tokens, that queries attend to.

Tests: tests/core/layers/test_indexer.py, tests/core/layers/test_key_blocks.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...specs.attention import AttentionSpec
from ...specs.indexer import BlockIndexerSpec, IndexerSpec
from ...specs.norms import NormSpec
from ...specs.rope_config import RopeConfig, rope_described
from ..layer_program import Kept
from ..op import NoNativeOp, Op, Read

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ..lowering import Lowering
    from ..native_registers import Held
    from ..torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class Index(Op):
    """Rotate an indexer's queries; normalise and rotate the key that its heads share, and write it to its page.

    x: queries `[tokens, heads · key]`; key: `[tokens, key]`; factors: of heads `[tokens, heads]`, which are copied.
    rows: the layer's input, of which gates are made that are kept next to keys: see `IndexerSpec.pool`.
    """

    READS = ("x", "key", "factors", "rows")
    WRITES = ("q", "weights")
    SLOTS = ("norm", "gates")

    x: Read
    key: Read
    factors: Read
    q: str
    weights: str
    attention: AttentionSpec
    indexer: IndexerSpec
    norm: str = "index_norm"
    rows: Read | None = None
    gates: str | None = None

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        import torch
        from torch.nn.functional import linear

        from .....ops.elementwise.elementwise import layer_norm, rotate
        from ...nvtx_spans import span

        spec, model, kv = self.indexer, at.model, at.model.page_index[at.index]
        queries, key_of, factors = at.reader(self.x), at.reader(self.key), at.reader(self.factors)
        q_out, weights_out = Kept(self.q, (spec.heads, spec.key_dim)), Kept(self.weights, (spec.heads,))
        rows_of = None if self.rows is None else at.reader(self.rows)

        def run(step: Step) -> None:
            names, rotation, norm = step.names, step.rotations[spec.rope], at.weights[self.norm].float()
            with span("attn.index"):
                key = layer_norm(key_of(names), norm[0], spec.eps, norm[1])[:, None]
                cache = model.arena.kv_layers[kv][0][..., -spec.kept_dim :]
                place = step.batch.page[model.page_groups[kv]], step.batch.offset
                kept = rotate(_turning_first(key, spec), rotation, None, spec.eps)
                if rows_of is not None and self.gates is not None:
                    kept = torch.cat((kept, linear(rows_of(names), at.weights[self.gates])[:, None]), 2)
                cache[place] = kept.to(cache.dtype)
                rows = _turning_first(queries(names).unflatten(1, (spec.heads, spec.key_dim)), spec)
                names[self.q] = rotate(rows, rotation, None, spec.eps, step.kept.get(q_out))
                weights = step.kept.get(weights_out)
                names[self.weights] = factors(names).clone() if weights is None else weights.copy_(factors(names))

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        from ..native_attention import index_keys
        from ..native_binding import weight_of

        spec = self.indexer
        to.need("OpKind.kChoose", "indexer of sparse attention")
        key, column, width = to.read(at, self.key)
        normed = to.temporary("key", width)
        to.emit(
            "Norm",
            x=key,
            column=column,
            width=width,
            out=normed,
            norm="kBiasedLayer",
            eps=spec.eps,
            weight=weight_of(self.norm),
        )
        kept = to.temporary("kept", spec.kept_dim)
        first = spec.key_dim - spec.rope.dim if spec.rotates_last and spec.rope is not None else 0
        _turn(to, (normed, 0), kept, (1, width), spec.rope, first)
        if self.rows is not None and self.gates is not None:
            rows, column, of_rows = to.read(at, self.rows)
            own = {"x": rows, "column": column, "width": of_rows, "outputs": width, "out_column": width}
            to.emit("Product", **own, out=kept, w=weight_of(self.gates))
        to.emit("KeepIndex", x=kept, column=0, keys=index_keys(self.attention))
        q, column, _ = to.read(at, self.x)
        out = to.held_as(to.written(at, self.q), "Rounded")
        _turn(to, (q, column), out, (spec.heads, spec.key_dim), spec.rope, first)
        factors, column, width = to.read(at, self.factors)
        own = {"x": factors, "column": column, "width": width, "out_column": 0}
        to.emit("Copy", **own, out=to.held_as(to.written(at, self.weights)))

    def columns_of(self, write: str, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns_of`."""
        return self.indexer.heads if write == self.weights else self.indexer.query_size

    def detail(self) -> str:
        """See `Op.detail`."""
        spec = self.indexer
        kept = f", and gates of pools of {spec.pool}" if spec.pool else ""
        heads = f"{spec.heads} heads of {spec.key_dim}, {rope_described(spec.rope)}"
        return f"{heads}; writes a key for all heads{kept}"


@dataclass(frozen=True, slots=True)
class Choose(Op):
    """The places of the tokens that an indexer gives the highest scores, `[tokens, top_k]`, for each query."""

    READS = ("q", "weights")
    WRITES = ("out",)
    IS_CUT = True
    SLOTS = ("biases",)

    q: str
    weights: str
    out: str
    attention: AttentionSpec

    biases: str | None = None
    """Of places in pools: see `IndexerSpec.pool`."""

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from ...nvtx_spans import span

        spec, mixer, model, kv = self.attention.indexer, self.attention, at.model, at.model.page_index[at.index]
        assert spec is not None and mixer.top_k is not None, "the layer has an indexer"
        width, top_k, kept = (
            spec.kept_dim,
            mixer.top_k_within(model.max_model_len),
            Kept(self.out, (mixer.top_k,), True),
        )

        def run(step: Step) -> None:
            if top_k is None:
                return  # queries attend to all that they see
            names = step.names
            with span("attn.index"):
                attention, (k, _) = step.batch.attention.of(model.page_groups[kv]), model.arena.kv_layers[kv]
                own, biases = (
                    (names[self.q], names[self.weights]),
                    None if self.biases is None else at.weights[self.biases],
                )
                found = attention.choose(*own, k[..., -width:], top_k, step.kept.get(kept), biases)
                names[self.out] = found

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        from ..native_attention import index_keys
        from ..native_binding import weight_of

        spec = self.attention.indexer
        assert spec is not None, "the layer has an indexer"
        q, weights = to.held(at, self.q, "Rounded"), to.held(at, self.weights)
        own: dict[str, Any] = {"heads": spec.heads, "top_k": self.attention.top_k, "scale": spec.key_dim**-0.5}
        out = to.held_as(to.written(at), "Indices")
        if self.biases is not None:
            own |= {"pool": spec.pool, "biases": weight_of(self.biases)}
        keys = index_keys(self.attention)
        to.emit("Choose", q=q, weights=weights, out=out, **own, factor=spec.heads**-0.5, keys=keys)

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return self.attention.top_k or 0

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"{self.attention.top_k:,} tokens by the scores of all heads"


@dataclass(frozen=True, slots=True)
class IndexBlocks(Op):
    """Normalise and rotate a block indexer's queries, and the key of all its heads, and write that to its page; keys as
    they are made where blocks' means are scored.

    x: queries `[tokens, heads · key]`; key: `[tokens, key]`.
    """

    READS = ("x", "key")
    WRITES = ("q",)
    SLOTS = ("q_norm", "k_norm")

    x: Read
    key: Read
    q: str
    attention: AttentionSpec
    indexer: BlockIndexerSpec
    norm: NormSpec
    q_norm: str = "index_q_norm"
    k_norm: str = "index_k_norm"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from .....ops.attention.key_blocks import halves_of
        from .....ops.elementwise.elementwise import rotate
        from ...nvtx_spans import span

        spec, model, kv, eps = self.indexer, at.model, at.model.kv_index[at.index], self.norm.eps
        queries, key_of, q_out = at.reader(self.x), at.reader(self.key), Kept(self.q, (spec.heads, spec.key_dim))
        q_norm, k_norm, head_dim = at.weights[self.q_norm], at.weights[self.k_norm], self.attention.head_dim
        is_plain = spec.scores_means

        def run(step: Step) -> None:
            names, rotation = step.names, step.rotations[spec.rope]
            with span("attn.index"):
                key = key_of(names) if is_plain else rotate(key_of(names)[:, None], rotation, k_norm, eps)[:, 0]
                places = step.batch.page[model.page_groups[kv]], step.batch.offset
                ends = [each[..., head_dim:] for each in model.arena.kv_layers[kv]]
                for end, part in zip(ends, halves_of(key, ends[0].shape[2:].numel()), strict=True):
                    end[places] = part.unflatten(1, end.shape[2:]).to(end.dtype)
                rows = queries(names).unflatten(1, (spec.heads, spec.key_dim))
                names[self.q] = rotate(rows, rotation, q_norm, eps, step.kept.get(q_out))

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        from ..native_attention import index_keys
        from ..native_binding import weight_of

        spec = self.indexer
        to.need("OpKind.kChoose", "indexer of blocks of keys")
        if spec.scores_means:
            raise NoNativeOp("indexer of means of keys")
        kept = to.temporary("key", spec.key_dim)
        q = to.held_as(to.written(at), "Rounded")
        for read, heads, weight, out in ((self.key, 1, self.k_norm, kept), (self.x, spec.heads, self.q_norm, q)):
            x, column, width = to.read(at, read)
            normed = to.temporary("normed", width)
            own = {"norm": "kRms", "eps": self.norm.eps, "weight": weight_of(weight), "groups": heads}
            to.emit("Norm", x=x, column=column, width=spec.key_dim, out=normed, **own)
            _turn(to, (normed, 0), out, (heads, spec.key_dim), spec.rope, 0)
        to.emit("KeepIndex", x=kept, column=0, keys=index_keys(self.attention))

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return self.indexer.query_size

    def detail(self) -> str:
        """See `Op.detail`."""
        heads = f"{self.indexer.heads} heads of {self.indexer.key_dim}"
        return f"{heads}, each normalised, {rope_described(self.indexer.rope)}; writes a key for all heads"


@dataclass(frozen=True, slots=True)
class ChooseBlocks(Op):
    """The blocks that a block indexer gives the highest scores, `[tokens, heads, top]`, for the queries of each
    head of keys and values. k_norm: of the means of blocks' keys, where these are what is scored.
    """

    READS = ("q",)
    WRITES = ("out",)
    IS_CUT = True
    SLOTS = ("k_norm",)

    q: str
    out: str
    attention: AttentionSpec
    indexer: BlockIndexerSpec
    norm: NormSpec
    k_norm: str | None = None

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from .....ops.attention.attention import KeyBlocks, KvCache
        from .....ops.elementwise.elementwise import rotate
        from ...nvtx_spans import span

        spec, mixer, model, kv = self.indexer, self.attention, at.model, at.model.kv_index[at.index]
        chooses, head_dim = mixer.top_k_within(model.max_model_len) is not None, mixer.head_dim
        blocks = KeyBlocks(spec.block, spec.top, spec.local)
        k_norm = None if self.k_norm is None else at.weights[self.k_norm]

        def keys_of(means: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
            # pages may go on behind the longest sequence: no query sees a block there, and the rope has no positions
            rotation = model.rotary[spec.rope].at(firsts.clamp(max=model.max_model_len - 1))
            return rotate(means[:, None], rotation, k_norm, self.norm.eps)[:, 0]

        def run(step: Step) -> None:
            if not chooses:
                return  # queries attend to all that they see
            names = step.names
            with span("attn.index"):
                attention = step.batch.attention.of(model.page_groups[kv])
                k, v = (each[..., head_dim:] for each in model.arena.kv_layers[kv])
                if k_norm is None:
                    names[self.out] = attention.choose_blocks(names[self.q], KvCache(k, v), blocks)
                else:
                    names[self.out] = attention.choose_means(names[self.q], KvCache(k, v), blocks, keys_of)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        from ..native_attention import index_keys

        spec, q = self.indexer, to.held(at, self.q, "Rounded")
        own = {"heads": spec.heads, "top_k": spec.top_k, "block": spec.block, "local": spec.local}
        out = to.held_as(to.written(at), "Indices")
        to.emit("Choose", q=q, out=out, **own, keys=index_keys(self.attention))

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return self.indexer.heads * self.indexer.top

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"{self.indexer.top} blocks of {self.indexer.block} tokens by {self.indexer.scored_by}"


def _turn(
    to: Lowering, x: tuple[Held, int], out: Held, heads: tuple[int, int], rope: RopeConfig | None, first: int
) -> None:
    """List the rotation of heads. x: a buffer and a column. heads: their number and elements. first: that rotates."""
    from ..native_attention import rotation_of

    (held, column), (count, width) = x, heads
    if rope is None:
        to.emit("Copy", x=held, column=column, width=count * width, out=out, out_column=0)
        return
    shape = {"heads": count, "width": width, "first": first, "interleaved": int(rope.interleaved)}
    to.emit("Rotate", x=held, column=column, out=out, **shape, **rotation_of(rope))


def _turning_first(x: Tensor, spec: IndexerSpec) -> Tensor:
    """Queries or keys `[tokens, heads, key]`, with those elements first that rotate: no product of them depends on
    their order.
    """
    return x.roll(spec.rope.dim, -1) if spec.rotates_last and spec.rope is not None else x
