"""Integer checkpoints that are not as described are refused in one line, which names the tensor or the field."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chorus.core.model.specs.config import UnsupportedModel

from .forms import FORMS
from .integer_forms import awq, gptq
from .twins import MODULE, weights, write_twins

pytestmark = pytest.mark.wide

AGAIN = "; download or quantise the checkpoint again"


def refusal(root, form, spoil=lambda _: None) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        list(weights(write_twins(root, form, spoil=spoil)[0]))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def setting(end, value):
    return lambda tensors: tensors.update({f"{MODULE}.{end}": value})


@pytest.mark.parametrize("form", ["awq", "gptq"])
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda t: t.pop(f"{MODULE}.scales"), f"tensor {MODULE}.scales is missing"),
        (lambda t: t.pop(f"{MODULE}.qweight"), f"tensor {MODULE}.qweight is missing"),
        (setting("scales", torch.ones(3, 16)), f"{MODULE}.scales has shape [3, 16], config.json needs [2, 16]"),
        (setting("qzeros", torch.ones(2, 3).int()), f"{MODULE}.qzeros has shape [2, 3], config.json needs [2, 2]"),
        (setting("qzeros", torch.ones(2, 2)), f"{MODULE}.qzeros is stored as F32; supported: I32"),
        (setting("scales", torch.full((2, 16), torch.inf)), f"{MODULE}.scales has scales that are not finite"),
        (setting("bits", torch.ones(2)), f"tensor {MODULE}.bits has no place in this model"),
    ],
)
def test_bad_tensors_are_named_with_the_mend(tmp_path, form, spoil, why):
    said = refusal(tmp_path, FORMS[form], spoil)
    assert why in said and str(tmp_path) in said
    assert said.endswith(AGAIN) or "no place" in said


@pytest.mark.parametrize(
    ("end", "value", "why"),
    [
        ("qzeros", torch.full((4, 2), 0x0F000000).int(), "qzeros has the value 16, allowed are 0 to 15"),
        ("g_idx", torch.tensor([0, 1, 2, 4] * 4).int(), "g_idx has the value 4, allowed are 0 to 3"),
        ("g_idx", torch.tensor([0, 1, 2, -1] * 4).int(), "g_idx has the value -1, allowed are 0 to 3"),
    ],
)
def test_zero_points_and_groups_out_of_range_are_named(tmp_path, end, value, why):
    said = refusal(tmp_path, FORMS["gptq act order"], setting(end, value))
    assert f"tensor {MODULE}.{why}" in said and said.endswith(AGAIN)


def test_act_order_needs_its_groups(tmp_path):
    form = FORMS["gptq act order"]
    assert f"{MODULE}.g_idx is missing" in refusal(tmp_path, form, lambda t: t.pop(f"{MODULE}.g_idx"))


def test_a_module_that_is_listed_as_plain_but_stored_packed_is_named(tmp_path):
    form = awq(modules_to_not_convert=["self_attn.o_proj"])
    assert "o_proj.weight is missing" in refusal(tmp_path, form)


def test_a_plain_module_that_no_list_names_is_told(tmp_path):
    form = replace(awq(), plain=("layers.1.self_attn.o_proj",))
    assert f"{MODULE}.qweight is missing" in refusal(tmp_path, form)


def test_a_truncated_file_is_told(tmp_path):
    quantised, _ = write_twins(tmp_path, FORMS["awq"])
    file = quantised / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UnsupportedModel, match=r"safetensors: cannot be read: .*; download the checkpoint again"):
        list(weights(quantised))


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (awq(bits=3), "quantization_config.bits is 3: not supported with quant_method awq; supported: 4"),
        (awq(version="gemv"), "quantization_config.version is 'gemv': not supported; supported: gemm"),
        (awq(group_size=0), "quantization_config.group_size is 0: a whole number of at least 1 is needed"),
        (awq(rotation=True), "quantization_config.rotation is True: unknown field"),
        (awq(modules_to_not_convert=["re:("]), "modules_to_not_convert is ['re:(']: '(' is not a regular expression"),
        (gptq(bits=3, has_order=False), "quantization_config.bits is 3: not supported"),
        (gptq(checkpoint_format="marlin"), "checkpoint_format is 'marlin': not supported with quant_method gptq"),
        (gptq(pack_dtype="int16"), "quantization_config.pack_dtype is 'int16': not supported; supported: int32"),
        (gptq(dynamic={"+:.*q_proj": {"bits": 5}}), "quantization_config.dynamic.+:.*q_proj.bits is 5: not supported"),
        (gptq(dynamic={"q_proj": {"rotation": 1}}), "dynamic.q_proj.rotation is 1: unknown field; known: act_group"),
        (gptq(dynamic={"-:(": {}}), "quantization_config.dynamic.-:( is {}: it is not a regular expression"),
        (replace(gptq(), how={"quant_method": "hqq"}), "quantization_config.quant_method is 'hqq': not supported"),
    ],
)
def test_fields_that_would_change_the_weights_are_refused_by_name(tmp_path, form, why):
    form = replace(form, quantise=awq().quantise)
    assert why in refusal(tmp_path, form)


def test_a_rule_of_dynamic_may_change_the_width(tmp_path):
    other, usual = gptq(8, 4, act_order=True), gptq(act_order=True)
    rule = {"+:.*\\.[01]\\.mlp": {"bits": 8, "group_size": 4}}
    form = replace(
        usual,
        how={**usual.how, "dynamic": rule},
        quantise=lambda name, shape: (other if ".mlp." in name else usual).quantise(name, shape),
    )
    for found, want in zip(*map(weights, write_twins(tmp_path, form)), strict=True):
        assert found is want is None or torch.equal(found, want)


def test_biases_of_zeros_are_left_out_and_others_are_refused(tmp_path):
    bias = f"{MODULE}.bias"
    (tmp_path / "zeros").mkdir()
    twins = write_twins(tmp_path / "zeros", FORMS["gptq"], spoil=lambda t: t.update({bias: torch.zeros(16).half()}))
    for found, want in zip(*map(weights, twins), strict=True):
        assert found is want is None or torch.equal(found, want)
    assert f"{bias} has no place" in refusal(tmp_path, FORMS["gptq"], lambda t: t.update({bias: torch.ones(16)}))


def test_the_one_file_may_have_any_name(tmp_path):
    quantised, twin = write_twins(tmp_path, FORMS["gptq"])
    (quantised / "model.safetensors").rename(quantised / "gptq_model-4bit-128g.safetensors")
    for found, want in zip(weights(quantised), weights(twin), strict=True):
        assert found is want is None or torch.equal(found, want)
    (quantised / "other.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"no model.safetensors, nor"):
        list(weights(quantised))
