"""What the CPU benchmark runs: the shapes of its random model, the load and the cases. Standard library only.

Contenders read it in their own Python, so nothing here may need more than that.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

#: base_plain: LoRA off, or no adapter registered. base: LoRA on, no request asks for an adapter.
#: mixed: the adapters in turn. one: every request on the same adapter.
CASES = ("base_plain", "base", "mixed", "one")

ITEMSIZE = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Geometry:
    """Shapes of a Llama-architecture model with untied embeddings."""

    hidden: int = 768
    ffn: int = 2048
    layers: int = 12
    heads: int = 12
    kv_heads: int = 4
    vocab: int = 32000
    positions: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def module_dims(self) -> dict[str, tuple[int, int]]:
        """(in, out) features per projection, by the names of the checkpoint."""
        kv = self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (self.hidden, kv),
            "self_attn.v_proj": (self.hidden, kv),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.hidden, self.ffn),
            "mlp.up_proj": (self.hidden, self.ffn),
            "mlp.down_proj": (self.ffn, self.hidden),
        }

    @property
    def layer_params(self) -> int:
        """Parameters of all layers' projections."""
        return self.layers * sum(d_in * d_out for d_in, d_out in self.module_dims.values())

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def lora_params_per_rank(self) -> int:
        """Parameters that one rank of an adapter on all projections has."""
        return self.layers * sum(d_in + d_out for d_in, d_out in self.module_dims.values())

    @property
    def kv_elems_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Workload:
    """Everything that decides what is computed, and nothing about who computes it."""

    geometry: Geometry
    requests: int = 8
    prompt_tokens: int = 128
    output_tokens: int = 64
    ranks: tuple[int, ...] = (8, 16, 32, 64, 8, 16, 32, 64)
    dtype: str = "bfloat16"
    threads: int = 2
    max_batched_tokens: int = 1024
    seed: int = 0

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def one_adapter(self) -> int:
        """The adapter of case `one`: the one whose rank is nearest the mean."""
        mean = sum(self.ranks) / len(self.ranks)
        return min(range(len(self.ranks)), key=lambda index: abs(self.ranks[index] - mean))

    def adapter_names(self) -> list[str]:
        return [f"a{index:02d}-r{rank}" for index, rank in enumerate(self.ranks)]

    def assignment(self, case: str) -> list[int | None]:
        """Which adapter each request of a case uses."""
        if case == "mixed":
            return [index % len(self.ranks) for index in range(self.requests)]
        if case == "one":
            return [self.one_adapter] * self.requests
        return [None] * self.requests

    def prompts(self) -> list[list[int]]:
        """Seeded token ids; the first few of a vocabulary are special and left out."""
        source = random.Random(self.seed)
        low = min(300, self.geometry.vocab // 2)
        return [
            [source.randrange(low, self.geometry.vocab) for _ in range(self.prompt_tokens)]
            for _ in range(self.requests)
        ]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Workload:
        fields = dict(fields)
        return cls(geometry=Geometry(**fields.pop("geometry")), ranks=tuple(fields.pop("ranks")), **fields)


@dataclass(frozen=True)
class Job:
    """What a contender's process is told: the workload, where its files are, and whether LoRA is on.

    options: the contender's own, from the command line.
    """

    workload: Workload
    model: str
    adapters: dict[str, str]
    lora: bool
    options: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "workload": self.workload.to_json()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Job:
        return cls(**{**fields, "workload": Workload.from_json(fields["workload"])})


def tiny() -> Workload:
    """A workload that every contender can run in a second or two; its speeds mean nothing."""
    geometry = Geometry(hidden=128, ffn=256, layers=2, heads=4, kv_heads=2, vocab=1024, positions=512)
    return Workload(geometry, requests=4, prompt_tokens=24, output_tokens=6, ranks=(8, 16, 32, 64), threads=1)
