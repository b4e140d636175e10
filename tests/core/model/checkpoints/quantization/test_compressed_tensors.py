"""Checkpoints of compressed-tensors: as the library itself writes and reads them, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from chorus.core.model.specs.config import UnsupportedModel

from .float_forms import compressed_fp4, compressed_fp8
from .integer_forms import compressed, compressed_integers
from .twins import MODULE, Form, Tensors, weights, write_twins

pytestmark = pytest.mark.wide

AGAIN = "; download or quantise the checkpoint again"

#: format → arguments of the weights, and the compressor that writes them.
WRITTEN: dict[str, tuple[dict[str, Any], str]] = {
    "pack-quantized": ({"num_bits": 4, "strategy": "group", "group_size": 8, "symmetric": False}, "pack_quantized"),
    "pack-quantized, 8 bits": ({"num_bits": 8, "strategy": "channel"}, "pack_quantized"),
    "int-quantized": ({"num_bits": 8, "strategy": "channel", "symmetric": False}, "naive_quantized"),
    "float-quantized": ({"num_bits": 8, "type": "float", "strategy": "tensor"}, "naive_quantized"),
    "nvfp4-pack-quantized": (
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": None},
        "nvfp4",
    ),
}


def library_form(name: str) -> Form:
    """A form that the library compresses, and decompresses for the twin."""
    library = pytest.importorskip("compressed_tensors.quantization")
    import compressed_tensors.compressors as compressors

    args, module = WRITTEN[name]
    layout = name.split(",")[0]
    scheme = library.QuantizationScheme(targets=["Linear"], weights=library.QuantizationArgs(**args))
    compressor = {
        "pack_quantized": compressors.PackedQuantizationCompressor,
        "naive_quantized": compressors.NaiveQuantizationCompressor,
        "nvfp4": compressors.NVFP4PackedCompressor,
    }[module]

    def quantise(_: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        group = args.get("group_size") or shape[1]
        of = (1,) if args["strategy"] == "tensor" else (shape[0], shape[1] // group)
        state = {"weight": torch.randn(shape), "weight_scale": torch.rand(of) + 0.25}
        if args.get("symmetric") is False:
            state["weight_zero_point"] = torch.randint(-3, 4, of, dtype=torch.int8)
        if module == "nvfp4":
            state["weight_scale"] = state["weight_scale"].to(torch.float8_e4m3fn).float()
            state["weight_global_scale"] = torch.rand(1) + 1
        stored = compressor.compress(dict(state), scheme)
        state = {**stored, "weight_scale": stored["weight_scale"].float()} if module != "nvfp4" else dict(stored)
        return stored, compressor.decompress(state, scheme)["weight"].float()

    config = {"intermediate_size": 32, "num_key_value_heads": 4}  # the library can't unpack one word of zero points
    return Form(quantise, compressed(layout, {"type": "int", **args}), config=config)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_the_library_writes_is_read_as_the_library_does(tmp_path, name):
    for found, want in zip(*map(weights, write_twins(tmp_path, library_form(name))), strict=True):
        assert found is want is None or torch.equal(found, want)


def refusal(root, form: Form, spoil: Callable[[Tensors], object] = lambda _: None) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        list(weights(write_twins(root, form, spoil=spoil)[0]))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def setting(end: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{MODULE}.{end}": value})


INTEGERS = compressed_integers(symmetric=False)
NVFP4 = compressed_fp4("nvfp4-pack-quantized", 16, "weight_global_scale")


@pytest.mark.parametrize(
    ("form", "end", "value", "why"),
    [
        (INTEGERS, "weight_packed", torch.ones(16, 3).int(), "has shape [16, 3], config.json needs [16, 2]"),
        (INTEGERS, "weight_scale", torch.ones(2, 16), "has shape [2, 16], config.json needs [16, 2]"),
        (INTEGERS, "weight_scale", torch.full((16, 2), torch.nan), "has scales that are not finite numbers"),
        (INTEGERS, "weight_zero_point", torch.ones(16, 2).int(), "has shape [16, 2], config.json needs [2, 2]"),
        (INTEGERS, "weight_zero_point", torch.full((16, 2), 9).char(), "has the value 9, allowed are -8 to 7"),
        (INTEGERS, "weight_shape", torch.tensor([16, 15]), "says [16, 15], config.json needs [16, 16]"),
        (NVFP4, "weight_packed", torch.ones(16, 8), "is stored as F32; supported: U8"),
        (NVFP4, "weight_scale", torch.ones(16, 1), "is stored as F32; supported: F8_E4M3"),
        (NVFP4, "weight_global_scale", torch.zeros(1), "is 0.0, not above 0"),
        (compressed_fp4("mxfp4-pack-quantized", 32), "weight_scale", torch.full((16, 1), 255).byte(), "the value 255"),
        (compressed_fp8("channel"), "weight_scale", torch.ones(3, 1), "has shape [3, 1], config.json needs [16, 1]"),
    ],
)
def test_bad_tensors_are_named_with_the_mend(tmp_path, form, end, value, why):
    said = refusal(tmp_path, form, setting(end, value))
    assert f"tensor {MODULE}.{end} " in said and why in said and said.endswith(AGAIN)


@pytest.mark.parametrize("end", ["weight_packed", "weight_scale", "weight_zero_point"])
def test_missing_tensors_are_named(tmp_path, end):
    said = refusal(tmp_path, INTEGERS, lambda tensors: tensors.pop(f"{MODULE}.{end}"))
    assert f"tensor {MODULE}.{end} is missing" in said and said.endswith(AGAIN)


def test_quantised_embeddings_are_refused_by_name(tmp_path):
    def quantise(tensors: Tensors) -> None:
        weight = tensors.pop("model.embed_tokens.weight")
        stored, _ = INTEGERS.quantise("model.embed_tokens", (weight.shape[0], weight.shape[1]))
        tensors.update({f"model.embed_tokens.{end}": tensor for end, tensor in stored.items()})

    said = refusal(tmp_path, INTEGERS, quantise)
    assert "the token embeddings, tensor model.embed_tokens.weight, are quantised, which is not supported; use" in said


def with_weights(**changes: Any) -> Form:
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8}
    return replace(INTEGERS, how=compressed("pack-quantized", {**args, **changes}))


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (with_weights(num_bits=3), "config_groups.group_0.weights.num_bits is 3: not supported in this format"),
        (with_weights(group_size=0), "config_groups.group_0.weights.group_size is 0: a whole number of at least 1"),
        (with_weights(strategy="block"), "weights.strategy is 'block': not supported for integers"),
        (with_weights(dynamic=True), "weights.dynamic is True: weights have stored scales"),
        (with_weights(actorder="sideways"), "weights.actorder is 'sideways': not supported"),
        (with_weights(rotation=1), "weights.rotation is 1: unknown field"),
        (replace(INTEGERS, how=INTEGERS.how | {"format": "marlin-24"}), "config.format is 'marlin-24': not supported"),
        (replace(INTEGERS, how=INTEGERS.how | {"ignore": ["re:("]}), "ignore is ['re:(']: '(' is not a regular"),
        (with_weights(strategy="channel"), "weights.group_size is 8: the strategy channel has no groups"),
        (
            replace(INTEGERS, how=INTEGERS.how | {"transform_config": {"config_groups": {"R1": {}}}}),
            "transform_config.config_groups is {'R1': {}}: transforms of activations are not supported",
        ),
        (
            replace(INTEGERS, how=INTEGERS.how | {"sparsity_config": {"format": "sparse-24-bitmask"}}),
            "sparsity_config.format is 'sparse-24-bitmask': sparse weights are not supported",
        ),
    ],
)
def test_fields_that_would_change_the_weights_are_refused_by_name(tmp_path, form, why):
    assert why in refusal(tmp_path, form)


def test_scales_of_the_kv_cache_and_of_activations_are_left_out_and_told(tmp_path, caplog):
    form = replace(INTEGERS, how=INTEGERS.how | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    attention = MODULE.rpartition(".")[0]
    names = [f"{attention}.k_scale", f"{attention}.v_scale", f"{MODULE}.input_scale", f"{MODULE}.input_global_scale"]
    add = lambda tensors: tensors.update({name: torch.ones(1) for name in names})  # noqa: E731
    caplog.set_level("INFO")
    for found, want in zip(*map(weights, write_twins(tmp_path, form, spoil=add)), strict=True):
        assert found is want is None or torch.equal(found, want)
    assert (
        "4 scales of activations, and of the KV cache unless it is in FP8, and biases of zeros are left out"
        in caplog.text
    )


def test_zero_points_of_symmetric_weights_are_left_out_if_they_are_zero(tmp_path):
    form, zero = compressed_fp8("channel"), f"{MODULE}.weight_zero_point"
    (tmp_path / "zeros").mkdir()
    stored = torch.zeros(16, 1).to(torch.float8_e4m3fn)
    twins = write_twins(tmp_path / "zeros", form, spoil=lambda tensors: tensors.update({zero: stored}))
    for found, want in zip(*map(weights, twins), strict=True):
        assert found is want is None or torch.equal(found, want)
    assert f"{zero} has no place" in refusal(tmp_path, form, lambda tensors: tensors.update({zero: torch.ones(16, 1)}))
