"""Specifications of recurrent mixers: layers whose past is a state of fixed size.

A spec gives its projections, its tensors besides, and its state's shape; `ops` has its formula, in the weights that
`weights` makes. Nothing else depends on which mixer a layer has.

Tests: tests/core/model/specs/test_recurrent_specs.py, tests/core/layers/test_hybrids.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from .products import Proj

if TYPE_CHECKING:
    import torch

    from ....memory.pages.states import StateLayout
    from ....ops.library.native_model import NativeShape
    from ....ops.mixers.recurrent import RecurrentWeights
    from ....ops.mixers.stream_convs import StreamConvs
    from .norms import NormSpec


@dataclass(frozen=True, slots=True)
class MixerTensor:
    """A tensor of a mixer besides its projections."""

    shape: tuple[int, ...]

    sections: tuple[tuple[int, int], ...] = ()
    """Widths of parts of its first dimension, and for each the number of equal units that TP ranks share. None: every
    rank has all of it."""


class Inner(NamedTuple):
    """The projections between a mixer's two parts: of x to time steps' latents, B and C, and of latents to steps."""

    rank: int
    """Width of the latents."""

    state: int
    """Width of B, and of C."""

    norm: NormSpec | None
    """Of each of the three; None: there is none."""


class RecurrentSpec(ABC):
    """A mixer with a state."""

    __slots__ = ()

    title: ClassVar[str]
    """Its name for users."""

    marks_first: ClassVar[bool] = False
    """It computes a sequence's first token otherwise."""

    conv_size: int
    """Tokens that the causal convolution sees, a token itself included."""

    @property
    @abstractmethod
    def channels(self) -> int:
        """Channels of the convolution."""

    @property
    @abstractmethod
    def in_size(self) -> int:
        """Width of the mixer's input: of the input product, unless `input_parts` says otherwise."""

    @property
    def out_size(self) -> int:
        """Width of the mixer's output, the input of the output projection."""
        return self.channels

    @property
    def draft_size(self) -> int:
        """Width of the inputs that make a draft's state."""
        return self.channels

    @property
    def recurrent_shape(self) -> tuple[int, ...]:
        """The heads' state of a sequence in a layer, float32: `(heads, …)`, or `(0,)` without heads."""
        return (0,)

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The convolution's state of a sequence in a layer, float32: its inputs of the last tokens, oldest first."""
        return self.conv_size - 1, self.channels

    @property
    def state_elems(self) -> int:
        """Elements of a sequence's state in a layer."""
        return prod(self.conv_shape) + prod(self.recurrent_shape)

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, MixerTensor]:
        """Its tensors besides the projections, by path in a layer."""

    @property
    def common(self) -> RecurrentSpec:
        """What the mixers of a model's layers have alike."""
        return self

    @abstractmethod
    def weights(self, tensors: Mapping[str, torch.Tensor]) -> RecurrentWeights | StreamConvs:
        """Its formula with these tensors, float32, or a rank's share of them: those of `tensors`."""

    def products(self, hidden: int) -> Mapping[str, tuple[Proj, ...]]:
        """Its projections, by product: `in`, `out`, and what stands between them; none where they are the layer's.
        hidden: width of the residual stream.
        """
        return {}

    @abstractmethod
    def share(self, size: int) -> Self:
        """One of `size` ranks' share."""

    @abstractmethod
    def why_not(self, size: int) -> str | None:
        """The field, with its value, that `size` does not divide, so that ranks would have unequal shares; None: it
        divides all.
        """

    @property
    def no_native(self) -> str | None:
        """What it has that the native library does not compute; None: it computes all of it."""
        return None

    def native_shape(self) -> NativeShape | None:
        """How the native library has it; None: it does not compute it."""
        return None

    @abstractmethod
    def described(self) -> str:
        """Its shape for users."""

    @property
    def input_parts(self) -> tuple[int, int, int, int] | None:
        """Widths of the parts of the input product: its first columns, latents of the output's gates, further columns,
        and latents of decays. The mixer takes gates and decays in place of their latents. None: it takes the product
        as it is.
        """
        return None

    @property
    def inner(self) -> Inner | None:
        """What stands between the two parts of a mixer; None: it is one. The first part takes the input product, the
        second one what the first has given, steps, B, C, and the input's columns from `channels` on.
        """
        return None

    def launch(self, layout: StateLayout) -> Callable[..., None] | None:
        """The launch that steps decoding sequences in pages on a GPU; see `gated_delta.step_in_pages`. None: PyTorch's
        operators do, see `RecurrentWeights.step`.
        """
        return None


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec(RecurrentSpec):
    """Gated DeltaNet (arXiv 2412.06464): linear attention with a state of fixed size; see `ops.mixers.gated_delta`."""

    title: ClassVar[str] = "Gated DeltaNet"

    num_k_heads: int
    """Heads of queries and keys; each serves `num_v_heads / num_k_heads` neighbouring heads of values."""

    num_v_heads: int
    k_dim: int
    """Width of a head of queries or keys."""

    v_dim: int
    """Width of a head of values."""

    eps: float
    """Of the gated norm of each head's output."""

    conv_size: int = 4

    beta: float = 1.0
    """Factor of how much of a new value enters the state; with 2, the state may turn (OLMo Hybrid)."""

    parted: bool = False
    """Queries, keys and values have projections of their own (OLMo Hybrid)."""

    gate_rank: int | None = None
    """Width of the latents that decays are made of, and of those of the output's gates; 0: both are made of the layer's
    input (Ling 2.6). Then each channel of a key has a decay, there are as many heads of values as of keys, all is
    parted, and gates are sigmoids (Kimi Delta Attention, arXiv 2510.26692). None: each head has a decay.
    """

    bound: float = 0.0
    """The least logarithm of a decay, below 0: logarithms are that much times a sigmoid. 0: there is none."""

    sigmoid_gates: bool = False
    """Gates of the output are sigmoids, rather than silu (Qwen4-Exp)."""

    @property
    def by_channel(self) -> bool:
        """True if each channel of a key has a decay; else each head has one."""
        return self.gate_rank is not None

    @property
    def k_size(self) -> int:
        return self.num_k_heads * self.k_dim

    @property
    def v_size(self) -> int:
        return self.num_v_heads * self.v_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.k_size + self.v_size

    @property
    def in_size(self) -> int:
        """Width of the input product: queries, keys and values, then z, b and a; see `input_parts`."""
        return self.channels + self.v_size + self.num_v_heads + self.num_decays

    @property
    def out_size(self) -> int:
        """See `RecurrentSpec.out_size`."""
        return self.v_size

    @property
    def draft_size(self) -> int:
        """Width of the inputs that make a draft's state: queries, keys and values, then b and a."""
        return self.channels + self.num_v_heads + self.num_decays

    @property
    def num_decays(self) -> int:
        """Decays of a token."""
        return self.k_size if self.by_channel else self.num_v_heads

    @property
    def input_parts(self) -> tuple[int, int, int, int] | None:
        """See `RecurrentSpec.input_parts`."""
        return (self.channels, self.gate_rank, self.num_v_heads, self.gate_rank) if self.gate_rank else None

    @property
    def no_native(self) -> str | None:
        """See `RecurrentSpec.no_native`."""
        return "gates of sigmoids" if self.sigmoid_gates else None

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        """The delta rule's state of a sequence in a layer, float32."""
        return self.num_v_heads, self.k_dim, self.v_dim

    @property
    def tensors(self) -> Mapping[str, MixerTensor]:
        """See `RecurrentSpec.tensors`."""
        heads = self.num_k_heads
        conv = ((self.k_size, heads), (self.k_size, heads), (self.v_size, heads))
        at = "self_attn" if self.by_channel else "linear_attn"
        each = MixerTensor((self.num_v_heads,), ((self.num_v_heads, heads),))
        return {
            **conv_tensors(f"{at}.conv1d", self, conv),
            f"{at}.dt_bias": MixerTensor((self.num_decays,), ((self.num_decays, heads),)),
            f"{at}.A_log": each,
            f"{at}.norm.weight": MixerTensor((self.v_dim,)),
        }

    def weights(self, tensors: Mapping[str, torch.Tensor]) -> RecurrentWeights:
        """See `RecurrentSpec.weights`."""
        from ....ops.mixers.gated_delta import DeltaWeights  # needs torch

        found = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
        others = found["dt_bias"], found["A_log"], found["norm.weight"]
        return DeltaWeights(
            taps(found["conv1d.weight"]),
            *others,
            self.eps,
            self.beta,
            by_channel=self.by_channel,
            bound=self.bound,
            sigmoid_gates=self.sigmoid_gates or self.by_channel,
        )

    def products(self, hidden: int) -> Mapping[str, tuple[Proj, ...]]:
        """See `RecurrentSpec.products`. TP ranks share heads of keys, each with the heads of values that it serves."""
        if self.by_channel:
            return self._products_by_channel(hidden)
        at, heads, form, sizes = "linear_attn", self.num_k_heads, "linear", (self.k_size, self.k_size, self.v_size)
        if self.parted:
            own = [Proj(f"{at}.{name}_proj", size, heads, form=form) for name, size in zip("qkv", sizes, strict=True)]
        else:
            own = [Proj(f"{at}.in_proj_qkv", self.channels, heads, sections=sizes)]
        others = {"z": self.v_size, "b": self.num_v_heads, "a": self.num_v_heads}
        own += [Proj(f"{at}.in_proj_{name}", width, heads) for name, width in others.items()]
        return {"in": tuple(own), "out": (Proj(f"{at}.out_proj", hidden, heads),)}

    def _products_by_channel(self, hidden: int) -> Mapping[str, tuple[Proj, ...]]:
        at, heads, form, rank = "self_attn", self.num_v_heads, "linear", self.gate_rank
        sizes = {"q": self.k_size, "k": self.k_size, "v": self.v_size}
        own = [Proj(f"{at}.{name}_proj", size, heads, form=form) for name, size in sizes.items()]
        beta, output = Proj(f"{at}.b_proj", heads, heads), Proj(f"{at}.o_proj", hidden, heads, form=form)
        if not rank:
            gates, decays = (
                Proj(f"{at}.g_proj", self.v_size, heads, form=form),
                Proj(f"{at}.f_proj", self.k_size, heads),
            )
            return {"in": (*own, gates, beta, decays), "out": (output,)}
        return {
            "in": (*own, Proj(f"{at}.g_a_proj", rank), beta, Proj(f"{at}.f_a_proj", rank)),
            "output_gate_up": (Proj(f"{at}.g_b_proj", self.v_size, heads),),
            "decay_up": (Proj(f"{at}.f_b_proj", self.k_size, heads),),
            "out": (output,),
        }

    def share(self, size: int) -> GatedDeltaSpec:
        """One of `size` ranks' share."""
        return replace(self, num_k_heads=self.num_k_heads // size, num_v_heads=self.num_v_heads // size)

    def why_not(self, size: int) -> str | None:
        """See `RecurrentSpec.why_not`."""
        name = "linear_num_heads" if self.by_channel else "linear_num_key_heads"
        return f"{name} {self.num_k_heads}" if self.num_k_heads % size else None

    def native_shape(self) -> NativeShape:
        """See `RecurrentSpec.native_shape`."""
        from ....ops.library.native_model import NativeShape

        heads, dims = (self.num_k_heads, self.num_v_heads), (self.k_dim, self.v_dim)
        own = {"by_channel": self.by_channel, "bound": self.bound}
        return NativeShape("kDelta", *heads, *dims, self.conv_size, self.eps, self.beta, **own)

    def described(self) -> str:
        """See `RecurrentSpec.described`."""
        decays = " with a decay of each channel" if self.by_channel else ""
        return (
            f"{self.title}{decays}, with {self.num_k_heads} heads of {self.k_dim} for keys and {self.num_v_heads} of "
            f"{self.v_dim} for values"
        )

    def launch(self, layout: StateLayout) -> Callable[..., None] | None:
        """See `RecurrentSpec.launch`. The kernel has no factor of new values, and no decays of channels."""
        if self.beta != 1.0 or self.by_channel or self.sigmoid_gates:
            return None
        from ....ops.mixers.gated_delta import step_in_pages
        from ....ops.mixers.gated_delta_schedule import StepConstants

        constants = StepConstants(
            k_heads=self.num_k_heads,
            v_heads=self.num_v_heads,
            k_dim=self.k_dim,
            v_dim=self.v_dim,
            conv=self.conv_size,
            convs_per_page=layout.convs_per_page,
            heads_per_page=layout.heads_per_page,
            conv_pages=layout.num_conv_pages,
            num_pages=layout.num_pages,
            drafts_per_page=layout.drafts_per_page,
            draft_page=layout.first_draft_page,
            most_drafts=layout.shape.most_drafts,
        )
        return partial(step_in_pages, constants=constants)


@dataclass(frozen=True, slots=True)
class ShortConvSpec(RecurrentSpec):
    """A gated short convolution (LFM2); see `ops.mixers.short_conv`."""

    title: ClassVar[str] = "short convolutions"

    size: int
    """Channels: of each of b, c and x."""

    conv_size: int = 3

    bias: bool = False
    """The projections and the convolution have biases."""

    @property
    def channels(self) -> int:
        """See `RecurrentSpec.channels`."""
        return self.size

    @property
    def in_size(self) -> int:
        """Width of the input projection: b, c and x."""
        return 3 * self.size

    @property
    def tensors(self) -> Mapping[str, MixerTensor]:
        """See `RecurrentSpec.tensors`."""
        return conv_tensors("conv.conv", self, ((self.size, self.size),), bias=self.bias)

    def weights(self, tensors: Mapping[str, torch.Tensor]) -> RecurrentWeights:
        """See `RecurrentSpec.weights`."""
        from ....ops.mixers.short_conv import ShortConvWeights  # needs torch

        return ShortConvWeights(taps(tensors["conv.conv.weight"]), tensors.get("conv.conv.bias"))

    def products(self, hidden: int) -> Mapping[str, tuple[Proj, ...]]:
        """See `RecurrentSpec.products`. TP ranks share channels."""
        size = self.size
        return {
            "in": (Proj("conv.in_proj", 3 * size, size, self.bias, (size, size, size)),),
            "out": (Proj("conv.out_proj", hidden, size, self.bias),),
        }

    def share(self, size: int) -> ShortConvSpec:
        """One of `size` ranks' share."""
        return replace(self, size=self.size // size)

    def why_not(self, size: int) -> str | None:
        """See `RecurrentSpec.why_not`."""
        return f"hidden_size {self.size}" if self.size % size else None

    def native_shape(self) -> NativeShape:
        """One head of v, of all channels."""
        from ....ops.library.native_model import NativeShape

        return NativeShape("kShortConv", 0, 1, 0, self.size, self.conv_size, 0.0)

    def described(self) -> str:
        """See `RecurrentSpec.described`."""
        return f"{self.title} over {self.conv_size} tokens"


@dataclass(frozen=True, slots=True)
class MambaSpec(RecurrentSpec):
    """Mamba 2 (arXiv 2405.21060); see `ops.mixers.mamba2`."""

    title: ClassVar[str] = "Mamba 2"

    num_heads: int
    head_dim: int

    num_groups: int
    """Groups of neighbouring heads; each group has one B and one C, and a norm of its own."""

    state_size: int
    """Width of B and C."""

    eps: float
    """Of the gated norm of each group's output."""

    conv_size: int = 4
    conv_bias: bool = True
    bias: bool = False
    """The projections have biases."""

    dt_min: float = 0.0
    """The least time step (Nemotron-H)."""

    group_ranks: int = 1
    """TP ranks that share each group's heads, because there are more ranks than groups."""

    gates_norm: bool | None = False
    """The gate multiplies what was normalised, not what will be; None: nothing is normalised, and the gated output is
    the mixer's (Falcon-H1).
    """

    out_bias: bool | None = None
    """The output projection has a bias; None: if `bias` says so of both."""

    @property
    def size(self) -> int:
        """Width of x, and of the gate z."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.size + 2 * self.num_groups * self.state_size

    @property
    def in_size(self) -> int:
        """Width of the input projection: z, then x, B and C, then dt."""
        return self.size + self.channels + self.num_heads

    @property
    def out_size(self) -> int:
        """See `RecurrentSpec.out_size`."""
        return self.size

    @property
    def draft_size(self) -> int:
        """Width of the inputs that make a draft's state: x, B and C, then dt."""
        return self.channels + self.num_heads

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        """See `RecurrentSpec.recurrent_shape`."""
        return self.num_heads, self.state_size, self.head_dim

    @property
    def tensors(self) -> Mapping[str, MixerTensor]:
        """See `RecurrentSpec.tensors`."""
        heads, groups = self.num_heads, self.num_groups
        shared = (groups * self.state_size, groups)
        conv = ((self.size, heads), shared, shared)
        found = conv_tensors("mamba.conv1d", self, conv, bias=self.conv_bias)
        each, weight = MixerTensor((heads,), ((heads, heads),)), MixerTensor((self.size,), ((self.size, heads),))
        norm = {} if self.gates_norm is None else {"mamba.norm.weight": weight}
        return found | {"mamba.dt_bias": each, "mamba.A_log": each, "mamba.D": each, **norm}

    def weights(self, tensors: Mapping[str, torch.Tensor]) -> RecurrentWeights:
        """See `RecurrentSpec.weights`."""
        from ....ops.mixers.mamba2 import MambaWeights  # needs torch

        found = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
        return MambaWeights(
            taps(found["conv1d.weight"]),
            found.get("conv1d.bias"),
            found["dt_bias"],
            found["A_log"],
            found["D"],
            found.get("norm.weight"),
            self.eps,
            self.num_groups,
            self.group_ranks,
            self.dt_min,
            bool(self.gates_norm),
        )

    def products(self, hidden: int) -> Mapping[str, tuple[Proj, ...]]:
        """See `RecurrentSpec.products`. TP ranks share heads; with more ranks than groups, several have the same B and
        C.
        """
        heads, shared = self.num_heads, self.num_groups * self.state_size
        sections, units = (self.size, self.size, shared, shared, heads), (heads, heads, *(self.num_groups,) * 2, heads)
        out_bias = self.bias if self.out_bias is None else self.out_bias
        return {
            "in": (Proj("mamba.in_proj", self.in_size, heads, self.bias, sections, units),),
            "out": (Proj("mamba.out_proj", hidden, heads, out_bias),),
        }

    def share(self, size: int) -> MambaSpec:
        """One of `size` ranks' share."""
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_groups=max(1, self.num_groups // size),
            group_ranks=max(1, size // self.num_groups),
        )

    def why_not(self, size: int) -> str | None:
        """See `RecurrentSpec.why_not`. A norm of a group is added up by all ranks or by none."""
        if self.num_heads % size:
            return f"the number of Mamba's heads, {self.num_heads},"
        is_shared = self.num_groups > 1 and self.num_groups % size
        return f"the number of Mamba's groups of heads, {self.num_groups}," if is_shared else None

    def native_shape(self) -> NativeShape:
        """Heads of k are groups."""
        from ....ops.library.native_model import NativeShape

        heads, dims = (self.num_groups, self.num_heads), (self.state_size, self.head_dim)
        return NativeShape(
            "kMamba2",
            *heads,
            *dims,
            self.conv_size,
            self.eps,
            dt_min=self.dt_min,
            gates_norm=bool(self.gates_norm),
            group_ranks=self.group_ranks,
        )

    def described(self) -> str:
        """See `RecurrentSpec.described`."""
        groups = "one group" if self.num_groups == 1 else f"{self.num_groups} groups"
        return f"{self.title}, with {self.num_heads} heads of {self.head_dim} by {self.state_size} in {groups}"


def conv_tensors(
    at: str, of: RecurrentSpec, sections: tuple[tuple[int, int], ...], *, bias: bool = False
) -> dict[str, MixerTensor]:
    """Tensors of a mixer's convolution. sections: see `MixerTensor`."""
    weight = {f"{at}.weight": MixerTensor((of.channels, 1, of.conv_size), sections)}
    return weight | ({f"{at}.bias": MixerTensor((of.channels,), sections)} if bias else {})


def taps(conv: torch.Tensor) -> torch.Tensor:
    """A depthwise convolution's weight `[channels, 1, conv_size]` as `[conv_size, channels]`."""
    return conv.squeeze(1).T.contiguous()
