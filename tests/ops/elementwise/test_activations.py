"""Functions of single values have a value's bits in any company, and are those of float64 within rounding."""

from __future__ import annotations

import pytest
import torch

from chorus.ops.elementwise import activations

FUNCTIONS = {
    "sigmoid": (activations.sigmoid, torch.sigmoid),
    "silu": (activations.silu, torch.nn.functional.silu),
    "softplus": (activations.softplus, torch.nn.functional.softplus),
    "gelu": (activations.gelu, torch.nn.functional.gelu),
    "gelu by tanh": (activations.gelu_tanh, lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
}


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", [1, 16, 24, 60])
def test_bits_do_not_depend_on_how_many_values_there_are(name, width, dtype):
    """PyTorch computes the last values of an array, and of each thread's share of it, by another routine."""
    function, _ = FUNCTIONS[name]
    rows = (torch.randn(60_000 // width, width, generator=torch.Generator().manual_seed(width)) * 3).to(dtype)
    whole = function(rows)
    assert whole.dtype == dtype
    for count in (1, 3, 7, len(rows) // 3):
        parts = [function(each) for each in rows[: 400 * count].split(count)]
        assert torch.equal(torch.cat(parts), whole[: 400 * count])
    assert torch.equal(function(rows.T).T, whole)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_float64(name):
    function, exact = FUNCTIONS[name]
    x = torch.cat([torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 10, torch.linspace(-120, 120, 999)])
    torch.testing.assert_close(function(x), exact(x.double()).float(), rtol=2e-6, atol=2e-7)
    ends = torch.tensor([float("inf"), 0.0, -0.0, 3e38, -3e38])
    assert torch.equal(function(ends), exact(ends.clamp(max=3e38).double()).float().where(ends < 3e38, function(ends)))
    assert function(torch.tensor([float("nan")])).isnan()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bfloat16_is_rounded_once(name):
    function, _ = FUNCTIONS[name]
    x = torch.randn(500, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(function(x), function(x.float()).bfloat16())
