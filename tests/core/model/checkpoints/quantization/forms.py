"""Every form of quantised weights that is read."""

from __future__ import annotations

from dataclasses import replace

import torch

from .bnb_forms import bnb_4bit, bnb_int8
from .float_forms import compressed_fp4, compressed_fp8, fbgemm_fp8, fp8, fp8_exponents, modelopt
from .integer_forms import awq, compressed_integers, compressed_mixed, gptq
from .twins import Form


def with_head(form: Form) -> Form:
    """The form on the output projection, too."""
    return replace(form, has_head=True, how=form.how | {"ignore": []})


FORMS: dict[str, Form] = {
    "fp8": fp8("tensor"),
    "fp8 channels": fp8("channel", plain=("mlp.down_proj",)),
    "fbgemm fp8": fbgemm_fp8(),
    "fp8 blocks": fp8("block", ("mlp.down_proj",), "weight_scale_inv", weight_block_size=[5, 7]),
    "fp8 blocks, powers of 2": fp8_exponents(),
    "awq": awq(),
    "awq channels": awq(None),
    "awq mixed": awq(plain=("mlp.down_proj", "layers.0.self_attn.q_proj", "layers.0.self_attn.qkv_proj")),
    "gptq": gptq(),
    "gptq, file beside": replace(gptq(), file="quantize_config.json"),
    "gptq act order": gptq(act_order=True, group=4),
    "gptq 8 bits": gptq(8, act_order=True),
    "gptq 2 bits": gptq(2, v2=True),
    "gptq v2": gptq(v2=True),
    "gptq channels": gptq(group=None),
    "gptq without g_idx": gptq(has_order=False, has_head=True),
    "gptq odd groups": gptq(group=5),
    "gptq dynamic": gptq(plain=("mlp.down_proj",), dynamic={r"-:.*\.down_proj": {}}),
    "bnb nf4": bnb_4bit(plain=("mlp.down_proj",)),
    "bnb nf4, nested": bnb_4bit(block=32, nested=3),
    "bnb nf4, stored as bf16": bnb_4bit(storage=torch.bfloat16, nested=256),
    "bnb fp4": bnb_4bit("fp4", 128),
    "bnb int8": bnb_int8(plain=("layers.0.self_attn.o_proj",)),
    "modelopt fp8": modelopt("FP8"),
    "modelopt nvfp4": modelopt("NVFP4", ("1.mlp.down_proj",)),
    "modelopt nvfp4, file beside": modelopt("NVFP4", ("0.self_attn.o_proj",), "hf_quant_config.json"),
    "compressed packed": compressed_integers(),
    "compressed packed, zero points": compressed_integers(symmetric=False),
    "compressed packed, 8 bits": compressed_integers(8, "channel"),
    "compressed packed, 8 bits, zero points": compressed_integers(8, "channel", symmetric=False),
    "compressed packed, odd groups": compressed_integers(4, group=7, symmetric=False),
    "compressed packed, act order": compressed_integers(group=4, act_order=True, symmetric=False),
    "compressed packed, tensor": compressed_integers(4, "tensor", symmetric=False, dtype=torch.float32),
    "compressed int8": compressed_integers(8, "channel", is_packed=False),
    "compressed int8, zero points": compressed_integers(8, "channel", is_packed=False, symmetric=False),
    "compressed int8, tensor": compressed_integers(8, "tensor", is_packed=False, symmetric=False),
    "compressed int8, output projection": with_head(compressed_integers(8, "channel", is_packed=False)),
    "compressed mixed": compressed_mixed(),
    "compressed fp8": compressed_fp8("tensor"),
    "compressed fp8, channels": compressed_fp8("channel"),
    "compressed fp8, blocks": compressed_fp8("block"),
    "compressed nvfp4": compressed_fp4("nvfp4-pack-quantized", 16, "weight_global_scale"),
    "compressed mxfp4": compressed_fp4("mxfp4-pack-quantized", 32),
}
