"""Rows times the matrices that they go to: values, bits that depend on a row alone, and what can't be packed."""

from __future__ import annotations

import itertools
import os
import random
from threading import Thread

import pytest
import torch

from chorus.core.model.checkpoints.quantization.rounded_inputs import RoundedInputs
from chorus.ops.gemm import packed_gemm
from chorus.ops.library import native_library
from chorus.ops.library.native_integers import IntegerPanels, pack_integers
from chorus.ops.moe.expert_gemms import Panels, multiply_each, pack, unpack

pytestmark = [pytest.mark.native(needed=False), pytest.mark.wide]

LEVELS = native_library.levels()


@pytest.fixture(params=[*LEVELS, "none"])
def level(request, monkeypatch) -> str:
    """The native library of each level, or oneDNN."""
    monkeypatch.setenv(native_library.ISA, request.param)
    return request.param


def made(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (80, 46), (7, 2)])
def test_values_are_those_of_float64(level, dtype, biased, threads, outputs, inputs, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    counts = [1, 250, 2, 13]
    weights = [made(outputs, inputs, seed=i, dtype=dtype) for i in range(4)]
    biases = [made(outputs, seed=10 + i, dtype=dtype) for i in range(4)] if biased else None
    x = made(sum(counts), inputs, seed=20, dtype=dtype)
    packed = [pack(weight) for weight in weights]
    assert all(isinstance(each, Panels) for each in packed) == (level != "none")
    found = multiply_each(x, list(itertools.accumulate(counts)), packed, biases)
    want = [
        rows.double() @ weight.double().T + (0 if biases is None else biases[index].double())
        for index, (rows, weight) in enumerate(zip(x.split(counts), weights, strict=True))
    ]
    bounds = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), torch.cat(want), **bounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_do_not_depend_on_its_company(level, dtype):
    """Of other matrices, or more rows of its own, on one thread or more."""
    packed = [pack(made(80, 46, seed=i, dtype=dtype)) for i in range(3)]
    x = made(300, 46, seed=9, dtype=dtype)
    want = multiply_each(x, [300], packed[:1])
    for count in (1, 2, 7, 200):
        own = x[:count]
        assert torch.equal(multiply_each(own, [count], packed[:1]), want[:count])
        beside = multiply_each(
            torch.cat([x[50:60], own, x[:5]]), [10, 10 + count, 15 + count], [packed[1], packed[0], packed[2]]
        )
        assert torch.equal(beside[10 : 10 + count], want[:count])


FORMS = [(8, 1 << 20, False, 16), (8, 32, False, 16), (4, 32, True, 16), (4, 64, False, 8), (8, 1 << 20, True, 8)]
"""Bits, inputs of a group, whether there are zeros, and bits of activations."""


def whole(
    outputs: int, inputs: int, bits: int, group: int, *, zeros: bool, input_bits: int, seed: int
) -> IntegerPanels:
    generator, half = torch.Generator().manual_seed(seed), 1 << (bits - 1)
    groups = -(-inputs // group)
    values = torch.randint(-half, half, (outputs, inputs), dtype=torch.int8, generator=generator)
    values[0, 0] = -half
    scales = torch.rand(outputs, groups, generator=generator) / half
    points = torch.randint(-half, half, (outputs, groups), generator=generator) if zeros else None
    return pack_integers(values, scales, points, bits=bits, group=group, input_bits=input_bits, input_block=64)


@pytest.mark.skipif(not LEVELS, reason="needs the native library")
@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("bits", "group", "zeros", "input_bits"), FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (80, 46)])
def test_whole_numbers_are_those_of_float64(
    isa, dtype, threads, bits, group, zeros, input_bits, outputs, inputs, monkeypatch
):
    """Beside matrices of the rows' dtype and of other forms, all in one call."""
    monkeypatch.setenv(native_library.ISA, isa)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    counts = [1, 250, 2, 13, 5]
    packed = [whole(outputs, inputs, bits, group, zeros=zeros, input_bits=input_bits, seed=seed) for seed in range(3)]
    packed += [pack(made(outputs, inputs, seed=3, dtype=dtype))]
    packed += [whole(outputs, inputs, 8, 1 << 20, zeros=False, input_bits=16, seed=4)]
    biases = [made(outputs, seed=10 + i, dtype=dtype) for i in range(5)]
    x = made(sum(counts), inputs, seed=20, dtype=dtype)
    found = multiply_each(x, list(itertools.accumulate(counts)), packed, biases)
    rounded = RoundedInputs(64).within(min(group, inputs), inputs)
    want = []
    for index, (rows, weight) in enumerate(zip(x.split(counts), packed, strict=True)):
        is_rounded = isinstance(weight, IntegerPanels) and weight.input_bits == 8
        own = rounded(rows.float()) if is_rounded else rows
        want.append(own.double() @ unpack(weight).double().T + biases[index].double())
    bounds = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), torch.cat(want), **bounds)


