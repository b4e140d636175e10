"""Workload of the CPU benchmark: the shapes of its random model, the load and the cases. Standard library only.

Contenders read it in their own Python, so nothing here may need more than that.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...memory.pages.layout import PageLayout

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
    def dims(self) -> dict[str, tuple[int, int]]:
        """(in, out) features by module name."""
        return {name.partition(".")[2]: dims for name, dims in self.module_dims.items()}

    def page_layout(self, itemsize: int, block_tokens: int = 16) -> PageLayout:
        from ...memory.pages.layout import PageLayout

        return PageLayout(self.layers, self.kv_heads, self.head_dim, block_tokens, itemsize)

    def config(self, dtype: str, **more: Any) -> dict[str, Any]:
        """config.json of the model; more: fields that the shapes don't decide."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": dtype, "hidden_size": self.hidden,
            "intermediate_size": self.ffn, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim, "vocab_size": self.vocab,
            "max_position_embeddings": self.positions, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "tie_word_embeddings": False, **more,
        }  # fmt: skip

    @property
    def products(self) -> list[tuple[int, int]]:
        """(in, out) features of a layer's matrix products: projections that share an input are one."""
        width = self.hidden + 2 * self.kv_heads * self.head_dim
        return [(self.hidden, width), (self.hidden, self.hidden), (self.hidden, 2 * self.ffn), (self.ffn, self.hidden)]

    @property
    def layer_params(self) -> int:
        """Parameters of all layers' projections."""
        return self.layers * sum(d_in * d_out for d_in, d_out in self.module_dims.values())

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    def lora_params(self, modules: Iterable[str]) -> int:
        """Parameters that one rank of an adapter on these projections has."""
        return self.layers * sum(sum(self.module_dims[name]) for name in modules)

    @classmethod
    def parse(cls, text: str) -> Geometry:
        """A name of GEOMETRIES, `hidden=960,layers=32,…` over the default's shapes, or the path of a `config.json`.

        Raises ValueError.
        """
        if text in GEOMETRIES:
            return GEOMETRIES[text]
        if "=" not in text:
            return cls._of_config(Path(text))
        known = [field.name for field in fields(cls)]
        values = {}
        for part in text.split(","):
            name, _, value = part.partition("=")
            if name not in known or not value.isdecimal() or not int(value):
                raise ValueError(f"{part!r} is not NAME=NUMBER, a number above 0 of {', '.join(known)}")
            values[name] = int(value)
        return cls(**values).checked()

    @classmethod
    def _of_config(cls, path: Path) -> Geometry:
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_text("utf-8"))
            shape = cls(
                hidden=config["hidden_size"], ffn=config["intermediate_size"], layers=config["num_hidden_layers"],
                heads=config["num_attention_heads"],
                kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"], vocab=config["vocab_size"],
            )  # fmt: skip
        except OSError as error:
            raise ValueError(
                f"{str(path)!r} is neither a file nor one of {', '.join(GEOMETRIES)}, nor NAME=NUMBER,…"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not the config.json of a Llama-like model: {error!r}") from error
        if config.get("head_dim", shape.head_dim) != shape.head_dim:
            raise ValueError(f"{path}: head_dim is {config['head_dim']}; only hidden_size / heads can be measured")
        return shape.checked()

    def checked(self) -> Geometry:
        """Itself. Raises ValueError where the heads don't divide."""
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden={self.hidden} must be an even multiple of heads={self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        return self

    @property
    def kv_elems_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim


#: Shapes to measure by name. The first is the benchmark's own; the others are of models in use, `wide` with fewer
#: layers.
GEOMETRIES = {
    "125m": Geometry(),
    "135m": Geometry(hidden=576, ffn=1536, layers=30, heads=9, kv_heads=3, vocab=49152),
    "360m": Geometry(hidden=960, ffn=2560, layers=32, heads=15, kv_heads=5, vocab=32000),
    "500m": Geometry(hidden=896, ffn=4864, layers=24, heads=14, kv_heads=2, vocab=151936),
    "wide": Geometry(hidden=2048, ffn=5632, layers=8, heads=32, kv_heads=4, vocab=32000),
}

ALL = "all"


def target_modules(shape: Geometry, targets: str) -> list[str]:
    """The projections that `all`, or names such as `q+v`, stand for. Raises ValueError."""
    if targets == ALL:
        return list(shape.module_dims)
    known = {name.partition(".")[2].removesuffix("_proj"): name for name in shape.module_dims}
    if unknown := [name for name in targets.split("+") if name not in known]:
        raise ValueError(f"{unknown[0]!r} in targets {targets!r} is not one of {', '.join(known)}; or write {ALL!r}")
    return [name for short, name in known.items() if short in targets.split("+")]


@dataclass(frozen=True)
class Workload:
    """Everything that decides what is computed, and nothing about the contender that computes it.

    targets: the projections of each adapter, `all` or `q+v` and the like; in turn where there are more ranks.
    """

    geometry: Geometry
    requests: int = 8
    prompt_tokens: int = 128
    output_tokens: int = 64
    ranks: tuple[int, ...] = (8, 16, 32, 64, 8, 16, 32, 64)
    targets: tuple[str, ...] = (ALL,)
    dtype: str = "bfloat16"
    threads: int = 2
    max_batched_tokens: int = 1024
    seed: int = 0

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def step_rows(self) -> int:
        """Tokens of the largest prefill step."""
        return min(self.max_batched_tokens, self.requests * self.prompt_tokens)

    @property
    def one_adapter(self) -> int:
        """Index of the adapter of case `one`: the one with the rank nearest the mean."""
        mean = sum(self.ranks) / len(self.ranks)
        return min(range(len(self.ranks)), key=lambda index: abs(self.ranks[index] - mean))

    def adapter_names(self) -> list[str]:
        def suffix(targets: str) -> str:
            return "" if targets == ALL else "-" + targets.replace("+", "")

        return [f"a{index:02d}-r{rank}{suffix(self.targets_of(index))}" for index, rank in enumerate(self.ranks)]

    def targets_of(self, index: int) -> str:
        return self.targets[index % len(self.targets)]

    def adapter_params(self, index: int) -> int:
        """Parameters of an adapter."""
        return self.ranks[index] * self.geometry.lora_params(target_modules(self.geometry, self.targets_of(index)))

    def assignment(self, case: str) -> list[int | None]:
        """Adapter of each request of a case."""
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
        lists = {name: tuple(fields.pop(name)) for name in ("ranks", "targets")}
        return cls(geometry=Geometry(**fields.pop("geometry")), **lists, **fields)


@dataclass(frozen=True)
class Job:
    """Instructions to a contender's process: the workload, where its files are, and whether LoRA is on.

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
