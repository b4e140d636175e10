"""Measures the built-in model: ``python -m chorus.server.demo.evaluate DIR``.

Greedy answers to held-out inputs are compared with the reference functions of `skills`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from .skills import BASE, SKILLS, Skill, prompt, sample_inputs


def generate(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[str]:
    """The model's greedy answers, in one left-padded batch."""
    batch = tokenizer([prompt(text) for text in texts], return_tensors="pt", padding=True)
    # its mixin names attributes that a model may have but need not
    answers = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=False, max_new_tokens=40
    )
    return tokenizer.batch_decode(answers[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def accuracy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, skill: Skill, texts: list[str]) -> float:
    """The share of texts answered exactly as the skill's reference function says."""
    answers = generate(model, tokenizer, texts)
    return sum(answer == skill.apply(text) for text, answer in zip(texts, answers, strict=True)) / len(texts)


def evaluate(folder: Path, count: int, seed: int) -> Iterator[tuple[Skill, list[float]]]:
    """For the base and each adapter, the shares of held-out inputs that are answered exactly in f32 and in
    bf16, and that the base repeats exactly in f32 when no adapter is used.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    for skill in (BASE, *SKILLS.values()):
        texts = sample_inputs(skill, count, seed)
        results: list[float] = []
        repeats: list[float] = []
        for dtype in (torch.float32, torch.bfloat16):
            model = LlamaForCausalLM.from_pretrained(folder / "base", dtype=dtype).eval()
            if dtype == torch.float32:
                repeats.append(accuracy(model, tokenizer, BASE, texts))
            if skill is not BASE:
                # the adapter's layers are put into the model itself
                PeftModel.from_pretrained(model, folder / "adapters" / skill.name).to(dtype).eval()
            results.append(accuracy(model, tokenizer, skill, texts))
        yield skill, results + repeats


def table(folder: Path, count: int = 1000, seed: int = 1) -> str:
    """The accuracy table, in Markdown."""
    lines = [
        "| skill | rank | alpha | targets | exact, f32 | exact, bf16 | base repeats, f32 |",
        "|---|---|---|---|---|---|---|",
    ]
    for skill, (single, half, repeats) in evaluate(folder, count, seed):
        targets = " ".join(module.removesuffix("_proj") for module in skill.target_modules)
        lines.append(f"| {skill.name} | {skill.rank or '-'} | {skill.lora_alpha or '-'} | {targets or '-'} "
                     f"| {single:.1%} | {half:.1%} | {repeats:.1%} |")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Print the accuracy table of a trained built-in model.")
    parser.add_argument("folder", type=Path, help="the folder that holds base/ and adapters/")
    parser.add_argument("--count", type=int, default=1000, help="held-out inputs per skill")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(table(options.folder, options.count, options.seed))


if __name__ == "__main__":
    main()
