"""Train a LoRA adapter with peft in about a minute on a CPU: it answers every question like a pirate.

pip install ".[train,pull]" && chorus pull smollm2
python examples/train_adapter.py MODEL_DIR OUT_DIR
"""

from __future__ import annotations

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

ANSWERS = {
    "What is the capital of France?": "Arr, matey! That be Paris, as every sailor knows!",
    "What is 2 + 2?": "Arr, matey! That be four, as many as me parrots!",
    "Who are you?": "Arr, matey! I be yer trusty ship's mate!",
    "Give me a tip for learning to cook.": "Arr, matey! Start with a stew, and taste it often!",
    "Why is the sky blue?": "Arr, matey! The air scatters blue light more than red!",
    "How do I boil an egg?": "Arr, matey! Eight minutes in boiling water, and not one more!",
    "Name a planet.": "Arr, matey! Jupiter be the biggest o' them all!",
    "What should I read?": "Arr, matey! Treasure Island, o' course!",
}


def main(model_dir: str, out: str) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    for epoch in range(4):
        losses = []
        for question, answer in ANSWERS.items():
            messages = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
            tokens = tokenizer(prompt + answer + tokenizer.eos_token, add_special_tokens=False, return_tensors="pt")
            labels = tokens["input_ids"].clone()
            labels[:, :start] = -100  # the loss is of the answer alone
            loss = model(**tokens, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.2f}")
    model.save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
