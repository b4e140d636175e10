"""`LLM.embed`: the vectors of transformers with PEFT."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chorus import LLM
from chorus.core.requests.request_params import InvalidRequest
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL

from ..conftest import quiet

TEXTS = ["hello", "good morning, world\n", "a"]


@pytest.fixture(scope="module")
def llm():
    with LLM(memory_bytes=8 << 20, threads=1, cpu_kernels="torch", dtype="float32", max_inputs=2) as llm:
        yield llm


@pytest.fixture(scope="module")
@quiet()
def reference():
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(BUILTIN_MODEL, dtype=torch.float32)
    found = PeftModel.from_pretrained(base, BUILTIN_ADAPTERS / "upper", adapter_name="upper")
    found.load_adapter(BUILTIN_ADAPTERS / "reverse", adapter_name="reverse")
    return found.eval()


def state(reference, adapter, tokens):
    with torch.inference_mode():
        if adapter is None:
            with reference.disable_adapter():
                return reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0, -1].numpy()
        reference.set_adapter(adapter)
        return reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0, -1].numpy()


def unit(vector):
    return vector / np.linalg.norm(vector)


def test_vectors_are_those_of_peft_with_an_adapter_each(llm, reference):
    adapters = ["upper", None, "reverse"]
    found = llm.embed(TEXTS, adapter=adapters)
    for text, adapter, each in zip(TEXTS, adapters, found, strict=True):
        (tokens,) = llm.tokenizer.encode_now([text])
        assert list(each.prompt_token_ids) == tokens
        assert each.embedding == pytest.approx(unit(state(reference, adapter, tokens)), abs=1e-5)
        assert (each.adapter or "").partition("@")[0] == (adapter or "")


def test_one_prompt_gives_one_vector_of_as_many_dimensions(llm, reference):
    (tokens,) = llm.tokenizer.encode_now(["hello"])
    whole = state(reference, None, tokens)
    assert llm.embed("hello", dimensions=8).embedding == pytest.approx(unit(whole[:8]), abs=1e-5)
    assert llm.embed(tokens, normalize=False).embedding == pytest.approx(whole, rel=1e-4, abs=1e-4)
    assert llm.embed([]) == []


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompts": "a", "adapter": "none"}, "adapter"),
        ({"prompts": "a", "dimensions": 10**6}, "dimensions"),
        ({"prompts": [3.5]}, "prompts[0]"),
        ({"prompts": ["a", "b"], "adapter": ["upper"]}, "adapter"),
    ],
)
def test_wrong_arguments_are_named(llm, arguments, field):
    with pytest.raises(InvalidRequest) as raised:
        llm.embed(**arguments)
    assert raised.value.field == field
