"""The share of a model that one of several ranks computes (tensor parallel, as in Megatron-LM).

Ranks share a layer by heads and by columns of the MLP. Of q, k, v, gate and up a rank has rows of the weight, of o and
down columns: the ranks add up the outputs of o and down. Where one norm is of all heads at once, they also add up the
heads' squares. Of Gated DeltaNet a rank has some heads of keys, each with the heads of values that it serves; of Mamba
2 it has some heads, and of a short convolution some channels. Of every expert a rank has columns, as of an MLP; the
router is whole on each, so that all choose the same experts. Of the output projection each rank has rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...memory.pages.projections import sections_of, share_of
from .config import ModelConfig, UnsupportedModel
from .layers import HeadNorm

#: A part of a tensor: slices of its first dimensions.
Part = tuple[slice, ...]

#: A rank's part of a tensor that ranks do not share.
_WHOLE: tuple[Part, ...] = ((),)

#: A layer, the name of a projection in it, and the kind of a tensor of that.
_PROJECTION = re.compile(r"\.layers\.(\d+)\.\w+\.(.+)\.(weight|bias)$")

#: The path of a tensor in a layer.
_IN_LAYER = re.compile(r"\.layers\.\d+\.(.+)$")


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Shapes of a rank's share, equal on all ranks; they must divide. UnsupportedModel for others.

        Where there are more ranks than K/V heads, several ranks have a copy of the same one.
        """
        size = self.size
        if size == 1:
            return whole
        if why := _why_not(size, whole):
            sizes = ", ".join(str(each) for each in range(1, whole.num_heads + 1) if not _why_not(each, whole))
            raise UnsupportedModel(f"tensor_parallel_size is {size}, and the model's {why}; set it to one of {sizes}")
        return whole.share(size)

    def of_vocab(self, whole: ModelConfig) -> slice:
        """Tokens of which this rank computes logits."""
        first, end = (rank * whole.vocab_size // self.size for rank in (self.rank, self.rank + 1))
        return slice(first, end)

    def of_tensor(self, name: str, whole: ModelConfig) -> tuple[Part, ...]:
        """The share of a checkpoint's tensor that this rank reads: parts, one after the other in its first dimension. A
        weight is `[out, in]`, a bias `[out]`.
        """
        if self.size == 1:
            return _WHOLE
        projections, path = whole.projections, name.rpartition(".")[0]
        module = path.rpartition(".")[2]
        if module == "lm_head":
            return ((self.of_vocab(whole),),)
        if (match := _PROJECTION.search(name)) and (own := projections.of_layer(int(match[1]), match[2])) is not None:
            inputs, outputs = own.share(self.rank, self.size)
            return tuple((each,) if match[3] == "bias" else (each, inputs) for each in outputs)
        if name.endswith(".sinks"):
            heads = whole.num_heads
            return ((share_of(heads, heads, self.rank, self.size),),)
        if module in ("q_norm", "k_norm"):
            return self._of_head_norm(module, whole)
        return self._of_recurrent(name, whole)

    def _of_recurrent(self, name: str, whole: ModelConfig) -> tuple[Part, ...]:
        """The share of a recurrent mixer's tensor other than its projections."""
        if whole.recurrent is None or (match := _IN_LAYER.search(name)) is None:
            return _WHOLE
        tensor = whole.recurrent.tensors.get(match[1])
        if tensor is None or not tensor.sections:
            return _WHOLE
        return tuple((each,) for each in sections_of(tensor.sections, self.rank, self.size))

    def _of_head_norm(self, module: str, whole: ModelConfig) -> tuple[Part, ...]:
        attention = whole.attention
        if attention.head_norm not in (HeadNorm.ALL, HeadNorm.OWN):
            return _WHOLE
        heads = attention.num_heads if module == "q_norm" else attention.num_kv_heads
        return ((share_of(heads * attention.head_dim, heads, self.rank, self.size),),)


def _why_not(size: int, whole: ModelConfig) -> str | None:
    """Why `size` ranks can't have equal shares."""
    counts = [("num_attention_heads {}", whole.num_heads)]
    if whole.experts is not None:
        counts.append(("width of experts, {},", whole.experts.size))
        counts.append(("width of the shared expert, {},", whole.experts.shared_size))
    sizes = [layer.dense.size for layer in whole.layers if layer.dense is not None]
    counts += [("intermediate_size {}", size) for size in dict.fromkeys((whole.intermediate_size, *sizes))]
    for what, count in counts:
        if count % size:
            return f"{what.format(count)} is not divisible by it"
    if whole.recurrent is not None and (field := whole.recurrent.why_not(size)):
        return f"{field} is not divisible by it"
    for kv_heads in dict.fromkeys(it.num_kv_heads for it in whole.attention_shapes):
        if kv_heads % size and size % kv_heads:
            return f"num_key_value_heads {kv_heads} neither divides it nor is a multiple of it"
    return None


#: All of a model, of one rank.
WHOLE = Shard()
