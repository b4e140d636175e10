"""Kernels that once spilled registers, compiled for every architecture: the gate compiles the widest alone for most."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from chorus.perf.kernels.variants import compile_variant, plain_variants

pytestmark = [pytest.mark.slow, pytest.mark.triton]

ONCE = [
    variant
    for variant in plain_variants()
    if (variant.kernel == "add_to_heads" and variant.group == "latents.expand merged")
    or (variant.kernel == "attend_rows" and variant.dtype == "fp32" and not variant.group.endswith((".96", ".128")))
    or variant.group == "rotary.interleaved"
    or variant.group == "routing.logits.2048"
    or (variant.group.startswith("wide") and variant.dtype == "bf16")  # with 128 rows
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("variant", ONCE, ids=lambda it: f"{it.kernel} {it.group} {it.dtype}")
def test_it_spills_no_registers(variant, arch):
    assert compile_variant((variant, arch))["spill_bytes"] == 0
