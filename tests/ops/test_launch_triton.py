"""Launches past Triton's own: the same kernel with the same arguments, whatever they are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are launched by Triton", allow_module_level=True)

import triton.language as tl  # noqa: E402

from chorus.ops.launch_triton import KernelLauncher, compiling  # noqa: E402
from chorus.perf.kernels.idle_triton import idle_compiler  # noqa: E402

_MEMORY = torch.zeros(1 << 12, dtype=torch.uint8)
_CONSTANTS = {"TWO": 2, "ONE": 1, "num_warps": 2}


@dataclass(frozen=True, slots=True)
class Sizes:
    block: int
    is_wide: bool


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@triton.jit(do_not_specialize=["count"])
def join(y, pair, x, others, count, x_stride, C: tl.constexpr):
    pass


@triton.jit(do_not_specialize=["count"])
def copy(y, x, factor, count, x_stride, y_stride, ONE: tl.constexpr, TWO: tl.constexpr):
    pass


def addresses(arguments: Any) -> list[Any]:
    """The arguments, with tensors as addresses."""
    return [
        it.data_ptr() if isinstance(it, torch.Tensor) else addresses(it) if isinstance(it, tuple) else it
        for it in arguments
    ]


class Launches:
    """Record of launches: a kernel, the grid, the stream and the arguments, as addresses and numbers."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.hooks: list[Any] = []

    def clear(self) -> None:
        self.seen.clear()
        self.hooks.clear()

    def __call__(self, kernel: Any, *given: Any) -> None:
        place, (_function, _metadata, data, *hooks), arguments = given[:4], given[4:9], given[9:]
        self.seen.append((kernel, place, addresses(arguments)))
        self.hooks.append((data, hooks))


launches = Launches()  # one for all tests: Triton keeps compiled kernels


@pytest.fixture(autouse=True)
def _no_launches():
    launches.clear()


def tensor(dtype: torch.dtype, offset: int) -> torch.Tensor:
    """Of four elements, so many elements after an address that is a multiple of 16."""
    begin = -_MEMORY.data_ptr() % 16 + offset * dtype.itemsize
    return _MEMORY[begin : begin + 4 * dtype.itemsize].view(dtype)


dtypes = st.sampled_from([torch.float16, torch.bfloat16])
offsets = st.sampled_from([0, 0, 8, 1])
strides = st.sampled_from([1, 16, 48, 49, 1 << 31])
calls = st.tuples(dtypes, offsets, offsets, st.sampled_from([0, 1, 16, 17, 1 << 31]), st.sampled_from([0, 1]))


@given(rows=st.tuples(strides, strides), calls=st.lists(calls, min_size=8, max_size=24))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_kernel_is_the_one_that_triton_takes(rows, calls):
    with idle_compiler(launches):
        launch = KernelLauncher(copy, _CONSTANTS)
        for dtype, y, x, count, row in calls:
            both = tensor(dtype, y), tensor(dtype, x)
            launches.clear()
            launch((3, 2, 1), both, (0.5, count), (rows[row], 48))
            copy[(3, 2, 1)](*both, 0.5, count, rows[row], 48, **_CONSTANTS)
            ours, tritons = launches.seen
            assert ours == tritons
            assert ours[0] is tritons[0]


@given(calls=st.lists(st.tuples(dtypes, offsets, offsets, st.sampled_from([1, 1 << 31])), min_size=4, max_size=12))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_tuples_of_tensors_and_a_structure_of_constants_are_one_argument_each(calls):
    with idle_compiler(launches):
        constants = {"C": Sizes(16, is_wide=False), "num_warps": 2}
        launch = KernelLauncher(join, constants)
        for dtype, left, alone, count in calls:
            y, pair = tensor(dtype, 0), Pair(tensor(dtype, left), tensor(torch.float32, 0))
            x, others = tensor(dtype, alone), (tensor(torch.int32, 0),)
            launches.clear()
            launch((3, 2, 1), (y, pair, x, others), (count,), (48,))
            join[(3, 2, 1)](y, pair, x, others, count, 48, **constants)
            ours, tritons = launches.seen
            assert ours == tritons
            assert ours[0] is tritons[0]


def test_another_structure_of_constants_is_another_kernel():
    with idle_compiler(launches):
        y = tensor(torch.float16, 0)
        arguments = (1, 1, 1), (y, Pair(y, y), y, (y,)), (1,), (48,)
        for sizes in (Sizes(16, is_wide=False), Sizes(16, is_wide=True), Sizes(16, is_wide=False)):
            KernelLauncher(join, {"C": sizes})(*arguments)
        first, second, third = (kernel for kernel, *_ in launches.seen)
        assert first is third is not second


def test_a_second_launch_asks_triton_nothing(monkeypatch):
    with idle_compiler(launches):
        launch = KernelLauncher(copy, _CONSTANTS)
        arguments = (5, 1, 1), (tensor(torch.float16, 0), tensor(torch.float32, 0)), (0.5, 7), (64, 3)
        launch(*arguments)
        monkeypatch.setattr(type(copy), "run", None)
        launch(*arguments)
        assert launches.seen[0] == launches.seen[1]
        with pytest.raises(TypeError):  # another kind of arguments is Triton's to compile for
            launch(*arguments[:3], (64, 4))


def test_a_profilers_hook_sees_every_launch():
    with idle_compiler(launches):
        launch = KernelLauncher(copy, _CONSTANTS)
        arguments = (5, 1, 1), (tensor(torch.float16, 0), tensor(torch.float32, 0)), (0.5, 7), (64, 3)
        launch(*arguments)
        launch(*arguments)
        assert launches.hooks[1] == (None, [None, None])
        hook = lambda data: None  # noqa: E731
        triton.knobs.runtime.launch_enter_hook.add(hook)
        try:
            launch(*arguments)
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(hook)
        data, (enter, _leave) = launches.hooks[2]
        assert data is not None and enter.calls == []


@pytest.mark.parametrize("resets", [False, True], ids=["triton 3.6", "later"])
def test_a_kernel_that_does_not_compile_leaves_compiling_possible(monkeypatch, resets):
    """Up to Triton 3.6 the context stays active when its end raises, and then refuses all later ones."""
    from triton.runtime._async_compile import active_mode

    def leave(self: Any, *_: Any) -> None:
        if resets:
            active_mode.set(None)
        raise ArithmeticError("a kernel")

    with monkeypatch.context() as patch:
        patch.setattr(triton.AsyncCompileMode, "__exit__", leave)
        with pytest.raises(ArithmeticError, match="a kernel"), compiling(1):
            pass
    with compiling(1):
        assert active_mode.get() is not None
    assert active_mode.get() is None
