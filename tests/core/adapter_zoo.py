"""Adapters of every form that PEFT makes, over one base model, with PEFT's own answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..conftest import ATTENTION, MIN_MARGIN, MLP, ModelSpec, quiet, save_model

BASE = ModelSpec(seed=11, layers=3)

INVOCATION = [7, 9, 7]

#: name → arguments of `LoraConfig`.
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"r": 3, "lora_alpha": 6, "target_modules": ATTENTION + MLP},
    "rslora": {"r": 5, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"], "use_rslora": True},
    "patterns": {
        "r": 2,
        "lora_alpha": 8,
        "target_modules": ATTENTION + MLP,
        "rank_pattern": {"q_proj": 7, "1.mlp.up_proj": 4},
        "alpha_pattern": {"q_proj": 3},
    },
    "alora": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION + MLP, "alora_invocation_tokens": INVOCATION},
    "alora-qkv": {
        "r": 16,
        "lora_alpha": 32,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "alora_invocation_tokens": [11],
    },
}


@quiet()
def save_zoo(root: Path) -> Zoo:
    """Write the base model and an adapter of each form, none of which leaves the model's outputs as they are."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    save_model(BASE, root / "model")
    paths = {}
    for seed, (name, arguments) in enumerate(FORMS.items()):
        torch.manual_seed(seed)
        config = LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **arguments)
        model = get_peft_model(LlamaForCausalLM.from_pretrained(root / "model"), config)
        model.save_pretrained(str(root / "adapters" / name))
        paths[name] = root / "adapters" / name
    return Zoo(root / "model", paths)


@dataclass
class Zoo:
    """The base model, its adapters, and PEFT's greedy answers in float32."""

    model: Path
    adapters: dict[str, Path]
    _peft: Any = None
    _answers: dict[tuple[str | None, tuple[int, ...], int], tuple[list[int], float]] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return BASE.vocab

    def case(self, adapter: str | None, length: int, count: int, seed: int) -> tuple[list[int], list[int]]:
        """A prompt whose `count` greedy tokens are clear choices, and these."""
        rng = random.Random(f"{adapter} {length} {seed}")
        while True:
            prompt = self.prompt(adapter, length, rng)
            tokens, margin = self.greedy(adapter, prompt, count)
            if margin >= MIN_MARGIN:
                return prompt, tokens

    def prompt(self, adapter: str | None, length: int, rng: random.Random) -> list[int]:
        """A random prompt, with the adapter's invocation somewhere if it has one."""
        prompt = [rng.randrange(12, BASE.vocab) for _ in range(length)]
        invocation = FORMS[adapter].get("alora_invocation_tokens") if adapter else None
        if invocation:
            at = rng.randint(0, length)
            prompt[at:at] = invocation
        return prompt

    def greedy(self, adapter: str | None, prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        """PEFT's answer to a request that runs alone, and the smallest margin of a choice."""
        key = (adapter, tuple(prompt), count)
        if key not in self._answers:
            self._answers[key] = self._generate(adapter, prompt, count)
        return self._answers[key]

    @quiet()
    def _generate(self, adapter: str | None, prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        model = self._use(adapter)
        with torch.inference_mode():
            out = model.generate(
                input_ids=torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=count,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.cat(out.logits).topk(2).values
        return out.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())

    @quiet()
    def _use(self, adapter: str | None) -> Any:
        from peft import PeftModel
        from transformers import LlamaForCausalLM

        if self._peft is None:
            names = list(self.adapters)
            base = LlamaForCausalLM.from_pretrained(self.model, dtype=torch.float32)
            base.generation_config.eos_token_id = None
            base.generation_config.pad_token_id = 0
            self._peft = PeftModel.from_pretrained(base, self.adapters[names[0]], adapter_name=names[0])
            for name in names[1:]:
                self._peft.load_adapter(self.adapters[name], adapter_name=name)
            self._peft.eval()
        if adapter is None:
            self._peft.base_model.disable_adapter_layers()
        else:
            self._peft.base_model.enable_adapter_layers()
            self._peft.set_adapter(adapter)
        return self._peft
