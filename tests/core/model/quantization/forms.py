"""Every form of quantised weights that is read."""

from __future__ import annotations

from .float_forms import fp8
from .integer_forms import awq, gptq
from .twins import Form

FORMS: dict[str, Form] = {
    "fp8": fp8("tensor"),
    "fp8 channels": fp8("channel", plain=("mlp.down_proj",)),
    "fp8 blocks": fp8("block", ("mlp.down_proj",), "weight_scale_inv", weight_block_size=[5, 7]),
    "awq": awq(),
    "awq channels": awq(None),
    "awq mixed": awq(plain=("mlp.down_proj", "layers.0.self_attn.q_proj", "layers.0.self_attn.qkv_proj")),
    "gptq": gptq(),
    "gptq act order": gptq(act_order=True, group=4),
    "gptq 8 bits": gptq(8, act_order=True),
    "gptq 2 bits": gptq(2, v2=True),
    "gptq v2": gptq(v2=True),
    "gptq channels": gptq(group=None),
    "gptq without g_idx": gptq(has_order=False, has_head=True),
    "gptq odd groups": gptq(group=5),
    "gptq dynamic": gptq(plain=("mlp.down_proj",), dynamic={r"-:.*\.down_proj": {}}),
}
