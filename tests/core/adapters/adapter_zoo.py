"""Adapters of every form that PEFT makes, over one base model, with PEFT's own answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from ...greedy import MIN_MARGIN, after_drafts
from ...kept import KeptAnswers, kept_files
from ..conftest import ATTENTION, MLP, ModelSpec, quiet, save_model
from ..tiny_families import Tiny, load_peft, logits, train_vectors

BASE = ModelSpec(seed=11, layers=3)

INVOCATION = [7, 9, 7]

#: Tokens whose rows some adapters have of their own.
ROWS = [20, 3, 31, 14, 15, 0]

#: name → arguments of `LoraConfig`, or, where they have `method`, of that method's.
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
    "dora": {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION + MLP, "use_dora": True},
    "dora-patterns": {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": ["k_proj", "o_proj", "gate_proj", "down_proj"],
        "use_dora": True,
        "use_rslora": True,
        "rank_pattern": {"o_proj": 9, "2.mlp.down_proj": 1},
        "alpha_pattern": {"gate_proj": 7},
        "layers_to_transform": [0, 2],
    },
    "bias-of-none": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], "bias": "all"},
    "all-linear": {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"},
    "expression": {"r": 3, "lora_alpha": 6, "target_modules": r".*\.(0|2)\..*(q|down)_proj"},
    "excluded": {"r": 2, "lora_alpha": 8, "target_modules": ATTENTION + MLP, "exclude_modules": ["k_proj"]},
    "one-layer": {"r": 6, "lora_alpha": 9, "target_modules": ATTENTION, "layers_to_transform": [1]},
    "rank-1": {"r": 1, "lora_alpha": 2, "target_modules": ATTENTION + MLP},
    "rank-33": {"r": 33, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "alora-rank-1": {"r": 1, "lora_alpha": 4, "target_modules": MLP, "alora_invocation_tokens": [8, 8]},
    "embed": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens"]},
    "head": {"r": 3, "lora_alpha": 6, "target_modules": ["lm_head"]},
    "embed-and-head": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["embed_tokens", "lm_head", "o_proj"],
        "rank_pattern": {"lm_head": 9},
    },
    "head-rslora": {"r": 5, "lora_alpha": 4, "target_modules": ["lm_head", "gate_proj"], "use_rslora": True},
    "tokens": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"], "trainable_token_indices": ROWS},
    "tokens-of-each": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["up_proj"],
        "trainable_token_indices": {"embed_tokens": ROWS[:3], "lm_head": ROWS[2:]},
    },
    "whole": {"r": 3, "lora_alpha": 6, "target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "whole-and-targeted": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["o_proj", "embed_tokens", "lm_head"],
        "modules_to_save": ["lm_head", "embed_tokens"],
    },
    "whole-head-targeted": {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": r".*(v_proj|lm_head)",
        "modules_to_save": ["lm_head"],
    },
    "whole-head": {"r": 2, "lora_alpha": 6, "target_modules": ["k_proj"], "modules_to_save": ["lm_head"]},
    "dora-and-tokens": {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "down_proj"],
        "use_dora": True,
        "trainable_token_indices": ROWS[1:4],
    },
}

#: The same of PEFT's other methods.
METHODS: dict[str, dict[str, Any]] = {
    "loha": {"method": "LoHa", "r": 2, "alpha": 3, "target_modules": ATTENTION + MLP},
    "loha-patterns": {
        "method": "LoHa",
        "r": 2,
        "alpha": 8,
        "target_modules": ["q_proj", "up_proj", "down_proj"],
        "rank_pattern": {"up_proj": 4, "0.self_attn.q_proj": 1},
        "alpha_pattern": {"q_proj": 3},
        "layers_to_transform": [0, 2],
    },
    "lokr": {"method": "LoKr", "r": 2, "alpha": 3, "target_modules": ATTENTION + MLP},
    "lokr-both": {
        "method": "LoKr",
        "r": 2,
        "alpha": 5,
        "decompose_both": True,
        "target_modules": ["q_proj", "o_proj", "gate_proj"],
        "rank_pattern": {"o_proj": 1},
    },
    "lokr-factor": {
        "method": "LoKr",
        "r": 3,
        "alpha": 2,
        "decompose_factor": 2,
        "target_modules": r".*\.[02]\..*(q|k|down)_proj",
    },
    "vera": {
        "method": "Vera",
        "r": 8,
        "target_modules": ATTENTION + MLP,
        "projection_prng_key": 5,
    },
    "vera-of-some": {"method": "Vera", "r": 3, "target_modules": ["k_proj", "gate_proj"], "layers_to_transform": [1]},
    "ia3": {
        "method": "IA3",
        "target_modules": ["k_proj", "v_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    },
    "ia3-of-outputs": {
        "method": "IA3",
        "target_modules": r".*\.([02])\..*_proj",
        "feedforward_modules": r".*\.2\.mlp\.down_proj",
    },
    "miss": {"method": "Miss", "r": 5, "target_modules": ATTENTION + MLP},
    "miss-of-some": {
        "method": "Miss",
        "r": 8,
        "target_modules": ["k_proj", "down_proj"],
        "layers_to_transform": [0, 2],
    },
    "vb-lora": {
        "method": "VBLoRA",
        "r": 4,
        "num_vectors": 12,
        "vector_length": 8,
        "topk": 3,
        "target_modules": ATTENTION + MLP,
    },
    "adalora": {
        "method": "AdaLora",
        "init_r": 5,
        "target_r": 3,
        "lora_alpha": 7,
        "total_step": 10,
        "target_modules": ATTENTION + MLP,
    },
    "adalora-with-whole-head": {
        "method": "AdaLora",
        "init_r": 3,
        "lora_alpha": 0,
        "total_step": 10,
        "target_modules": ["v_proj", "up_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
    },
}

#: The same for a base model with biases.
BIASED_FORMS: dict[str, dict[str, Any]] = {
    "plain": FORMS["plain"],
    "bias-all": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "bias": "all"},
    "bias-lora-only": {"r": 2, "lora_alpha": 6, "target_modules": ["k_proj", "o_proj"], "bias": "lora_only"},
    "lora-bias": {"r": 5, "lora_alpha": 3, "target_modules": ATTENTION + MLP, "lora_bias": True},
    "both-biases": {
        "r": 5,
        "lora_alpha": 3,
        "target_modules": ["q_proj", "o_proj", "down_proj"],
        "lora_bias": True,
        "bias": "all",
        "rank_pattern": {"0.self_attn.q_proj": 2},
    },
    "dora": FORMS["dora"],
    "dora-bias-all": {**FORMS["dora"], "target_modules": ["v_proj", "o_proj", "up_proj"], "bias": "all"},
    "alora-bias": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ATTENTION + MLP,
        "alora_invocation_tokens": INVOCATION,
        "lora_bias": True,
    },
    "ia3": METHODS["ia3"],
    "ia3-of-outputs": METHODS["ia3-of-outputs"],
}


@quiet()
def save_zoo(
    root: Path, *, biased: bool = False, spec: ModelSpec = BASE, forms: dict[str, dict[str, Any]] | None = None
) -> Zoo:
    """Write the base model and an adapter of each form, none of which leaves the model's outputs as they are.

    biased: the base model has biases. forms: by default FORMS or BIASED_FORMS.
    """
    from peft import get_peft_model
    from transformers import LlamaForCausalLM

    forms = forms or (BIASED_FORMS if biased else FORMS)
    save_model(spec, root / "model")
    if biased:
        _add_biases(root / "model")
    paths = {}
    for seed, (name, arguments) in enumerate(forms.items()):
        torch.manual_seed(seed)
        model = get_peft_model(LlamaForCausalLM.from_pretrained(root / "model"), _config(**arguments))
        train_vectors(model)
        if "method" in arguments:
            _train(model)
        _train_rows(model)
        model.save_pretrained(str(root / "adapters" / name))
        paths[name] = root / "adapters" / name
    return Zoo(root / "model", paths, forms, spec)


def kept_zoo(*, biased: bool = False, methods: bool = False) -> Zoo:
    """As `save_zoo`, in a directory and with answers that other processes have, too. methods: adapters of METHODS."""
    forms = METHODS if methods else BIASED_FORMS if biased else FORMS
    name = f"zoo{' biased' * biased}{' of methods' * methods}"
    root = kept_files(name, lambda root: save_zoo(root, biased=biased, forms=forms))
    return Zoo(root / "model", {name: root / "adapters" / name for name in forms}, forms, kept=KeptAnswers(root))


def _config(method: str = "Lora", **arguments: Any) -> Any:
    """The configuration of a method by PEFT's name of it."""
    import peft

    init = {"init_lora_weights" if method in ("Lora", "AdaLora") else "init_weights": False}
    init = {} if method == "VBLoRA" else {"init_ia3_weights": False} if method == "IA3" else init
    return getattr(peft, f"{method}Config")(**init, task_type="CAUSAL_LM", **arguments)


