"""Triton's interpreter, right in bf16, and faster. Import this module lazily: it needs triton, in a process that
interprets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


class _Kept:
    """What the interpreter restores after a launch: nothing."""

    def restore(self) -> None:
        pass


def hasten() -> None:
    """Spare the interpreter what changes nothing: a quarter of its time."""
    _patch_language_once()
    _remember_dtypes()
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # else it reads what the checks of integers say: each operation once more in int64
    builder.options = replace(builder.options, sanitize_overflow=False)


def _remember_dtypes() -> None:
    """It would make its table of NumPy's dtypes anew for each value."""
    plain, known = interpreter._get_np_dtype, {}  # noqa: SLF001

    def get(dtype: Any) -> np.dtype:
        name = dtype.scalar.name
        if name not in known:
            known[name] = plain(dtype)
        return known[name]

    interpreter._get_np_dtype = get  # noqa: SLF001


def _patch_language_once() -> None:
    """Have the interpreter's own functions take the place of the language's for good. It would look through hundreds
    of names again at each launch, and at each call of a device function by each program of a launch.
    """
    plain, done = interpreter._patch_lang, set()  # noqa: SLF001

    def patch(fn: Any) -> _Kept:
        modules = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        if modules not in done:
            plain(fn)
            done.add(modules)
        return _Kept()

    interpreter._patch_lang = patch  # noqa: SLF001


def fix_bf16() -> None:
    """Make the interpreter right in bf16: `tl.dot`, products and differences, which take its bits for integers, and
    casts from float32, which cut them off where a GPU rounds to nearest, ties to even.
    """
    hasten()
    plain_dot, plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        return plain_dot(self, _widened(a), _widened(b), d, input_precision, max_num_imprecise_acc)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.bfloat16 and dst_type.scalar == tl.float32:
            return _widened(src)
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return TensorHandle(rounded(src.data), tl.bfloat16)
        return plain_cast(self, src, dst_type)

    def in_float32(plain: Any) -> Any:
        def create(self: Any, a: Any, b: Any) -> Any:
            found = plain(self, _widened(a), _widened(b))
            return TensorHandle(rounded(found.data), tl.bfloat16) if a.dtype.scalar == tl.bfloat16 else found

        return create

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
    for name in ("create_fmul", "create_fsub"):
        setattr(InterpreterBuilder, name, in_float32(getattr(InterpreterBuilder, name)))


def multiply_row_by_row() -> None:
    """Have the interpreter's `tl.dot` sum each row alone: in numpy's matrix products the order of a row's sum may
    depend on its position. Call it after `fix_bf16`.
    """
    plain_dot = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        more = input_precision, max_num_imprecise_acc
        if a.data.ndim > 2:
            return plain_dot(self, a, b, d, *more)
        each, sums = (TensorHandle(value.data[:, None], value.dtype.scalar) for value in (a, d))
        return TensorHandle(plain_dot(self, each, b, sums, *more).data[:, 0], d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def multiply_column_by_column() -> None:
    """As `multiply_row_by_row`, of matrices whose columns are the rows of a step."""
    plain_dot = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        each = TensorHandle(np.ascontiguousarray(b.data.T)[:, :, None], b.dtype.scalar)
        sums = TensorHandle(np.ascontiguousarray(d.data.T)[:, :, None], d.dtype.scalar)
        whole = TensorHandle(a.data[None], a.dtype.scalar)
        found = plain_dot(self, whole, each, sums, input_precision, max_num_imprecise_acc).data
        return TensorHandle(np.ascontiguousarray(found[:, :, 0].T), d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """bf16 bits of float32 values, any shape; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint64(0x7FC0), rounded).astype(np.uint16).reshape(np.shape(values))
