"""Quantised checkpoints have the weights of a plain checkpoint that holds the dequantised values, bit by bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chorus.core.model.checkpoints.quantization.groups import plain
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights import weight_loader as loading
from chorus.core.model.weights.shard import Shard
from chorus.core.model.weights.weight_loader import WeightLoader

from .forms import FORMS
from .twins import AS_STORED, CONFIG, Form, weights, write_twins

pytestmark = pytest.mark.wide

#: Two ways to read a checkpoint, and two others. From form to form the architectures change places.
OPTIONS = [({}, {"shard": Shard(0, 2)}), ({"dtype": torch.float32}, {"shard": Shard(1, 2)})]

OF_DENSE = [
    (form, architecture, OPTIONS[(index + place) % 2])
    for index, form in enumerate(FORMS)
    for place, architecture in enumerate(["LlamaForCausalLM", "Phi3ForCausalLM"])
]


@pytest.mark.parametrize(("form", "architecture", "options"), OF_DENSE)
def test_weights_have_the_bits_of_the_dequantised_twin(tmp_path, form, architecture, options):
    quantised, twin = write_twins(tmp_path, FORMS[form], architecture)
    for each in options:
        for found, want in zip(weights(quantised, **each), weights(twin, **each), strict=True):
            assert (found is None and want is None) or torch.equal(found, want)


@pytest.mark.parametrize("form", ["gptq", "compressed int8", "fp8"])
def test_a_quantised_head_beside_tied_embeddings_is_read(tmp_path, form):
    """It is served as it is, as a plain one that differs from the embeddings."""
    made = replace(FORMS[form], config={"tie_word_embeddings": True}, how=FORMS[form].how | {"ignore": []})
    made = made if "ignore" in FORMS[form].how else replace(made, how=FORMS[form].how)
    head = []

    def add(tensors):
        stored, weight = made.quantise("lm_head", (CONFIG["vocab_size"], CONFIG["hidden_size"]))
        head.append(weight)
        tensors.update({f"lm_head.{end}": tensor for end, tensor in stored.items()})

    quantised, twin = write_twins(tmp_path, made, spoil=add)
    *layers, found = weights(quantised, torch.float32)
    *wanted, _ = weights(twin, torch.float32)
    assert torch.equal(found, head[0])
    assert all(one is two is None or torch.equal(one, two) for one, two in zip(layers, wanted, strict=True))


EXPERTS = {
    "MixtralForCausalLM": {"num_local_experts": 3},
    "Qwen3MoeForCausalLM": {"num_experts": 3, "moe_intermediate_size": 8},
    "Glm4MoeForCausalLM": {"n_routed_experts": 3, "moe_intermediate_size": 8, "num_nextn_predict_layers": 0},
    "Qwen3_5MoeForCausalLM": {
        "num_experts": 3, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 24,
        "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip
"""Each expert's projections are tensors of their own in these."""


def with_experts(form: str, architecture: str, **config: Any) -> Form:
    """Routers are plain, and no list names them."""
    found, routers = FORMS[form], ("mlp.gate", "block_sparse_moe.gate", "mlp.shared_expert_gate")
    config = {**EXPERTS[architecture], "num_experts_per_tok": 2, **config}
    return replace(found, plain=(*found.plain, *routers), config={**found.config, **config})


#: The lists of these name projections by ends that experts of other families have, too.
BY_ENDS = ("gptq dynamic", "compressed mixed")

OF_EXPERTS = [
    (form, "MixtralForCausalLM" if form in BY_ENDS else architecture, dtype)
    for form, architecture, dtype in zip(
        FORMS, itertools.cycle(EXPERTS), itertools.cycle([torch.bfloat16] * 4 + [torch.float32] * 4), strict=False
    )
]


@pytest.mark.parametrize(("form", "architecture", "dtype"), OF_EXPERTS)
def test_experts_have_the_bits_of_the_dequantised_twin(tmp_path, form, architecture, dtype):
    quantised, twin = write_twins(tmp_path, with_experts(form, architecture), architecture)
    found = list(weights(quantised, dtype))
    assert len(found) > 2 * 3 * 2
    for one, other in zip(found, weights(twin, dtype), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2)], ids=["whole", "share"])
@pytest.mark.parametrize("form", ["awq", "fp8 blocks", "bnb nf4"])
def test_rows_by_unit_have_the_bits_of_the_dequantised_twin(tmp_path, form, shard):
    """Of two projections in one matrix, head by head (Qwen3-Next), dequantised or kept narrow."""
    made = with_experts(form, "Qwen3_5MoeForCausalLM")
    quantised, twin = write_twins(tmp_path, made, "Qwen3NextForCausalLM")
    wanted = next(WeightLoader(twin, read_model_config(twin), torch.float32, shard=shard).layers())["qkv"]
    loader = WeightLoader(quantised, read_model_config(quantised), torch.float32, shard=shard)
    assert torch.equal(next(loader.layers())["qkv"], wanted)
    loader.plan = AS_STORED
    assert torch.equal(next(loader.layers(lambda weight: plain(weight, torch.float32).clone()))["qkv"], wanted)


