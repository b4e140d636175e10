"""Specifications of attention: its heads, their norms and rotary embedding, latents, and gates of its output.

Tests: tests/core/model/specs/test_model_config.py, tests/core/paths
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Protocol

from ....memory.pages.layout import KvShape
from ....ops.attention.blocks import BlockMask
from .indexer import BlockIndexerSpec, IndexerSpec
from .rope_config import RopeConfig

if TYPE_CHECKING:
    import torch


class HeadNorm(StrEnum):
    """Norm of queries and keys, before they are rotated unless it says otherwise."""

    EACH = "each"
    """Every head by itself, with weights `[head_dim]`: Qwen3, Gemma 3."""

    ALL = "all"
    """All heads of a token at once, with weights `[heads · head_dim]`: OLMo 2."""

    BARE = "bare"
    """Every head by itself, without weights: nanochat, and Llama 4, which norms rotated heads. Rotating changes no
    norm.
    """

    OWN = "own"
    """LayerNorm of every head by itself, each with weights of its own, `[heads · head_dim]`: Command R+."""

    BIASED = "biased"
    """LayerNorm of every head by itself, with weights and biases `[head_dim]` that all heads have: Persimmon."""

    ROTATED = "rotated"
    """Every head by itself after it was rotated, with weights `[head_dim]`: Hunyuan. Rotating changes no norm, so heads
    are divided by their norms before, and the queries alone are multiplied by both weights after.
    """


class OutputGate(StrEnum):
    """Where the gates of attention's output come from."""

    BESIDE_QUERIES = "beside queries"
    """q_proj gives each head a query and then a gate: Qwen3.5. So does q_b_proj over latents: A.X K2."""

    PER_ELEMENT = "per element"
    """g_proj gives every element one: AFMoE."""

    PER_HEAD = "per head"
    """g_proj gives every head one: LFM3, and Dots 3 Note over latents."""


class LogScaling(Protocol):
    """Log-n attention scaling: factors of queries by position, of a frozen class of a family's own or of
    `TemperatureTuning`.
    """

    is_rounded: ClassVar[bool]
    """Factors are rounded to the model's dtype before they multiply."""

    def factors(self, count: int) -> torch.Tensor:
        """The factors of positions 0 … count-1: [count], float32."""
        ...


@dataclass(frozen=True, slots=True)
class TemperatureTuning:
    """Attention temperature tuning: a query of position p is multiplied by
    `1 + beta · log(1 + floor((p + first) / positions))` (Llama 4, Ministral 3).
    """

    is_rounded: ClassVar[bool] = True

    beta: float
    positions: int

    first: int = 0
    """Number of the first position."""

    def factors(self, count: int) -> torch.Tensor:
        """See `LogScaling.factors`."""
        import torch

        numbers = torch.arange(self.first, self.first + count)
        return 1 + self.beta * torch.log(1 + torch.floor(numbers / self.positions))


