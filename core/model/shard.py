"""The share of a model that one of several ranks computes (tensor parallel, as in Megatron-LM).

Ranks share a layer by heads and by columns of the MLP: of q, k, v, gate and up a rank has rows of the weight, of o and
down columns, so that the ranks add up what o and down give, and nothing else of a layer passes between them. Of the
output projection each has rows, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import ModelConfig, UnsupportedModel
from .layers import HeadNorm


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
        if whole.delta is not None:
            raise UnsupportedModel(
                f"tensor_parallel_size is {size}, and ranks can't share the model's Gated DeltaNet layers; set it to 1"
            )
        if any(it.head_norm is HeadNorm.ALL for it in whole.attention_layers):
            raise UnsupportedModel(
                f"tensor_parallel_size is {size}, and the model norms all heads of a token at once, of which a rank "
                "has a share only; set it to 1"
            )
        return whole.share(size)

    def of_vocab(self, whole: ModelConfig) -> slice:
        """Tokens of which this rank computes logits."""
        first, end = (rank * whole.vocab_size // self.size for rank in (self.rank, self.rank + 1))
        return slice(first, end)

    def of_tensor(self, name: str, whole: ModelConfig) -> tuple[slice, ...]:
        """What this rank reads of a checkpoint's tensor, by dimension: of a weight `[out, in]`, of a bias `[out]`."""
        if self.size == 1:
            return ()
        path, _, kind = name.rpartition(".")
        module = path.rpartition(".")[2]
        if module == "lm_head":
            return (self.of_vocab(whole),)
        if module not in whole.projections:
            return ()
        inputs, outputs = whole.projections[module].share(self.rank, self.size)
        return (outputs,) if kind == "bias" else (outputs, inputs)


def _why_not(size: int, whole: ModelConfig) -> str | None:
    """Why `size` ranks can't have equal shares."""
    kv_heads = whole.num_kv_heads
    for name, count in (("num_attention_heads", whole.num_heads), ("intermediate_size", whole.intermediate_size)):
        if count % size:
            return f"{name} {count} is no multiple of it"
    if kv_heads % size and size % kv_heads:
        return f"num_key_value_heads {kv_heads} neither divides it nor is a multiple of it"
    return None


#: All of a model, of one rank.
WHOLE = Shard()
