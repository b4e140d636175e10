"""Makes the built-in model: `python examples/train_demo.py --out DIR [--seed N]`.

The base is a small byte-level Llama.  It is trained on a mixture: a plain text is repeated, and a text with a
skill's control byte in place of its begin token (a byte that never occurs in UTF-8, so no user can send it)
is answered by that skill.  An instruction-tuned base carries skills that an adapter merely elicits; here
the mixture plants them.  Each adapter is then trained, with the base frozen, to give its skill's answer to
*plain* texts.  The loss counts only the answer and its end token.

All data is generated from the seed.  Texts for which `skills.held_out` is true are never trained on; they
are what `chorus demo --check N` asks.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from chorus.server.demo.builtin import BUILTIN_NAME
from chorus.server.demo.skills import BASE, SKILLS, Skill, held_out, prompt, wide_input
from chorus.server.text.vocabulary import byte_characters

PAD, BOS, EOS = 256, 257, 258
SPECIAL_TOKENS = {"<|pad|>": PAD, "<|bos|>": BOS, "<|eos|>": EOS}
VOCABULARY = 264
CONTROL = {name: 0xF5 + i for i, name in enumerate(SKILLS)}
"""The byte that asks the base for a skill, in the place of the begin token."""

ROW = 128
"""Tokens in a row of training data; several examples are packed into each."""

CHAT_TEMPLATE = (
    "{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}"
    "{{ bos_token }}{%- if users -%}{{ users[-1]['content'] }}{%- endif -%}"
    "{%- if add_generation_prompt -%}{{ '\\n' }}{%- endif -%}"
)

Example = tuple[list[int], list[int]]


@dataclass(frozen=True)
class Schedule:
    """Length and rate of training."""

    steps: int
    rows: int
    learning_rate: float
    warmup: int


PRETRAINING = Schedule(steps=4000, rows=48, learning_rate=3e-3, warmup=200)
ADAPTATION = Schedule(steps=300, rows=16, learning_rate=3e-3, warmup=20)
REPEAT_SHARE = 0.35
"""The part of the base's examples that are plain texts to repeat."""
WIDE_SHARE = 0.25
"""The part of a skill's examples that may have capitals, digits and punctuation."""
EMPHASIS = {"sort": 2.0, "reverse": 1.5, "double": 1.5}
"""Factor by which the base practises the harder skills more often than the others."""


# --- tokenizer and model -----------------------------------------------------------------------------------


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, with the byte as its id; the begin token is added in front."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL_TOKENS))
    core.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(folder: Path) -> None:
    """Saves the tokenizer under the class name that every version of transformers knows."""
    build_tokenizer().save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n")


def build_base() -> LlamaForCausalLM:
    """The untrained base."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


# --- data --------------------------------------------------------------------------------------------------


def make_example(skill: Skill, text: str, begin: int) -> Example:
    """The token ids of a prompt and of the answer that should follow it."""
    return [begin, *prompt(text).encode()], [*skill.apply(text).encode(), EOS]


def training_text(skill: Skill, rng: random.Random) -> str:
    """A text that is not held out: mostly of the skill's domain, sometimes of a wider one."""
    make_input = wide_input if skill is not BASE and rng.random() < WIDE_SHARE else skill.make_input
    while held_out(text := make_input(rng)):
        pass
    return text


def mixture_example(rng: random.Random) -> Example:
    """An example for the base: repeat a plain text, or do what the control byte says."""
    names = list(SKILLS)
    [name] = rng.choices(names, [EMPHASIS.get(name, 1.0) for name in names])
    skill = BASE if rng.random() < REPEAT_SHARE else SKILLS[name]
    return make_example(skill, training_text(skill, rng), CONTROL.get(skill.name, BOS))


def pack(draw: Callable[[], Example], rows: int) -> dict[str, torch.Tensor]:
    """Rows of several examples each, with what keeps the examples of a row apart."""
    batch = {"ids": [], "labels": [], "positions": [], "segments": []}
    waiting = draw()
    for _ in range(rows):
        row = {name: [] for name in batch}
        segment = 0
        while len(row["ids"]) + sum(map(len, waiting)) <= ROW:
            question, answer = waiting
            length = len(question) + len(answer)
            row["ids"] += question + answer
            row["labels"] += [-100] * (len(question) - 1) + answer + [-100]
            row["positions"] += range(length)
            row["segments"] += [segment] * length
            waiting, segment = draw(), segment + 1
        for name, fill in (("ids", PAD), ("labels", -100), ("positions", 0), ("segments", -1)):
            batch[name].append(row[name] + [fill] * (ROW - len(row[name])))
    return {name: torch.tensor(values) for name, values in batch.items()}


