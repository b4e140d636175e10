"""Norm, rotary embedding and activation against transformers' own modules."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from chorus.ops.elementwise.elementwise import (
    HeadNorms,
    RotaryEmbedding,
    Rotation,
    add_rms_norm,
    apply_rope,
    rms_norm,
    rotary_table,
    rotate_and_write,
    silu_and_mul,
    write_kv,
)
from chorus.ops.elementwise.rotation import KvSlots

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [1e-5, 1e-2])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rms_norm(dtype, eps, scale):
    module = LlamaRMSNorm(48, eps).to(dtype)
    module.weight.data.uniform_(0.5, 1.5)
    x = (torch.randn(7, 48) * scale).to(dtype)
    with torch.inference_mode():
        assert torch.equal(rms_norm(x, module.weight, eps), module(x))


def test_rms_norm_of_zeros_is_zero():
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "theta"), [(8, 10_000.0), (64, 10_000.0), (128, 500_000.0)])
def test_rope(dtype, head_dim, theta):
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    module = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 5, 300, 511])
    q, k = torch.randn(1, 4, 5, head_dim).to(dtype), torch.randn(1, 2, 5, head_dim).to(dtype)
    want_q, want_k = apply_rotary_pos_emb(q, k, *module(q, positions[None]))

    cos, sin = rotary_table(1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim), 512)
    assert cos.shape == sin.shape == (512, head_dim)
    assert cos.dtype is torch.float32
    cos, sin = cos.to(dtype)[positions][:, None], sin.to(dtype)[positions][:, None]
    for x, want in ((q, want_q), (k, want_k)):
        torch.testing.assert_close(apply_rope(x[0].transpose(0, 1), cos, sin), want[0].transpose(0, 1))


def test_rope_keeps_the_first_position_and_every_length():
    cos, sin = rotary_table(torch.tensor([1.0, 0.1]), 20)
    x = torch.randn(20, 3, 4)
    rotated = apply_rope(x, cos[:, None], sin[:, None])
    assert torch.equal(rotated[0], x[0])
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul(dtype):
    module = LlamaMLP(LlamaConfig(hidden_size=24, intermediate_size=40, num_attention_heads=2)).to(dtype)
    x = torch.randn(6, 24).to(dtype)
    with torch.inference_mode():
        gate_up = torch.cat((module.gate_proj(x), module.up_proj(x)), dim=-1)
        torch.testing.assert_close(module.down_proj(silu_and_mul(gate_up)), module(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_updates_the_residual(dtype):
    x, residual, weight = torch.randn(5, 24).to(dtype), torch.randn(5, 24).to(dtype), torch.randn(24).to(dtype)
    summed = residual + x
    got = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, summed)
    assert torch.equal(got, rms_norm(summed, weight, 1e-5))


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("normed", [False, True])
def test_rotate_and_write_is_norm_rotation_and_write(tokens, normed):
    heads, kv_heads, head_dim = 6, 2, 8
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim)
    positions = torch.randint(0, 50, (tokens,))
    place = torch.randperm(24)[:tokens]
    norms = HeadNorms(torch.randn(head_dim), torch.randn(head_dim), 1e-5) if normed else None
    cos, sin = rotary_table(torch.tensor([1.0, 0.3, 0.1, 0.01]), 50)
    caches = torch.zeros(2, 6, 3, 2, 4, kv_heads, head_dim)

    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in qkv.split((48, 16, 16), dim=1))
    if norms is not None:
        q, k = rms_norm(q, norms.q, 1e-5), rms_norm(k, norms.k, 1e-5)
    q, k = (apply_rope(x, cos[positions][:, None], sin[positions][:, None]) for x in (q, k))
    write_kv(KvSlots(caches[0][:, 1, 0], caches[0][:, 1, 1], place // 4, place % 4), k, v)

    rotary = RotaryEmbedding(torch.tensor([1.0, 0.3, 0.1, 0.01]), 50, torch.float32)
    table = Rotation(cos, sin, positions)  # as on a GPU: the table and where to look
    for rotation in (rotary.at(positions), table):
        caches[1].zero_()
        slots = KvSlots(caches[1][:, 1, 0], caches[1][:, 1, 1], place // 4, place % 4)
        got = rotate_and_write(qkv, rotation, norms, slots)
        assert got.shape == (tokens, heads, head_dim)
        assert torch.equal(got, q)
        assert torch.equal(caches[0], caches[1])
