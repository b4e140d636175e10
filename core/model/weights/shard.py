"""The share of a model that one of several ranks computes (tensor parallel, as in Megatron-LM).

Ranks share a layer by heads and by columns of the MLP. Of q, k, v, gate and up a rank has rows of the weight, of o and
down columns: the ranks add up the outputs of o and down. Where one norm is of all heads at once, they also add up the
heads' squares. Of Gated DeltaNet a rank has some heads of keys, each with the heads of values that it serves; of Mamba
2 it has some heads, and of a short convolution some channels. Of every expert a rank has columns, as of an MLP; the
router is whole on each, so that all choose the same experts. Of the output projection each rank has rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig, UnsupportedModel


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


def _why_not(size: int, whole: ModelConfig) -> str | None:
    """Why `size` ranks can't have equal shares."""
    if why := next(filter(None, (layer.why_whole for layer in whole.layers)), None):
        return why
    for what, count in _counts(whole):
        if count % size:
            return f"{what.format(count)} is not divisible by it"
    if whole.recurrent is not None and (field := whole.recurrent.why_not(size)):
        return f"{field} is not divisible by it"
    if why := next(filter(None, (_why_not_heads(size, it) for it in whole.attention_shapes)), None):
        return why
    field = next(filter(None, (layer.why_not(size) for layer in whole.layers)), None)
    return None if field is None else f"{field} is not divisible by it"


def _why_not_heads(size: int, mixer: AttentionSpec) -> str | None:
    """Likewise, of heads of keys and values, of which ranks may have copies."""
    heads = mixer.num_kv_heads
    if heads % size and size % heads:
        return f"num_key_value_heads {heads} neither divides it nor is a multiple of it"
    return None


def _counts(whole: ModelConfig) -> list[tuple[str, int]]:
    """What ranks share in equal parts, each with its name in errors."""
    counts = [("num_attention_heads {}", it.num_heads) for it in whole.attention_shapes]
    if whole.experts is not None:
        counts += [(f"width of {what}, {{}},", size) for what, size in whole.experts.widths.items()]
    sizes = [layer.dense.size for layer in whole.layers if layer.dense is not None]
    return counts + [("intermediate_size {}", size) for size in dict.fromkeys((whole.intermediate_size, *sizes))]


#: All of a model, of one rank.
WHOLE = Shard()
