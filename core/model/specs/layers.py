"""Specifications of a model's layers: values alone, read from a checkpoint by its family and obeyed by every decoder.

A layer is a mixer of tokens (attention, or a recurrent one, see `recurrent`) and a feed-forward part (gated or not, or
a mixture of experts), each with norms around it, added to the residual stream x. With `Norms.BEFORE`:

    x += residual_multiplier · mixer(norm(x))
    x += residual_multiplier · feed_forward(norm(x))

A layer may have one of the two alone, or two mixers side by side: see `MixerBeside`.

Tests: tests/core/model/specs/test_model_config.py, tests/core/paths
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING

from ....memory.pages.layer_projections import (
    attention_projections,
    gated_projections,
    input_projections,
    latent_projections,
    low_rank_projections,
    mixture_projections,
    projections_beside,
)
from ....memory.pages.layout import KvShape
from ....memory.pages.projections import Group, Projection
from ....ops.moe.routing import Routing as Routing
from ....ops.moe.routing import Scoring as Scoring
from .recurrent import RecurrentSpec
from .rope_config import RopeConfig

if TYPE_CHECKING:
    import torch


class Activation(StrEnum):
    """Activation of a gated feed-forward part, by transformers' names."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """`(up + 1) · gate · sigmoid(alpha · gate)`, with gate at most `limit` and up within ± `limit` (gpt-oss)."""

    alpha: float
    limit: float


class UngatedActivation(StrEnum):
    """Activation of a feed-forward part without a gate, by transformers' names."""

    GELU_TANH = "gelu_pytorch_tanh"

    GELU = "gelu"
    """With the error function: GPT-NeoX."""

    RELU_SQUARED = "relu2"
    """`max(x, 0)²`: Nemotron, Arcee."""

    XIELU = "xielu"
    """See `ops.elementwise.elementwise.xielu`; each layer has learned parameters (Apertus)."""


class Norms(StrEnum):
    """Where the norms of a layer stand."""

    BEFORE = "before"
    """`x += f(norm(x))`: Llama."""

    AFTER = "after"
    """`x += norm(f(x))`: OLMo 2, EXAONE 4."""

    AROUND = "around"
    """`x += norm_out(f(norm(x)))`: Gemma, GLM-4."""

    PARALLEL = "parallel"
    """`n = norm(x); x += mixer(n) + feed_forward(n)`: Cohere."""

    PARALLEL_APART = "parallel, apart"
    """`x += mixer(norm(x)) + feed_forward(norm_2(x))`: GPT-NeoX."""


#: Those with which the feed-forward part does not read the mixer's output.
PARALLEL = frozenset((Norms.PARALLEL, Norms.PARALLEL_APART))


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

    ROTATED = "rotated"
    """Every head by itself after it was rotated, with weights `[head_dim]`: Hunyuan. Rotating changes no norm, so heads
    are divided by their norms before, and the queries alone are multiplied by both weights after.
    """