def _train(model: torch.nn.Module) -> None:
    """Change all that is trained, however it was initialised."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.5)


def _train_rows(model: torch.nn.Module) -> None:
    """Change trained rows of embeddings and heads, and some rows of whole copies."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(torch.randn_like(parameter))
            elif "modules_to_save" in name:
                parameter[ROWS] += torch.randn(len(ROWS), parameter.shape[1])


def _add_biases(path: Path) -> None:
    """Give a saved model biases of every projection."""
    from transformers import LlamaConfig, LlamaForCausalLM

    before = LlamaForCausalLM.from_pretrained(path)
    config = LlamaConfig.from_pretrained(path)
    config.attention_bias = config.mlp_bias = True
    model = LlamaForCausalLM(config)
    model.load_state_dict(before.state_dict(), strict=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
    model.save_pretrained(path)


@dataclass
class Zoo:
    """The base model, its adapters, and PEFT's greedy answers in float32."""

    model: Path
    adapters: dict[str, Path]
    forms: dict[str, dict[str, Any]] = field(default_factory=lambda: FORMS)
    spec: ModelSpec = BASE
    _peft: dict[str | None, Any] = field(default_factory=dict)
    kept: KeptAnswers = field(default_factory=KeptAnswers)

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab

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
        prompt = [rng.randrange(12, self.vocab_size) for _ in range(length)]
        invocation = self.forms[adapter].get("alora_invocation_tokens") if adapter else None
        if invocation:
            at = rng.randint(0, length)
            prompt[at:at] = invocation
        return prompt

    def greedy(self, adapter: str | None, prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        """PEFT's answer to a request that runs alone, and the smallest margin of a choice."""
        tokens, margin = self.kept.get([adapter, prompt, count], lambda: self._generate(adapter, prompt, count))
        return tokens, margin

    @quiet()
    def _generate(self, adapter: str | None, prompt: Sequence[int], count: int) -> tuple[list[int], float]:
        model = self._use(adapter)
        is_plain = adapter in self.adapters and not self.forms.get(adapter, {}).get("alora_invocation_tokens")
        if adapter is None or is_plain:
            return after_drafts(partial(logits, model), partial(self._drafting.draft, adapter), [*prompt], count)
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

    @cached_property
    def _drafting(self) -> Tiny:
        """Answers as an engine does, for PEFT to check."""
        return Tiny(self.model, self.adapters, load_peft)

    @quiet()
    def _use(self, adapter: str | None) -> Any:
        """A model of its own for each adapter: PEFT writes trained biases into the base model."""
        from peft import PeftModel
        from transformers import LlamaForCausalLM

        if adapter not in self._peft:
            base = LlamaForCausalLM.from_pretrained(self.model, dtype=torch.float32)
            base.generation_config.eos_token_id = None
            base.generation_config.pad_token_id = 0
            model = base if adapter is None else PeftModel.from_pretrained(base, self.adapters[adapter])
            self._peft[adapter] = model.eval()
        return self._peft[adapter]
