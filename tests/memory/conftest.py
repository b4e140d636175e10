"""A tiny base model and adapter directories for it, written without transformers or peft."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ..tables import LLAMA

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 16, 24, 3, 2, 1, 8, 40
Q, KV = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM

#: module → (in, out)
DIMS = {
    "q_proj": (HIDDEN, Q),
    "k_proj": (HIDDEN, KV),
    "v_proj": (HIDDEN, KV),
    "o_proj": (Q, HIDDEN),
    "gate_proj": (HIDDEN, FFN),
    "up_proj": (HIDDEN, FFN),
    "down_proj": (FFN, HIDDEN),
}


def module_key(layer: int, module: str) -> str:
    block = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    return f"model.layers.{layer}.{block}.{module}"


def tensor_name(layer: int, module: str, side: str) -> str:
    return f"base_model.model.{module_key(layer, module)}.lora_{side}.weight"


@dataclass
class Draft:
    """An adapter to be: tests change `config` and `tensors` as they like, then write it."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def write(self, path: Path) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps(self.config))
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, path / WEIGHTS)
        return path

    def copy(self) -> Draft:
        return copy.deepcopy(self)


WEIGHTS = "adapter_model.safetensors"


def draft(
    targets: tuple[str, ...] = tuple(DIMS),
    rank: int = 4,
    *,
    layers: tuple[int, ...] = tuple(range(LAYERS)),
    ranks: Callable[[int, str], int] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config: Any,
) -> Draft:
    """Random tensors for `targets` in `layers`; `ranks(layer, module)` where they are not all `rank`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in layers:
        for module in targets:
            d_in, d_out = DIMS[module]
            r = ranks(layer, module) if ranks else rank
            tensors[tensor_name(layer, module, "A")] = torch.randn(r, d_in, generator=generator).to(dtype)
            tensors[tensor_name(layer, module, "B")] = torch.randn(d_out, r, generator=generator).to(dtype)
    base = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    return Draft({**base, **config}, tensors)


@pytest.fixture
def adapter_draft() -> Callable[..., Draft]:
    """`adapter_draft(targets, rank, …)`: see `draft`."""
    return draft


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama checkpoint that DIMS describes."""
    path = tmp_path_factory.mktemp("tiny-base")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "eos_token_id": 2,
    }
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)

    def weight(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(*shape, generator=generator)

    tensors = {"model.embed_tokens.weight": weight(VOCAB, HIDDEN), "lm_head.weight": weight(VOCAB, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    for layer in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(HIDDEN)
        for module, (d_in, d_out) in DIMS.items():
            tensors[f"{module_key(layer, module)}.weight"] = weight(d_out, d_in)
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture
def tiny_engine(tiny_base: Path):
    """`tiny_engine(**config)`: an engine on the tiny base."""
    from chorus.core.config import EngineConfig
    from chorus.core.engine import Engine

    engines = []

    def make(**config: Any) -> Engine:
        defaults = {"memory_bytes": 2 << 20, "threads": 1, "cpu_kernels": "torch"}
        engines.append(Engine.from_config(EngineConfig(model=tiny_base, **{**defaults, **config})))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def resident_weights(engine: Any, name: str) -> dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor, float]]:
    """The contents of a resident adapter's pages: (layer, module) → A `[rank, in]`, B `[out, rank]`, scale.

    Reads row by row by the layout's definition, not by the code that serves.
    """
    adapter = engine.store.get(name)
    run = engine.executor.arena.pages[adapter.pages].view(-1)
    found = {}
    for part, place in zip(adapter.manifest.parts, adapter.layout.parts, strict=True):
        slabs = place.slabs
        for layer in part.layers:
            for module in part.targets:
                a_rows, b_rows = [], []
                for i in range(part.rank):
                    slab = run[place.first_elem[layer] + i * slabs.slab_elems :]
                    a, b = slabs.a_offset[LLAMA.index(module)], slabs.b_offset[LLAMA.index(module)]
                    d_in, d_out = DIMS[module]
                    a_rows.append(slab[a : a + d_in])
                    b_rows.append(slab[b : b + d_out])
                assert (layer, module) not in found, "two parts have the same module"
                found[layer, module] = torch.stack(a_rows).clone(), torch.stack(b_rows).T.clone(), part.scale
    return found


@pytest.fixture(name="resident_weights")
def _resident_weights() -> Callable[..., dict]:
    return resident_weights


@pytest.fixture(scope="session")
def llama(subject: Callable[[str], Any]) -> tuple[Any, Any]:
    """The gqa subject and its model's shapes."""
    from chorus.core.model.read_config import read_model_config

    return subject("gqa"), read_model_config(subject("gqa").model)