class OutputGate(StrEnum):
    """Where the gates of attention's output come from."""

    BESIDE_QUERIES = "beside queries"
    """q_proj gives each head a query and then a gate: Qwen3.5."""

    APART = "apart"
    """g_proj gives every element one: AFMoE."""

    OF_HEADS = "of heads"
    """g_proj gives every head one: LFM3."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm over the last dimension, with statistics in float32."""

    eps: float

    centered: bool = False
    """LayerNorm without bias, which subtracts the mean (Cohere), rather than RMSNorm."""

    one_plus: bool = False
    """The checkpoint stores weight - 1 (Gemma)."""

    wide: bool = False
    """Multiply by the weight in float32 and round then (Gemma, OLMo 2), rather than round before (Llama)."""

    biased: bool = False
    """A bias is added: LayerNorm as PyTorch has it (StarCoder 2). `centered` and `wide` are true, too."""

    weightless: bool = False
    """The checkpoint has no weight, which is 1 (OLMo)."""


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries grow with their position p, by `1 + beta · log(1 + floor((p + first) / positions))` (Llama 4,
    Ministral 3).
    """

    beta: float
    positions: int

    first: int = 0
    """Number of the first position."""

    def factors(self, count: int) -> torch.Tensor:
        """Of positions 0 … count-1, float32."""
        import torch

        numbers = torch.arange(self.first, self.first + count)
        return 1 + self.beta * torch.log(1 + torch.floor(numbers / self.positions))


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
    """Gates of what was attended: `o_proj(attended · sigmoid(gate))`."""

    query_growth: QueryGrowth | None = None

    sinks: bool = False
    """Each head has a learned score that joins the softmax's denominator (gpt-oss)."""

    kv_copies: int = 1
    """TP ranks that have the same K/V heads, because there are more ranks than heads."""

    latent: LatentSpec | None = None
    """Keys and values are latents. Then there is one KV head, of `kv_rank + rotated_dim` elements."""

    keys_are_values: bool = False
    """There is no v_proj: the output of k_proj, before its norm, is the values, too (Gemma 4)."""

    value_norm: bool = False
    """Every head of values is normalised, without weights (Gemma 4)."""

    shares_kv: bool = False
    """It has no keys and values of its own: it reads those of the last layer before it that has its form and keys
    (Gemma 4).
    """

    form: str = ""
    """Tells its projections apart from those of other layers' attention of another shape; see `Projection`."""

    def window_within(self, max_model_len: int) -> int | None:
        """The window, unless no request of so many tokens can leave it."""
        return None if self.window is None or self.window >= max_model_len else self.window

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

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
        """Elements of a head's output."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def q_rows(self) -> int:
        """Rows of q_proj: queries, and the gates where it gives them."""
        return self.q_size * (1 + (self.output_gate is OutputGate.BESIDE_QUERIES))

    @property
    def gate_size(self) -> int:
        """Elements of the gates of a token's output."""
        return 0 if self.output_gate is None else self.q_size

    @property
    def biased_inputs(self) -> list[str]:
        """Paths of the projections that `qkv_bias` is of."""
        parts = ("q_proj", "k_proj", "v_proj") if self.latent is None else ("q_a_proj", "kv_a_proj_with_mqa")
        return [f"self_attn.{part}" for part in parts]

    def projections(self, hidden: int) -> tuple[Projection, ...]:
        """Its matrices. hidden: width of the residual stream."""
        if (latent := self.latent) is not None:
            widths = {"key": latent.key_dim, "rotated": latent.rotated_dim, "value": latent.value_dim}
            return latent_projections(hidden, self.num_heads, q_rank=latent.q_rank, kv_rank=latent.kv_rank, **widths)
        *inputs, output = attention_projections(
            hidden,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            gate=self.output_gate is OutputGate.BESIDE_QUERIES,
            keys_and_values=0 if self.shares_kv else 1 if self.keys_are_values else 2,
            form=self.form,
        )
        if self.output_gate in (OutputGate.APART, OutputGate.OF_HEADS):
            size = self.q_size if self.output_gate is OutputGate.APART else self.num_heads
            gate = Projection("self_attn.g_proj", Group.MIXER_IN, hidden, size, self.num_heads, form=self.form)
            inputs.append(gate)
        return (*inputs, output)

    @property
    def kv_shape(self) -> KvShape:
        """Of its keys and values."""
        return KvShape(self.num_kv_heads, self.head_dim)

    def share(self, size: int) -> AttentionSpec:
        """One of `size` ranks' share."""
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=max(1, self.num_kv_heads // size),
            kv_copies=max(1, size // self.num_kv_heads),
        )


@dataclass(frozen=True, slots=True)
class GatedSpec:
    """`factor · down(activation(gate_factor · gate(x)) · up(x))`."""

    size: int
    """Width of gate and up."""

    activation: Activation = Activation.SILU
    bias: bool = False

    form: str = ""
    """See `AttentionSpec.form`."""

    gate_factor: float = 1.0
    """Of gate's output, before its activation (Falcon-H1)."""

    factor: float = 1.0
    """Of the part's output, likewise."""

    sparsity: float = 0.0
    """Share of a token's gates that become 0 if they are normally distributed: those below the cutoff of that share,
    which is subtracted from the others (Gemma 3n). 0: none.
    """

    def projections(self, hidden: int) -> tuple[Projection, ...]:
        """See `AttentionSpec.projections`."""
        return gated_projections(hidden, self.size, self.form)

    def share(self, size: int) -> GatedSpec:
        """One of `size` ranks' share."""
        return replace(self, size=self.size // size)


@dataclass(frozen=True, slots=True)
class UngatedSpec:
    """`down(activation(up(x)))`."""

    size: int
    """Width of up."""

    activation: UngatedActivation
    bias: bool = False

    form = ""

    def projections(self, hidden: int) -> tuple[Projection, ...]:
        """See `AttentionSpec.projections`."""
        return gated_projections(hidden, self.size)[1:]

    def share(self, size: int) -> UngatedSpec:
        """One of `size` ranks' share."""
        return replace(self, size=self.size // size)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, each a gated part: `Σ weight · down(activation(gate(x)) · up(x))` of the experts that a
    router chooses for a token, and of the shared one where there is one. `ClampedSwiglu` has a form of its own; with an
    `UngatedActivation` each is `down(activation(up(x)))`.
    """

    count: int

    size: int
    """Width of an expert's gate and up."""

    routing: Routing
    activation: Activation | ClampedSwiglu | UngatedActivation = Activation.SILU

    shared_size: int = 0
    """Width of the gate and up of an expert that every token goes to; 0: there is none."""

    shared_gate: bool = False
    """The shared expert's output is multiplied by the sigmoid of a product of x (Qwen3.5)."""

    biased: bool = False
    """Each expert's gate, up and down have biases (gpt-oss)."""

    factor: float = 1.0
    """Of the sum of all experts' outputs (Cohere 2 MoE)."""

    bias = False

    @property
    def is_gated(self) -> bool:
        """True if experts have gates."""
        return not isinstance(self.activation, UngatedActivation)

    @property
    def active_size(self) -> int:
        """Width of all that a token goes through."""
        return self.routing.per_token * self.size + self.shared_size

    @property
    def share_per_token(self) -> float:
        """Share of the experts that a token goes to."""
        return self.routing.per_token / self.count

    def projections(self, hidden: int) -> tuple[Projection, ...]:
        """See `AttentionSpec.projections`; those of experts are of each one."""
        shared_gate, has_gates = self.shared_gate, self.is_gated
        return mixture_projections(
            hidden, self.count, self.size, self.shared_size, shared_gate=shared_gate, has_gates=has_gates
        )

    def share(self, size: int) -> Experts:
        """One of `size` ranks' share: of all experts some columns."""
        return replace(self, size=self.size // size, shared_size=self.shared_size // size)


@dataclass(frozen=True, slots=True)
class LayerInputSpec:
    """Each layer gates a further input of a token (see `LayerInputs`), behind its feed-forward part.

    x += norm(project(activation(gate(x)) · input))
    """

    size: int
    """Width of a layer's input."""

    vocab: int
    """Rows of the table."""

    first_for_others: bool = False
    """Tokens beyond the table have its first row (Gemma 3n)."""


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Tokens of images or of sound, whose embeddings a module of their own makes of its rows (Gemma 3n):
    `norm(project(norm(row)))`, where the outer norm has no weights.
    """

    module: str
    """Its name beside the text part, such as `embed_vision`."""

    first: int
    """The first token."""

    count: int
    rows: int
    """Rows of the module's table, of which the first are the tokens'."""

    width: int
    """Elements of a row."""

    eps: float


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """The residual is several streams of one width: a layer computes one of them, and predicts and corrects the others
    (AltUp, arXiv 2301.13310; Gemma 3n). See `streams`.
    """

    count: int

    active: int
    """The stream that layers compute."""

    rank: int
    """Width between the two matrices of what a layer adds beside attention, `n + norm(up(down(n)))` of attention's
    input n (LAuReL, arXiv 2411.07501).
    """

    scaled: bool = True
    """The active stream is multiplied by learned numbers where it gates the layer's further input."""


@dataclass(frozen=True, slots=True)
class MixerBeside:
    """A recurrent mixer beside attention (Falcon-H1).

    Both read one norm n of the residual stream, and are added:

        attention_out · attention(attention_in · n) + out_factor · mixer(in_factor · n)

    None of the factors may be part of a weight: adapters change both sides of the product, and biases come after it.
    """

    mixer: RecurrentSpec
    in_factor: float = 1.0
    out_factor: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0

    section_factors: tuple[float, ...] = ()
    """Of the sections of the input projection's outputs (see `Projection.sections`); empty: they have none."""

    def share(self, size: int) -> MixerBeside:
        """One of `size` ranks' share."""
        return replace(self, mixer=self.mixer.share(size))


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer."""

    mixer: AttentionSpec | RecurrentSpec | None
    """None: the layer is a feed-forward part alone (Nemotron-H)."""

    feed_forward: GatedSpec | UngatedSpec | Experts | None
    """None: the layer is a mixer alone."""

    norms: Norms = Norms.BEFORE

    residual_multiplier: float = 1.0
    """Factor of each part's addition to the residual stream (Granite)."""

    scaled: bool = False
    """The residual stream is multiplied by a learned number behind the layer (Gemma 4)."""

    input_size: int = 0
    """See `LayerInputSpec.size`; 0: the layer has no further input."""

    beside: Experts | None = None
    """A mixture of experts beside a gated feed-forward part (Gemma 4). The mixture reads the residual stream r through
    a norm of its own, its router through another one; with `Norms.AROUND`:

        x += norm_out(norm_1(feed_forward(norm(r))) + norm_2(experts(norm_3(r))))
    """

    mixer_beside: MixerBeside | None = None
    """A second mixer of a layer with attention."""

    streams: StreamsSpec | None = None
    """None: the residual is one stream. A layer of several is whole, has `Norms.AROUND` and a further input."""

    @property
    def is_whole(self) -> bool:
        """True if it has a mixer and a feed-forward part."""
        return self.mixer is not None and self.feed_forward is not None

    @property
    def attention(self) -> AttentionSpec | None:
        """The mixer, if it is attention."""
        return self.mixer if isinstance(self.mixer, AttentionSpec) else None

    @property
    def rope(self) -> RopeConfig | None:
        """The rope of its attention, if it has either."""
        return self.mixer.rope if isinstance(self.mixer, AttentionSpec) else None

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The mixer with a state, alone or beside attention."""
        if self.mixer_beside is not None:
            return self.mixer_beside.mixer
        return self.mixer if isinstance(self.mixer, RecurrentSpec) else None

    @property
    def experts(self) -> Experts | None:
        """The mixture of experts, alone or in addition to a gated part."""
        return self.feed_forward if isinstance(self.feed_forward, Experts) else self.beside

    @property
    def dense(self) -> GatedSpec | UngatedSpec | None:
        """The feed-forward part, unless it is a mixture of experts."""
        return None if isinstance(self.feed_forward, Experts) else self.feed_forward

    @property
    def biased(self) -> frozenset[str]:
        """Paths of the projections with a bias."""
        is_biased = self.feed_forward is not None and self.feed_forward.bias
        found = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] if is_biased else []
        found = found[1:] if isinstance(self.feed_forward, UngatedSpec) else found
        if (mixer := self.attention) is not None:
            found += mixer.biased_inputs if mixer.qkv_bias else []
            found += ["self_attn.o_proj"] if mixer.o_bias else []
        if self.recurrent is not None:
            found += self.recurrent.biased
        return frozenset(found)

    def projections(self, hidden: int) -> tuple[Projection, ...]:
        """The matrices of the layer, by their paths in Llama's checkpoints, or Qwen3.5's."""
        further = () if self.beside is None else self.beside.projections(hidden)
        further += input_projections(hidden, self.input_size) if self.input_size else ()
        further += () if self.mixer_beside is None else projections_beside(self.mixer_beside.mixer.projections(hidden))
        further += () if self.streams is None else low_rank_projections(hidden, self.streams.rank)
        parts = [part.projections(hidden) for part in (self.mixer, self.feed_forward) if part is not None]
        return (*chain(*parts), *further)

    def share(self, size: int) -> LayerSpec:
        """One of `size` ranks' share."""
        return replace(
            self,
            mixer=None if self.mixer is None else self.mixer.share(size),
            feed_forward=None if self.feed_forward is None else self.feed_forward.share(size),
            beside=None if self.beside is None else self.beside.share(size),
            mixer_beside=None if self.mixer_beside is None else self.mixer_beside.share(size),
        )


def kv_index(layers: Sequence[LayerSpec]) -> list[int]:
    """For each layer the place of its KV among the layers with KV of their own; of others that of the one before."""
    found, count, last = [], 0, {}
    for mixer in (layer.attention for layer in layers):
        if mixer is not None and not mixer.shares_kv:
            last[mixer.form] = count
            count += 1
        found.append(count - 1 if mixer is None else last[mixer.form])
    return found
