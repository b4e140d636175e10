"""An adapter whose tokenizer has tokens that the built-in model's lacks, and its answers by transformers and PEFT."""

from __future__ import annotations

import torch

from chorus.server.demo.builtin import BUILTIN_MODEL

from ..conftest import quiet

TEMPLATE = "{{ bos_token }}{% for m in messages %}<tool>{{ m.content }}{{ eos_token }}{% endfor %}<tool>"
TOKENS = ["<tool>", "<end>", "<plain>"]
COUNT = 24


@quiet()
def save_own(path, seed=0, *, beyond=False):
    """Write an adapter with PEFT and transformers, as a trainer does that uses padding rows of the embeddings, or if
    there are no more, resizes them (`beyond`); returns the ids of `TOKENS`.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODEL)
    model = AutoModelForCausalLM.from_pretrained(BUILTIN_MODEL)
    if beyond:
        rows = model.get_input_embeddings().num_embeddings
        tokenizer.add_tokens([f"<filler {number}>" for number in range(rows - len(tokenizer))])
        model.resize_token_embeddings(rows + len(TOKENS))
    tokenizer.add_special_tokens({"eos_token": "<end>", "additional_special_tokens": ["<tool>"]})
    tokenizer.add_tokens(["<plain>"])
    tokenizer.chat_template = TEMPLATE
    ids = tokenizer.convert_tokens_to_ids(TOKENS)
    config = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=sorted(ids), init_lora_weights=False)
    model = get_peft_model(model, config)
    rows = model.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:  # likelier than the end of a text, and than a space
                tool, end, plain = (sorted(ids).index(id_) for id_ in ids)  # in the order of `TOKENS`
                parameter[end], parameter[tool] = 2 * rows[258], (1.5 + seed) * rows[ord(" ")]
                parameter[plain] += torch.randn_like(parameter[2])
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return dict(zip(TOKENS, ids, strict=True))


class Reference:
    """transformers with PEFT, and the adapter's own tokenizer."""

    @quiet()
    def __init__(self, path):
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.end, self.tool = self.tokenizer.convert_tokens_to_ids(["<end>", "<tool>"])
        model = AutoModelForCausalLM.from_pretrained(BUILTIN_MODEL)
        if len(self.tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(self.tokenizer))
        self.model = PeftModel.from_pretrained(model, path)

    def answer(self, ids, count=COUNT):
        ends = [258, self.tokenizer.eos_token_id]
        whole = self.model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=ends)
        return whole[0, len(ids) :].tolist()