@pytest.mark.skipif(not LEVELS, reason="needs the native library")
@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "group", "zeros", "input_bits"), FORMS)
def test_bits_of_a_row_with_whole_numbers_do_not_depend_on_its_company(
    isa, dtype, bits, group, zeros, input_bits, monkeypatch
):
    monkeypatch.setenv(native_library.ISA, isa)
    packed = [whole(80, 96, bits, group, zeros=zeros, input_bits=input_bits, seed=seed) for seed in range(2)]
    packed += [pack(made(80, 96, seed=3, dtype=dtype))]
    x = made(300, 96, seed=9, dtype=dtype)
    want = multiply_each(x, [300], packed[:1])
    rng = random.Random(bits)
    for count in (1, 2, 7, 200):
        for threads in (1, 2, 5):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            before, behind = rng.randint(1, 60), rng.randint(1, 60)
            own = x[:count]
            rows = torch.cat([x[50 : 50 + before], own, x[:behind]])
            order = [packed[rng.randint(1, 2)], packed[0], packed[rng.randint(1, 2)]]
            found = multiply_each(rows, [before, before + count, before + count + behind], order)
            assert torch.equal(found[before : before + count], want[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked_weights_are_as_before(level, dtype):
    weight = made(70, 12, seed=0, dtype=dtype)
    assert torch.equal(unpack(pack(weight)), weight)


def test_weights_of_an_odd_number_of_inputs_are_left_to_torch(level):
    """In bfloat16, of which the library's panels hold pairs."""
    weight = made(16, 7, seed=0).bfloat16()
    packed = pack(weight)
    assert not isinstance(packed, Panels)
    found = multiply_each(made(3, 7, seed=1).bfloat16(), [3], [packed])
    torch.testing.assert_close(found, made(3, 7, seed=1).bfloat16() @ weight.T, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(not LEVELS, reason="needs the native library")
def test_matrices_that_are_not_packed_alike_are_refused(monkeypatch):
    weight, x = made(8, 4, seed=0), made(2, 4, seed=1)
    with pytest.raises(TypeError, match="packed alike"):
        multiply_each(x, [1, 2], [pack(weight), packed_gemm.pack(weight)])
    packed = pack(weight)
    monkeypatch.setenv(native_library.ISA, "none")
    with pytest.raises(RuntimeError, match="pack them again"):
        multiply_each(x, [2], [packed])


@pytest.mark.skipif(not LEVELS, reason="needs the native library")
def test_threads_and_forked_processes_have_teams_of_their_own(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    weight, x = pack(made(400, 300, seed=0)), made(20, 300, seed=1)
    want, found = multiply_each(x, [20], [weight]), []

    def multiply() -> None:
        found.extend(multiply_each(x, [20], [weight]) for _ in range(50))

    callers = [Thread(target=multiply) for _ in range(3)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert len(found) == 150
    assert all(torch.equal(each, want) for each in found)
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(multiply_each(x, [20], [weight]), want) else 1)
    assert os.waitpid(child, 0)[1] == 0