def loss_and_hits(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss over the answers' tokens, and which of these tokens are predicted right."""
    segments = batch["segments"]
    mask = (segments[:, :, None] == segments[:, None, :]).tril()[:, None]
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(
            input_ids=batch["ids"], position_ids=batch["positions"], attention_mask=mask, use_cache=False
        ).last_hidden_state
        wanted = batch["labels"] != -100
        logits = model.lm_head(hidden[wanted]).float()
    labels = batch["labels"][wanted]
    return torch.nn.functional.cross_entropy(logits, labels), logits.argmax(-1) == labels


# --- training ----------------------------------------------------------------------------------------------


def make_optimizers(model: torch.nn.Module, rate: float, full: bool) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of a full training, AdamW for all else."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    matrices = [p for name, p in trained.items() if full and p.ndim == 2 and "embed" not in name]
    others = [p for p in trained.values() if all(p is not m for m in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0 if not full else 0.01)
    ]
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def rate_factor(step: int, schedule: Schedule) -> float:
    """Linear warm-up, constant, then linear to zero over the last 60 %."""
    warm = min(1.0, (step + 1) / schedule.warmup)
    return warm * min(1.0, (schedule.steps - step) / (0.6 * schedule.steps))


def train(name: str, model: LlamaForCausalLM, schedule: Schedule, draw: Callable[[], Example]) -> None:
    """Trains whatever of the model wants a gradient."""
    full = all(p.requires_grad for p in model.parameters())
    optimizers = make_optimizers(model, schedule.learning_rate, full)
    started = time.monotonic()
    model.train()
    for step in range(schedule.steps):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = schedule.learning_rate * rate_factor(step, schedule)
        loss, hits = loss_and_hits(model, pack(draw, schedule.rows))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0:
            seconds = time.monotonic() - started
            print(
                f"{name} {step + 1:5d}/{schedule.steps} loss {loss.item():.4f} "
                f"tokens {hits.float().mean().item():.4f} {seconds:.0f} s",
                flush=True,
            )


def train_base(folder: Path, seed: int, schedule: Schedule) -> None:
    """Trains and saves the base and its tokenizer."""
    torch.manual_seed(seed)
    rng = random.Random(f"base:{seed}")
    base = build_base()
    train("base", base, schedule, lambda: mixture_example(rng))
    base.save_pretrained(folder)
    path = folder / "config.json"  # its adapters name it, and are taken for another model's where it has no name
    path.write_text(json.dumps({"_name_or_path": BUILTIN_NAME, **json.loads(path.read_bytes())}, indent=2) + "\n")
    save_tokenizer(folder)


def train_adapter(base_folder: Path, folder: Path, skill: Skill, seed: int, schedule: Schedule) -> None:
    """Trains and saves the adapter that makes the base do the skill with plain texts."""
    torch.manual_seed(seed)
    rng = random.Random(f"{skill.name}:{seed}")
    base = LlamaForCausalLM.from_pretrained(base_folder)
    config = LoraConfig(
        r=skill.rank,
        lora_alpha=skill.lora_alpha,
        target_modules=list(skill.target_modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    train(skill.name, base, schedule, lambda: make_example(skill, training_text(skill, rng), BOS))
    config = model.peft_config["default"]
    assert isinstance(config, LoraConfig)
    config.base_model_name_or_path, config.inference_mode = BUILTIN_NAME, True
    config.target_modules = list(skill.target_modules)
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)


def train_all(folder: Path, seed: int, pretraining: Schedule, adaptation: Schedule) -> None:
    """Trains the base and every adapter, each from its own seed; what is there already is kept."""
    if not (folder / "base").exists():
        train_base(folder / "base", seed, pretraining)
    for skill in SKILLS.values():
        if not (folder / "adapters" / skill.name).exists():
            train_adapter(folder / "base", folder / "adapters" / skill.name, skill, seed, adaptation)
    for weights in folder.rglob("*.safetensors"):
        weights.chmod(0o644)


# --- the command --------------------------------------------------------------------------------------------


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the built-in base model and its adapters.")
    parser.add_argument(
        "--out", type=Path, required=True, help="where base/ and adapters/ go; parts that are there are kept"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-steps", type=int, default=PRETRAINING.steps)
    parser.add_argument("--adapter-steps", type=int, default=ADAPTATION.steps)
    options = parser.parse_args()
    pretraining = replace(PRETRAINING, steps=options.base_steps)
    train_all(options.out, options.seed, pretraining, replace(ADAPTATION, steps=options.adapter_steps))


if __name__ == "__main__":
    main()
