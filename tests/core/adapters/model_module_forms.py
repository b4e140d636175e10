"""Adapters of the token embeddings and the output projection, made by PEFT over tiny models of several families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...conftest import quiet
from ...kept import KeptAnswers, kept_files
from ..tiny_families import ATTENTION, MLP, Tiny, load_model, load_peft, save_family

#: name → arguments of `LoraConfig`.
FORMS: dict[str, dict[str, Any]] = {
    "embed": {"r": 4, "lora_alpha": 6, "target_modules": ["embed_tokens"]},
    "head": {"r": 5, "lora_alpha": 4, "target_modules": ["lm_head"]},
    "both": {"r": 17, "lora_alpha": 9, "target_modules": ["embed_tokens", "lm_head"]},
    "all": {
        "r": 2,
        "lora_alpha": 8,
        "target_modules": [*ATTENTION, *MLP, "embed_tokens", "lm_head"],
        "rank_pattern": {"lm_head": 33, "q_proj": 3},
        "alpha_pattern": {"embed_tokens": 3},
        "use_rslora": True,
    },
    "layers": {"r": 3, "lora_alpha": 6, "target_modules": ATTENTION + MLP},
}


@quiet()
def save_form(model: Path, path: Path, seed: int, save_embedding_layers: bool = False, **arguments: Any) -> None:
    """Write an adapter with PEFT itself; nothing of it is zero."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **arguments)
    base = load_model(model)
    get_peft_model(base, config).save_pretrained(path, save_embedding_layers=save_embedding_layers)


@dataclass(eq=False)
class Alone(Tiny):
    """A model with adapters that PEFT can't load side by side: each has a model of its own."""

    load: Callable[[Path, dict[str, Path]], Any] = load_peft
    alone: dict[str | None, Any] = field(default_factory=dict)

    def use(self, adapter: str | None) -> Any:
        if adapter not in self.alone:
            self.alone[adapter] = self.load(self.model, {} if adapter is None else {adapter: self.adapters[adapter]})
        return self.alone[adapter]


def make_forms(family: str) -> Tiny:
    """A family's model with an adapter of each form. "odd": one with an odd vocabulary."""
    root = kept_files(f"forms {family}", lambda root: _save_forms(family, root))
    return Tiny(root / "model", {name: root / name for name in FORMS}, load_peft, KeptAnswers(root))


def _save_forms(family: str, root: Path) -> None:
    if family == "odd":
        save_family("llama2", root / "model", vocab_size=151)
    else:
        save_family(family, root / "model")
    for seed, (name, arguments) in enumerate(FORMS.items()):
        save_form(root / "model", root / name, seed, **arguments)
