"""The reasons against PEFT's other methods are true: PEFT converts, or merges, what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.methods.method import CONVERT
from chorus.memory.files.methods.registry import METHODS, UNSERVED
from chorus.memory.files.unserved import MERGE

from ....tables import TINY_PATHS

pytestmark = pytest.mark.wide

#: Arguments of configurations that fit the tiny model.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 8},
    "FOURIERFT": {"n_frequency": 20},
    "OFT": {"r": 0, "oft_block_size": 8},
    "PSOFT": {"r": 4},
    "RANDLORA": {"r": 4},
    "ROAD": {"group_size": 8},
    "SHIRA": {"r": 1},
    "WAVEFT": {"n_frequency": 20},
}


def adapted(base: Any, method: str, **variant: Any) -> Any:
    """A model with an adapter of a method. variant: further fields of its configuration."""
    from peft import PeftType, get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(method)]
    arguments = {
        "target_modules": ["q_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
        **ARGUMENTS.get(method, {}),
        **variant,
    }
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), kind(**arguments))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_a_pickle_next_to_safetensors_is_left_alone(adapter_draft, tmp_path):
    path = adapter_draft().write(tmp_path / "a")
    (path / "adapter_model.bin").write_bytes(b"no pickle")
    assert inspect_adapter(path, TINY_PATHS).rank == 4


@pytest.mark.parametrize("method", [name for name, why in UNSERVED.items() if CONVERT in why])
def test_what_is_to_be_converted(tiny_base, tmp_path, method):
    import peft

    model = adapted(tiny_base, method)
    model.save_pretrained(tmp_path / "raw")
    with pytest.raises(AdapterFormatError) as caught:
        inspect_adapter(tmp_path / "raw", TINY_PATHS)
    assert f"adapter_config.json: peft_type is '{method}'; LORA, " in str(caught.value)
    assert "peft.save_as_lora(DIR, model, rank=R)" in str(caught.value)
    peft.save_as_lora(tmp_path / "plain", model, rank=4)
    assert inspect_adapter(tmp_path / "plain", TINY_PATHS).rank == 4


@pytest.mark.parametrize(
    ("method", "variant"),
    [
        ("MISS", {"r": 4, "init_weights": "bat"}),
        ("MISS", {"r": 4, "init_weights": "mini", "mini_r": 8}),
        ("VBLORA", {"vector_length": 8, "num_vectors": 4, "save_only_topk_weights": True}),
    ],
)
def test_variants_that_are_to_be_converted(tiny_base, tmp_path, method, variant):
    """Of methods that are served; PEFT converts what it has read."""
    import peft
    from transformers import AutoModelForCausalLM

    adapted(tiny_base, method, **variant).save_pretrained(tmp_path / "raw")
    with pytest.raises(
        AdapterFormatError, match=r"adapter_config\.json: of .*peft\.save_as_lora\(DIR, model, rank=R\)"
    ):
        inspect_adapter(tmp_path / "raw", TINY_PATHS)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_base), tmp_path / "raw")
    peft.save_as_lora(tmp_path / "plain", model, rank=4)
    assert inspect_adapter(tmp_path / "plain", TINY_PATHS).rank == 4


@pytest.mark.parametrize("method", [name for name, why in UNSERVED.items() if MERGE in why])
def test_what_is_to_be_merged(tiny_base, method):
    import peft

    model = adapted(tiny_base, method)
    with pytest.raises(TypeError, match="not support LoRA conversion"):
        peft.convert_to_lora(model, rank=4)
    tokens = torch.tensor([[1, 5, 9]])
    want = model.eval()(tokens).logits
    torch.testing.assert_close(model.merge_and_unload()(tokens).logits, want, rtol=1e-2, atol=1e-3)


def test_every_method_of_peft_has_a_verdict(tmp_path):
    from peft import PeftType

    for method in PeftType:
        if method.value in ("LORA", *METHODS):
            continue
        (tmp_path / "adapter_config.json").write_text(f'{{"peft_type": "{method.value}"}}')
        (tmp_path / "adapter_model.safetensors").write_bytes(b"")
        with pytest.raises(AdapterFormatError, match=f"peft_type is '{method.value}'; .*(LoRA|LORA)"):
            inspect_adapter(tmp_path, TINY_PATHS)