@pytest.mark.parametrize("form", ["bnb nf4", "fp8 blocks"])
def test_a_router_that_is_stored_quantised_is_read_so(tmp_path, form):
    made = replace(with_experts(form, "Qwen3MoeForCausalLM"), plain=FORMS[form].plain)
    quantised, twin = write_twins(tmp_path, made, "Qwen3MoeForCausalLM")
    for one, other in zip(*(weights(path, torch.float32) for path in (quantised, twin)), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


EXPERT = "model.layers.1.mlp.experts.2.down_proj"


@pytest.mark.parametrize(
    ("form", "spoil", "why"),
    [
        ("fp8", lambda t: t.pop(f"{EXPERT}.weight_scale"), f"tensor {EXPERT}.weight_scale is missing"),
        ("awq", lambda t: t.update({f"{EXPERT}.scales": torch.ones(3, 16)}), "scales has shape [3, 16]"),
        ("gptq", lambda t: t.pop(f"{EXPERT}.qweight"), f"tensor {EXPERT}.qweight is missing"),
        (
            "compressed packed",
            lambda t: t.update({f"{EXPERT}.weight_scale": torch.full((16, 1), torch.nan)}),
            "weight_scale has scales that are not finite",
        ),
    ],
)
def test_bad_tensors_of_experts_are_named(tmp_path, form, spoil, why):
    made = with_experts(form, "Qwen3MoeForCausalLM")
    with pytest.raises(UnsupportedModel) as caught:
        list(weights(write_twins(tmp_path, made, "Qwen3MoeForCausalLM", spoil)[0]))
    assert EXPERT in str(caught.value) and why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_parts_of_any_number_of_rows_make_the_same_weights(tmp_path, monkeypatch, form):
    monkeypatch.setattr(loading, "_CHUNK", 50)
    monkeypatch.setattr(loading, "_ROWS", 1)
    quantised, twin = write_twins(tmp_path, FORMS[form])
    for found, want in zip(weights(quantised), weights(twin), strict=True):
        assert (found is None and want is None) or torch.equal(found, want)


#: AWQ packs eight outputs into a word, so 30 of them are no shape of it.
SHAPES = [(form, hidden) for form in FORMS for hidden in (30, 40) if hidden == 40 or not form.startswith("awq")]


@pytest.mark.parametrize(("form", "hidden"), SHAPES)
def test_shapes_that_groups_and_words_do_not_divide(tmp_path, form, hidden):
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 7 // 5, "head_dim": hidden // 5}
    sizes |= {"num_attention_heads": 5, "num_key_value_heads": 1}
    config = replace(FORMS[form], config=sizes)
    quantised, twin = write_twins(tmp_path, config)
    for found, want in zip(weights(quantised), weights(twin), strict=True):
        assert (found is None and want is None) or torch.equal(found, want)


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation returns."""

    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.num_bytes = max(self.num_bytes, made.untyped_storage().nbytes())
        return made


#: One for each way to lay out or unpack values; the others differ in how the file describes them, or in bits.
WAYS = [
    *("fp8", "fp8 channels", "fbgemm fp8", "fp8 blocks", "awq", "gptq", "gptq act order", "gptq without g_idx"),
    *("bnb nf4", "bnb nf4, nested", "bnb int8", "modelopt nvfp4", "compressed packed", "compressed mixed"),
    *("compressed packed, zero points", "compressed packed, act order", "compressed int8"),
    *("compressed int8, zero points", "compressed fp8, blocks", "compressed nvfp4", "compressed mxfp4"),
]


@pytest.mark.slow
@pytest.mark.parametrize("form", WAYS)
def test_nothing_is_as_large_as_a_projection_while_it_is_read(tmp_path, monkeypatch, form):
    monkeypatch.setattr(loading, "_CHUNK", 4096)
    monkeypatch.setattr(loading, "_ROWS", 8)
    sizes = {"hidden_size": 64, "intermediate_size": 768, "vocab_size": 56}
    path, _ = write_twins(tmp_path, replace(FORMS[form], config=sizes))
    loader = WeightLoader(path, read_model_config(path), torch.bfloat16)
    with Largest() as largest:
        kept = [layer["gate_up"].nbytes for layer in loader.layers()]
    assert largest.num_bytes == kept[0] == 2 * 768 * 64 * 2