@dataclass(frozen=True, slots=True)
class RelativeSpec:
    """Learned numbers are added to scores (Inkling): a head's, of a query whose key is d tokens before it, is the
    product of the query's own state, which r_proj makes of the layer's input, and of the d-th learned vector.
    """

    dim: int
    """Elements of a state."""

    extent: int
    """Learned vectors; nothing is added to scores of keys that are as far away, or farther."""


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434 §2.1): of a token, one latent is kept in place of the keys
    and values of all heads, with a rotated key that all heads share.

    Head h has the key `[key_h · c, k_rotated]` and the value `value_h · c`, where c is the latent. Its score is
    `(key_hᵀ · q_h) · c + q_rotated · k_rotated` and its output `value_h · Σ weight · c`. So the cache has one KV head,
    whose key is `[c, k_rotated]` and whose value is c: see `ops.attention.latents`.
    """

    q_rank: int
    """Width of the queries' latents; 0: queries are made of the layer's input."""

    kv_rank: int
    """Width of c."""

    key_dim: int
    """Elements of a head's key that are not rotated."""

    rotated_dim: int
    value_dim: int
    """Elements of a head's value."""

    eps: float
    """Of the norms of latents."""

    q_factor: float = 1.0
    """Of the normalised latents of queries, and of an indexer's (Dots 3 Note)."""

    kv_factor: float = 1.0
    """Of c, as that of c_q."""

    form: str = ""
    """Tells its projections apart from those of other layers' latents of other sizes; see `Projection`."""

    def input_gate(self, gate: OutputGate | None) -> int:
        """Elements of the gates that the layer's input gives each head."""
        return self.value_dim if gate is OutputGate.PER_ELEMENT else int(gate is OutputGate.PER_HEAD)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    scale: float
    """Factor of the scores q · k, usually head_dim^-0.5."""

    rope: RopeConfig | None
    """None: queries and keys are not rotated (NoPE)."""

    window: int | None = None
    """Tokens that a query sees, itself included; None: all before it."""

    chunked: bool = False
    """The window begins at a multiple of its length: a query sees the tokens of its own chunk alone (Llama 4)."""

    softcap: float | None = None
    """Scores s become `softcap · tanh(s / softcap)`."""

    head_norm: HeadNorm | None = None
    qkv_bias: bool = False
    o_bias: bool = False

    output_gate: OutputGate | None = None
    """Gates of what was attended: `o_proj(attended · sigmoid(gate))`, unless `softplus_gates`."""

    softplus_gates: bool = False
    """Gates multiply by `log(1 + e^gate)`, rather than by their sigmoids (Laguna)."""

    log_scaling: LogScaling | None = None
    """Factors of queries by position; None: there are none."""

    relative: RelativeSpec | None = None
    """What is added to scores, with the factors of queries (`log_scaling`); None: nothing is."""

    sinks: bool = False
    """Each head has a learned score that joins the softmax's denominator (gpt-oss)."""

    slopes: tuple[float, ...] = ()
    """What a head's score loses for each token between its key and the query (ALiBi, arXiv 2108.12409), of all ranks'
    heads; empty: nothing.
    """

    clip: float | None = None
    """Queries, keys and values are at most so large, before they are normalised and rotated (MPT, OLMo)."""

    kv_copies: int = 1
    """TP ranks that have the same K/V heads, because there are more ranks than heads."""

    latent: LatentSpec | None = None
    """Keys and values are latents. Then there is one KV head, of `kv_rank + rotated_dim` elements."""

    top_k: int | None = None
    """Tokens that a query attends to, of those that it sees: an indexer chooses them. None: all."""

    indexer: IndexerSpec | None = None
    """Chooses these tokens; None: they are those of the last layer before it that has an indexer (GLM-5)."""

    block_indexer: BlockIndexerSpec | None = None
    """Chooses the blocks of tokens that queries of a head of keys and values attend to (MiniMax-M3, Qwen4-Exp)."""

    value_dim: int | None = None
    """Elements of a head's value where they are fewer than its key's (MiMo-V2); None: as many. Pages have as many of
    both: a value's others are zeros.
    """

    keys_are_values: bool = False
    """There is no v_proj: the output of k_proj, before its norm, is the values, too (Gemma 4)."""

    value_norm: bool = False
    """Every head of values is normalised, without weights (Gemma 4)."""

    shares_kv: bool = False
    """It has no keys and values of its own: it reads those of the last layer before it that has its form and keys
    (Gemma 4). Over latents it may have an indexer, whose keys are all that its pages keep.
    """

    blocks: BlockMask = BlockMask.NONE
    """What a token of a block sees of it."""

    form: str = ""
    """Tells its projections apart from those of other layers' attention of another shape; see `Projection`."""

    def window_within(self, max_model_len: int) -> int | None:
        """The window, unless no request of so many tokens can leave it."""
        return None if self.window is None or self.window >= max_model_len else self.window

    def top_k_within(self, max_model_len: int) -> int | None:
        """`top_k`, unless no request of so many tokens has more."""
        return None if self.top_k is None or self.top_k >= max_model_len else self.top_k

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def has_pages(self) -> bool:
        """True if pages keep something of its own."""
        return not self.shares_kv or self.indexer is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """What layers of one form have alike."""
        return (self.num_heads, self.num_kv_heads, self.head_dim, self.q_rows)

    @property
    def cached_value_dim(self) -> int | None:
        """Elements of a cached key that are its value; None: values are cached, too."""
        return None if self.latent is None else self.latent.kv_rank

    @property
    def query_dim(self) -> int:
        """Elements of a head's query."""
        return self.head_dim if self.latent is None else self.latent.key_dim + self.latent.rotated_dim

    @property
    def attended_dim(self) -> int:
        """Elements of a head's output, as attention's kernels give them."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def out_size(self) -> int:
        """Inputs of o_proj."""
        return self.num_heads * (self.value_dim or self.attended_dim)

    @property
    def q_rows(self) -> int:
        """Rows of q_proj: queries, and the gates where it gives them."""
        return self.q_size * (1 + (self.output_gate is OutputGate.BESIDE_QUERIES))

    @property
    def gate_size(self) -> int:
        """Elements of the gates of a token's output."""
        return 0 if self.output_gate is None else self.num_heads * self.attended_dim

    @property
    def kv_shape(self) -> KvShape:
        """Of its keys and values, with what the indexer keeps at the end: of a block indexer, parts of it behind the
        key and the value of each head.
        """
        further = 0 if self.indexer is None else self.indexer.kept_dim
        if self.shares_kv:
            return KvShape(1, further)
        if (index := self.block_indexer) is not None:
            further = -(-index.key_dim // (2 * self.num_kv_heads))
        return KvShape(self.num_kv_heads, self.head_dim + further)

    def share(self, size: int) -> AttentionSpec:
        """One of `size` ranks' share."""
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=max(1, self.num_kv_heads // size),
            kv_copies=max(1, size // self.num_kv_heads),
            block_indexer=None if self.block_indexer is None else self.block_indexer.share(size),
        )
