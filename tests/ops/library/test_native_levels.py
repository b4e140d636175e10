"""Levels of the native library: how one is chosen, and that they compute the same."""

from __future__ import annotations

import random

import pytest
import torch

from chorus.ops.cpu import native
from chorus.ops.library import native_library

from ...attacks.invariance import Row, build, compute

WITHOUT_BF16 = [level for level in native_library.levels() if level not in ("amx", "avx512bf16")]


class Library:
    """A library that says whether this processor can run it."""

    def __init__(self, supported: bool) -> None:
        self._supported = supported

    def chorus_supported(self) -> int:
        return int(self._supported)


@pytest.fixture
def installed(monkeypatch):
    """An installation where a level is too new for the processor and one was not built."""
    found = {"avx512bf16": Library(False), "avx512": Library(True), "avx2": Library(True)}
    monkeypatch.setattr(native_library, "built", found.get)
    monkeypatch.delenv(native_library.ISA, raising=False)
    return found


@pytest.mark.parametrize(
    ("wanted", "level"), [(None, "avx512"), ("", "avx512"), ("avx512", "avx512"), ("avx2", "avx2"), ("none", None)]
)
def test_the_best_level_unless_another_is_named(installed, monkeypatch, wanted, level):
    if wanted is not None:
        monkeypatch.setenv("CHORUS_CPU_ISA", wanted)
    assert native_library.levels() == ["avx512", "avx2"]
    assert native_library.level() == level
    assert native_library.library() is installed.get(level)
    assert (native_library.why_unavailable(torch.float32) is None) == (level is not None)


@pytest.mark.parametrize("wanted", ["avx512bf16", "neon", "sse2"])
def test_a_level_that_is_not_there_is_refused_by_name(installed, monkeypatch, wanted):
    monkeypatch.setenv("CHORUS_CPU_ISA", wanted)
    with pytest.raises(ValueError, match=rf"CHORUS_CPU_ISA is '{wanted}'.* this build have avx512, avx2") as error:
        native_library.available(torch.float32)
    assert ("not one of amx, avx512bf16, avx512, avx2, neon, none" in str(error.value)) == (wanted == "sse2")


def test_a_build_for_a_newer_processor_says_so_and_how_to_build_another(installed, monkeypatch, caplog):
    """PyTorch's operators serve, and without a word only their slowness would tell."""
    installed.clear()
    native_library.warn_of_others()
    assert not caplog.text, "without a compiler there is none, as the installation said"
    assert native_library.why_unavailable(torch.float32) == "it is not built: install a C++ compiler, then Chorus again"
    installed["avx512bf16"] = Library(False)
    reason = native_library.why_unavailable(torch.float32)
    native_library.warn_of_others()
    assert reason is not None and f"the native library is not used: {reason}" in caplog.text
    assert "built for avx512bf16, which this processor lacks" in reason and "CHORUS_BUILD_LEVELS=all" in reason
    monkeypatch.setenv(native_library.ISA, "none")
    caplog.clear()
    native_library.warn_of_others()
    assert not caplog.text, "nobody wants one"


@pytest.mark.native
@pytest.mark.skipif(len(native_library.levels()) < 2, reason="one level at most is built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(16))
def test_levels_give_the_same_bits(monkeypatch, dtype, seed):
    """All add in one order: only products of pairs of bf16 are another instruction, which rounds otherwise."""
    results = []
    for level in native_library.levels() if dtype == torch.float32 else WITHOUT_BF16:
        monkeypatch.setenv(native_library.ISA, level)
        world = build(random.Random(seed), dtype, latents=seed >= 12)
        decoder = native.NativeDecoder(world.model, 2)
        rows = [Row(index, 0, len(request.tokens)) for index, request in enumerate(world.requests)]
        results.append(compute(decoder, world, rows).view(torch.int32).clone())
        decoder.close()
    assert all(torch.equal(result, results[0]) for result in results)
