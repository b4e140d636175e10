"""Where a checkpoint has the parts of a model, as a family says it.

Tests: tests/core/model/weights/test_weight_loader.py
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ....memory.files.module_paths import StackedSides
from ....memory.files.names.layer_numbers import Renumbers

#: Where Llama's layers have their norms; the other parts are named as in `weights.tensor_shapes`.
LLAMA_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}

#: Norms of families that also norm the output of each part.
AROUND_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}

#: Norms of families that norm nothing but the output of each part.
AFTER_NORMS = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}

#: Norms of latents, which stand where others have those of heads.
LATENT_NORMS = {"self_attn.q_norm": "self_attn.q_a_layernorm", "self_attn.k_norm": "self_attn.kv_a_layernorm"}

#: A router's correction, by its name in `tensor_parts.tensor_shapes`: see `Routing.corrected`.
CORRECTION = "mlp.gate.e_score_correction_bias"

#: The convolution of queries, keys and values, which published checkpoints have in three tensors. So does what
#: transformers saves, in three equal parts, however wide queries, keys and values are.
JOINED_CONVS = {"conv1d.weight": ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")}

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
FUSED_QKV = {"self_attn.qkv_proj": QKV}
FUSED_GATE_UP = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}

#: Matrices of a gated feed-forward part, with the names that Mixtral's experts have.
LETTERS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def gated_names(part: str, name: str, letters: Mapping[str, str] | None = None) -> dict[str, str]:
    """The matrices of a gated part → their names in a part of this name. letters: None: they have their own."""
    return {f"{part}.{each}": f"{name}.{letters[each] if letters else each}" for each in LETTERS}


#: DeepSeek-V3's name of experts that every token goes to.
SHARED_EXPERTS = gated_names("mlp.shared_expert", "mlp.shared_experts")


def stacked_names(name: str) -> dict[str, tuple[str, ...]]:
    """Tensors of all experts in a part of this name, as transformers keeps them, and some checkpoints do."""
    return {f"{name}.gate_up_proj": ("gate_proj", "up_proj"), f"{name}.down_proj": ("down_proj",)}


STACKED_EXPERTS = stacked_names("mlp.experts")


#: A part that all layers with attention have.
_OUTPUT = "self_attn.o_proj"

#: Ends of names of its weights, plain or quantised.
_WEIGHTS = ("weight", "qweight", "weight_packed")

#: Ends of names of a stacked tensor's parts where its weights are packed (MXFP4), and of its biases.
PACKED, BIASES = ("_blocks", "_scales"), "_bias"


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Where a checkpoint has the parts of a model."""

    prefixes: tuple[str, ...] = ("model.", "")
    """Names before `embed`, `layers` and `norm`; the first under which the checkpoint has layers counts.
    A checkpoint without a head (`AutoModel`) has none."""

    heads: tuple[str, ...] = ("lm_head.weight",)
    """Names of the output projection, likewise."""

    head_part: str = ""
    """The name of the part whose class has the output projection, in models that have others (Llama 4). PEFT asks the
    whole model, which does not say that the projection is tied: it has none of the rows that PEFT trains."""

    norm: str = "norm"
    """The name of the final norm."""

    embeddings: str = "embed_tokens"
    """The name of the token embeddings."""

    positions: str = ""
    """The name of the table of positions, of families that have one."""

    rope_factors: str = "rotary_emb.alpha"
    """The name of the rope's learned factors, of families that have them."""

    embedding_norm: str = ""
    """The name of the norm of embeddings, of families that have one with weights."""

    layers: str = "layers"
    """The name before a layer's number."""

    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType(LLAMA_NORMS))
    """A part of a layer → its name there, where the two differ; `{}` stands for an expert's number, or for that of an
    invocation of a shared block. A checkpoint that has the part under its own name has it there. A part with the end of
    its tensor's name, such as `mlp.gate.e_score_correction_bias`, is that tensor alone."""

    numbers: Renumbers | None = None
    """How layers are numbered where several stand under one number, or what of the last one is behind all; None: each
    layer has its number, and all of its parts.
    """

    older: Mapping[str, str | tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """A part of a layer → its name, or names, in checkpoints that don't have it under that of `names`; as there, also
    those of a tensor alone.
    """

    fused: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """A name in a layer → the parts whose rows are stacked in that tensor, in order; used unless the checkpoint has a
    tensor for each of them instead."""

    separate: tuple[str, ...] = ()
    """Tensors of `fused` whose parts are modules of their own in transformers, as adapters have them (Lara Mini)."""

    joined: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """A tensor in a layer → the tensors whose rows follow one another in it, where a checkpoint has these instead. How
    the rows are shared among them is the checkpoint's."""

    by_unit: tuple[str, ...] = ()
    """Tensors of `fused` that have the first unit's rows of each part, then the second unit's, and so on; units are as
    TP ranks share them, such as heads (Qwen3-Next)."""

    units: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """A tensor of `by_unit` → its number of units, where they aren't such (CodeGen)."""

    stacked_experts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType(STACKED_EXPERTS))
    """A tensor in a layer `[experts, out, in]` → the matrices of each expert whose rows are stacked in it, in order;
    used where the checkpoint has it instead of a tensor for each expert."""

    stacked: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """Likewise, of experts that stand elsewhere in a layer: the whole paths of matrices, where `{}` stands for an
    expert's number."""

    inputs_first: bool = False
    """Matrices of layers, but for experts', are `[in, out]` (GPT-2)."""

    transposed_parts: tuple[str, ...] = ()
    """Parts of layers that are `[in, out]` where others aren't, with the ends of their names (ERNIE 4.5 VL)."""

    alternates: bool = False
    """In a stacked tensor, rows of the matrices alternate, rather than follow one another (gpt-oss)."""

    transposed: bool = False
    """A stacked tensor of weights is `[experts, in, out]`, unless it is packed (gpt-oss)."""

    flat: bool = False
    """Stacked tensors are matrices: `[experts · out, in]`, and `[experts · in, out]` of outputs. PEFT takes them for
    those of one module, so adapters have none of them (DBRX)."""

    swapped: bool = False
    """`transposed`, and PEFT takes it for `[experts, out, in]`, since its module doesn't say so (Llama 4)."""

    by_shape: bool = False
    """A `transposed` tensor whose shape is `[experts, out, in]` isn't, as transformers saves it (Qwen3-VL-MoE)."""

    adapter_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """A part of a layer → a further name under which adapters may have it: of transformers in memory, or Tinker's."""

    no_parameters: tuple[str, ...] = ()
    """Ends of parameters' names that PEFT adds to an adapter's with "all-linear", and that the model does not have: it
    takes the names of a similar one (LongCat-Flash).
    """

    left_out: tuple[str, ...] = ()
    """Beginnings of the names of tensors that text does not need, such as a vision tower's."""

    wrapped: tuple[str, ...] = ()
    """Vectors that are stored as matrices, row after row, by their names in `weights.tensor_shapes` (ERNIE 4.5)."""

    published: tuple[TensorNames, ...] = ()
    """The names in published checkpoints, where transformers has others, which adapters have, too (EXAONE 3)."""

    @property
    def stacked_sides(self) -> StackedSides:
        """Which versions of PEFT save A and B of stacked experts swapped."""
        if self.swapped:
            return StackedSides.SINCE
        if not self.transposed:
            return StackedSides.BEFORE
        return StackedSides.BY_TRANSFORMERS if self.by_shape else StackedSides.NEVER

    def at_invocation(self, invocation: int) -> TensorNames:
        """The names in a layer with this invocation of a shared block, whose number `{}` stands for."""
        names = {part: name.replace("{}", str(invocation)) for part, name in self.names.items()}
        return replace(self, names=names)

    def of(self, tensors: Container[str]) -> TensorNames:
        """The names in a checkpoint that has these tensors: of `published` those by which it has a first layer."""
        return next((each for each in self.published if each.has_layers(tensors)), self)

    def has_layers(self, tensors: Container[str]) -> bool:
        """True if a checkpoint that has these tensors has a first layer by these names."""
        output = f"{self.layers}.0.{self.names.get(_OUTPUT, _OUTPUT)}"
        return any(f"{prefix}{output}.{end}" in tensors for prefix in self.prefixes for end in _WEIGHTS)


LLAMA_TENSORS = TensorNames()

#: Of the text part next to a vision tower (Mistral 3, Gemma 3).
BESIDE_VISION = TensorNames(
    prefixes=("language_model.model.", "model.language_model."),
    heads=("language_model.lm_head.weight", "lm_head.weight"),
    left_out=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)

#: Of the text part next to a tower `visual` (Qwen-VL, GLM-V).
TEXT_AND_IMAGES = TensorNames(prefixes=("model.language_model.", "model."), left_out=("visual.", "model.visual."))
