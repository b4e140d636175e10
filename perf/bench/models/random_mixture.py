"""A model with a mixture of experts in every layer, without weights, and random adapters on attention and experts.

Adapters are written layer by layer, so that memory never holds one. All forms of an adapter have the same deltas.

Tests: tests/perf/bench/models/test_random_mixture.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from ....core.model.checkpoints.quantization.round_to_nearest import RoundToNearest
from ....memory.files.config import CONFIG_FILE
from ....memory.files.form import WEIGHTS_FILE
from ....memory.files.module_paths import ExpertForm
from ....memory.pages.layout import PageLayout
from .families import FAMILIES
from .sizes import Geometry

_PREFIX = "base_model.model."
_SCALE = 0.02

Make = Callable[..., torch.Tensor]
"""A tensor of a shape."""


class MixtureStep(NamedTuple):
    """What a step of a mixture must read and compute."""

    experts: float
    """Experts of a layer that its tokens go to, expected."""

    num_bytes: float
    """Bytes that it reads, each once, without those of adapters."""

    adapter_bytes: float

    flops: float


@dataclass(frozen=True)
class MixtureShape:
    """Qwen3-30B-A3B by default."""

    layers: int = 48
    hidden: int = 2048
    size: int = 768
    """Width of an expert's gate and up."""
    count: int = 128
    per_token: int = 8
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocab: int = 151936

    @property
    def attention(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the projections of attention."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projections = {"q_proj": (self.hidden, q), "k_proj": (self.hidden, kv), "v_proj": (self.hidden, kv)}
        return projections | {"o_proj": (q, self.hidden)}

    @property
    def expert_params(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden * self.size

    @property
    def attention_params(self) -> int:
        """Parameters of a layer's projections of attention."""
        return sum(inputs * outputs for inputs, outputs in self.attention.values())

    @property
    def router_params(self) -> int:
        """Of a layer; routers are float32."""
        return self.count * self.hidden

    @property
    def layer_params(self) -> int:
        """Parameters of all layers' matrices."""
        return self.layers * (self.attention_params + self.router_params + self.count * self.expert_params)

    def page_layout(self, itemsize: int, block_tokens: int = 16) -> PageLayout:
        return PageLayout(self.layers, self.kv_heads, self.head_dim, block_tokens, itemsize)

    def experts_in_use(self, tokens: int) -> float:
        """Experts of a layer that so many tokens go to, if each goes to `per_token` of them with equal chances:
        `count · (1 - (1 - per_token / count)^tokens)`. Routers that choose less evenly use fewer.
        """
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)

    def step(
        self,
        itemsize: int,
        rows: int,
        count: int,
        before: int,
        *,
        kv_itemsize: int = 0,
        quantiser: RoundToNearest | None = None,
        rank: int = 0,
        experts_rank: int = 0,
    ) -> MixtureStep:
        """The cost of a step of `rows` sequences of `count` tokens each, with KV of `before` tokens.

        Each layer's attention and router are read once, and of its experts those in use (`experts_in_use`); then the
        logits' weight, and KV. A token is multiplied with `per_token` experts. kv_itemsize: bytes of an element of KV;
        0: `itemsize`. quantiser: of attention and experts. rank: of the sequences' adapters on attention, each
        sequence another; experts_rank: likewise on all experts; 0: none.
        """
        tokens, q = rows * count, self.heads * self.head_dim
        experts = self.experts_in_use(tokens)
        of = partial(_num_bytes, itemsize, quantiser)
        attention = sum(of(outputs, inputs) for inputs, outputs in self.attention.values())
        expert = of(2 * self.size, self.hidden) + of(self.hidden, self.size)
        kv = rows * (before + count) * 2 * self.kv_heads * self.head_dim * (kv_itemsize or itemsize)
        layer = attention + 4 * self.router_params + experts * expert + kv
        rank_elems = sum(inputs + outputs for inputs, outputs in self.attention.values())
        expert_rank_elems = 3 * (self.hidden + self.size)
        adapters = rank * rank_elems + experts_rank * self.experts_in_use(count) * expert_rank_elems
        products = self.attention_params + self.router_params + self.per_token * self.expert_params
        products += rank * rank_elems + experts_rank * self.per_token * expert_rank_elems
        keys = rows * sum(range(before + 1, before + count + 1))
        head = self.vocab * self.hidden
        return MixtureStep(
            experts,
            self.layers * layer + itemsize * head,
            self.layers * rows * adapters * itemsize,
            self.layers * (2 * tokens * products + 4 * q * keys) + 2 * rows * head,
        )

    def write_config(self, directory: Path, dtype: str = "bfloat16") -> Path:
        """Make `directory` a checkpoint without weights, and return it."""
        directory.mkdir(parents=True, exist_ok=True)
        shape = Geometry(self.hidden, 3 * self.hidden, self.layers, self.heads, self.kv_heads, self.vocab, 40960)
        experts = {"num_experts": self.count, "num_experts_per_tok": self.per_token, "norm_topk_prob": True}
        own = {"moe_intermediate_size": self.size, "head_dim": self.head_dim, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
        config = shape.config(dtype, **FAMILIES["qwen3-moe"] | experts | own)
        (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        return directory


def _num_bytes(itemsize: int, quantiser: RoundToNearest | None, outputs: int, inputs: int) -> int:
    """Bytes of a matrix as it is kept."""
    return outputs * inputs * itemsize if quantiser is None else quantiser.num_bytes(outputs, inputs)


@dataclass(frozen=True)
class MixtureSize:
    """A named mixture."""

    name: str
    geometry: MixtureShape
    family: str = "qwen3_moe"

    def write_config(self, directory: Path, dtype: str) -> Path:
        """See `ModelSize`."""
        return self.geometry.write_config(directory, dtype)


def write_adapter(directory: Path, shape: MixtureShape, rank: int, form: ExpertForm | None = ExpertForm.EACH) -> Path:
    """Write an adapter in bfloat16 on attention and on all experts of all layers, as PEFT, or Tinker, would. A of gate
    and of up are the same. form: None: on attention alone. Returns the directory.
    """
    directory.mkdir(parents=True)
    tensors = [item for layer in range(shape.layers) for item in _layer(shape, rank, form, layer, _described)]
    tensors.sort(key=lambda item: item[0])  # as the safetensors library has those of one dtype
    sizes = [2 * each.numel() for _, each in tensors]
    ends = list(accumulate(sizes))
    begins = {name: end - size for (name, _), end, size in zip(tensors, ends, sizes, strict=True)}
    described = {
        name: {"dtype": "BF16", "shape": list(each.shape), "data_offsets": [begins[name], end]}
        for (name, each), end in zip(tensors, ends, strict=True)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **described}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with (directory / WEIGHTS_FILE).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for layer in range(shape.layers):
            generator = torch.Generator().manual_seed(layer)

            def drawn(*sizes: int, generator: torch.Generator = generator) -> torch.Tensor:
                return torch.randn(*sizes, generator=generator).mul_(_SCALE).bfloat16()

            for name, each in _layer(shape, rank, form, layer, drawn):
                file.seek(8 + len(header) + begins[name])
                file.write(each.contiguous().view(torch.uint8).numpy().data)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, **_targets(shape, form)}
    (directory / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    return directory


def _described(*sizes: int) -> torch.Tensor:
    """A tensor of a shape, without memory."""
    return torch.empty(*sizes, dtype=torch.bfloat16, device="meta")


def _targets(shape: MixtureShape, form: ExpertForm | None) -> dict[str, list[str]]:
    attention = [*shape.attention]
    if form is None:
        return {"target_modules": attention}
    if form is ExpertForm.STACKED:
        return {"target_modules": attention, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    return {"target_modules": [*attention, "gate_proj", "up_proj", "down_proj"]}


def _layer(
    shape: MixtureShape, rank: int, form: ExpertForm | None, layer: int, make: Make
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a layer. make: called in the same order for every form."""
    at = f"{_PREFIX}model.layers.{layer}."
    for module, (inputs, outputs) in shape.attention.items():
        yield f"{at}self_attn.{module}.lora_A.weight", make(rank, inputs)
        yield f"{at}self_attn.{module}.lora_B.weight", make(outputs, rank)
    if form is None:
        return
    hidden, size, count = shape.hidden, shape.size, shape.count
    gate_up_a, gate_up_b = make(count, rank, hidden), make(count, 2 * size, rank)
    down_a, down_b = make(count, rank, size), make(count, hidden, rank)
    experts = f"{at}mlp.experts."
    if form is ExpertForm.STACKED:  # PEFT nests the module once for each parameter but the last
        for place, a, b in (("base_layer.", gate_up_a, gate_up_b), ("", down_a, down_b)):
            yield f"{experts}{place}lora_A.weight", a.reshape(-1, a.shape[2])
            yield f"{experts}{place}lora_B.weight", b.permute(1, 2, 0).reshape(b.shape[1], -1)
        return
    gate_b, up_b = gate_up_b.split(size, 1)
    for module, a, b in (("gate_proj", gate_up_a, gate_b), ("up_proj", gate_up_a, up_b), ("down_proj", down_a, down_b)):
        if form is ExpertForm.TOGETHER:
            yield f"{experts}{module}.lora_A.weight", a
            yield f"{experts}{module}.lora_B.weight", b
            continue
        for expert in range(count):
            yield f"{experts}{expert}.{module}.lora_A.weight", a[expert]
            yield f"{experts}{expert}.{module}.lora_B.weight", b[expert]
