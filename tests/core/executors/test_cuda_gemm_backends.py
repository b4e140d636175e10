"""Kernels of products of few rows, compiled for a GPU that is not there."""

from __future__ import annotations

import itertools
import random
import threading
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from chorus.core.model.compose.decoder_layer import DecoderLayer

triton = pytest.importorskip("triton")

from triton import compiler  # noqa: E402

from chorus.core.executors.cuda_decode import DecodeSteps  # noqa: E402
from chorus.core.executors.cuda_gemm_backends import (  # noqa: E402
    asked_backends,
    choose_combination,
    combinations_of,
    compile_ahead,
    compile_late,
)
from chorus.core.executors.cuda_gemm_races import GemmRaces  # noqa: E402
from chorus.core.executors.cuda_row_backends import choose_row_backends  # noqa: E402
from chorus.core.model.batch import GemmBackend, GemmBackends, GemmKind  # noqa: E402
from chorus.core.model.decoder import DecoderModel  # noqa: E402
from chorus.core.model.lora.lora_state_cuda import CudaLoraState, StepLimits  # noqa: E402
from chorus.core.model.specs.attention import AttentionSpec  # noqa: E402
from chorus.core.model.specs.feed_forward import GatedSpec  # noqa: E402
from chorus.core.model.specs.rope_config import RopeConfig  # noqa: E402
from chorus.core.model.weights.dummy_weights import DummyWeights  # noqa: E402
from chorus.graphs.runner import StepForm, StepMode, StepPart  # noqa: E402
from chorus.memory.pages.arena import Arena  # noqa: E402
from chorus.memory.pages.layout import PageLayout  # noqa: E402
from chorus.ops import dependent_launch  # noqa: E402
from chorus.ops.gemm import small_gemm_triton  # noqa: E402
from chorus.ops.gemm.small_gemm_schedule import MAX_ROWS  # noqa: E402
from chorus.perf.kernels.idle_triton import idle_compiler, idle_kernels  # noqa: E402

from ..tiny_config import LLAMA  # noqa: E402

pytestmark = pytest.mark.triton

ATTENTION = AttentionSpec(2, 1, 16, 0.25, RopeConfig(16), qkv_bias=True)
CONFIG = replace(LLAMA, vocab_size=80, layers=(DecoderLayer(ATTENTION, GatedSpec(48)),) * 2)
DOWN, HEAD = GemmKind(64, 96, "bfloat16"), GemmKind(80, 64, "bfloat16", is_head=True)
BUCKETS = 1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64


@pytest.fixture
def model():
    """A decoder, and tables of its adapters."""
    layout = PageLayout(num_layers=2, kv_heads=1, head_dim=16, block_tokens=16, itemsize=2)
    arena = Arena(layout, 2, torch.bfloat16, "cpu")
    limits = StepLimits(rank=32, adapters=MAX_ROWS, rows=MAX_ROWS, tokens=64)
    lora = CudaLoraState(CONFIG, arena.pages, layout, limits, max_stall=0.0, make_copy=lambda _: torch.Tensor.copy_)
    return DecoderModel(CONFIG, DummyWeights(CONFIG, torch.bfloat16), arena, 64), lora


def noting(threads: list[str]):
    """Forget the compiled kernels of products. The returned `compile` adds the names of its threads to `threads`."""
    inner = compiler.compile
    small_gemm_triton.multiply_rows.device_caches.clear()  # another test may have compiled some

    def compile(source, *args, **kwargs):
        if source.fn is small_gemm_triton.multiply_rows:
            threads.append(threading.current_thread().name)
        return inner(source, *args, **kwargs)

    return compile


def test_all_variants_are_compiled_ahead_beside_each_other(model):
    """Steps launch only kernels that were compiled then: base or LoRA, first layer or another, for any rows."""
    threads: list[str] = []
    decoder, lora = model
    with idle_compiler():
        compile = noting(threads)
        with patch.object(compiler, "compile", compile):
            compile_ahead("auto", decoder, lora, BUCKETS)
            assert all(name.startswith("ThreadPoolExecutor") for name in threads), threads
            assert len(threads) == 20
            with idle_kernels(), patch.object(compiler, "compile", compile):
                for rows in BUCKETS:
                    launch_all(decoder, lora, rows)
    assert len(threads) == 20, "a product was compiled when it was launched"


def test_adapters_are_expanded_in_products_of_fewer_rows():
    small, expanded = GemmBackend.SMALL, GemmBackend.EXPANDED
    found = {setting: [asked_backends(setting, DOWN, rows) for rows in (16, 32, 33, 64)] for setting in ("on", "fused")}
    assert found == {"on": [[small]] * 4, "fused": [[expanded]] * 2 + [[small]] * 2}
    assert [asked_backends("auto", DOWN, rows) for rows in (32, 33)] == [[small, expanded], [small]]
    assert asked_backends("fused", HEAD, 1) == [small]


def test_base_steps_without_early_launches_are_compiled_beside_each_other(model, monkeypatch):
    """For the chosen backends alone, and so that a launch compiles nothing."""
    threads: list[str] = []
    decoder, lora = model
    monkeypatch.setattr(dependent_launch, "is_supported", lambda capability: True)
    monkeypatch.setattr(dependent_launch, "begins_early", cache(lambda device: dependent_launch._allowed))  # noqa: SLF001
    library, small, expanded = GemmBackend.LIBRARY, GemmBackend.SMALL, GemmBackend.EXPANDED
    qkv, o, gate_up, down, head = kinds = list(decoder.gemms())
    chosen = {
        1: {qkv: small, o: expanded, gate_up: expanded, down: library, head: small},
        2: {qkv: small},
        64: {head: small},
    }
    with idle_compiler():
        compile = noting(threads)
        with patch.object(compiler, "compile", compile):
            compile_ahead("auto", decoder, lora, BUCKETS)
            before = len(threads)
            compile_late(decoder, chosen)
            assert all(name.startswith("ThreadPoolExecutor") for name in threads), threads
            assert len(threads) == before + 5
            with idle_kernels(), patch.object(compiler, "compile", compile), dependent_launch.only(False):
                for rows, kind in itertools.product(chosen, kinds):
                    for place in decoder.gemms(every=True)[kind]:
                        x = torch.zeros(rows, kind.inputs, dtype=torch.bfloat16)
                        decoder.run_gemm(place, chosen[rows].get(kind, library), x)
    assert len(threads) == before + 5, "a product was compiled when it was launched"


@pytest.mark.parametrize("mode", list(StepMode))
@pytest.mark.parametrize("part", list(StepPart))
def test_steps_without_adapters_launches_are_captured_late_where_that_is_faster(mode, part):
    """Merged ones, too: they launch the base model's kernels."""
    captured = []
    every = dict.fromkeys((1, 2), SimpleNamespace(variant=lambda *_: "launches"))
    decoding = SimpleNamespace(
        launches=every,
        mixture_launches=every,
        _late={2},
        _layers=lambda *step: step,
        _step=lambda *step: step,
        _device=SimpleNamespace(capture=lambda step: captured.append((step[0], dependent_launch._allowed))),  # noqa: SLF001
    )
    for bucket in (1, 2):
        DecodeSteps.capture(decoding, bucket, StepForm(mode, part))
    assert captured == [(1, True), (2, mode in (StepMode.LORA, StepMode.MIXTURE))]


class Clock:
    """Times of whole steps that vary by up to half a percent. speeds: of each combination of backends."""

    def __init__(self, seed: int, speeds: dict[frozenset[tuple[GemmKind, GemmBackend]], float]):
        self._random, self._speeds, self.asked = random.Random(seed), speeds, []

    def __call__(self, backends, has_lora):
        self.asked.append((backends, has_lora))
        return self._speeds[key(backends)] * (1.1 if has_lora else 1.0) * self._random.uniform(0.995, 1.005) / 1e3


KINDS = [
    GemmKind(96, 64, "bfloat16"),
    GemmKind(64, 64, "bfloat16"),
    GemmKind(192, 64, "bfloat16", silu=True),
    DOWN,
    HEAD,
]
USABLE = {kind: [GemmBackend.SMALL, GemmBackend.EXPANDED] if kind != HEAD else [GemmBackend.SMALL] for kind in KINDS}


def key(backends: GemmBackends) -> frozenset[tuple[GemmKind, GemmBackend]]:
    return frozenset(backends.items())


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [
        ((6.0, 6.0, 6.0, 6.0), "on"),
        ((6.05, 6.0, 6.02, 5.98), "on"),  # isolated medians once decided such cases by 0.3 %
        ((6.5, 5.6, 6.4, 6.3), "fused"),  # its base steps are those of "on"
        ((6.5, 6.4, 6.0, 6.1), "on, logits by the library"),
        ((6.5, 6.4, 6.4, 6.0), "off"),
    ],
)
def test_ours_serves_unless_a_whole_step_is_clearly_faster_and_every_start_chooses_alike(speeds, chosen):
    combinations = combinations_of(USABLE)
    assert list(combinations) == ["on", "fused", "on, logits by the library", "off"]
    found = set()
    for seed in range(40):
        clock = Clock(seed, dict(zip(map(key, combinations.values()), speeds, strict=True)))
        backends, note = choose_combination(combinations, clock, expands=True)
        found.add(key(backends))
        every = [(each, has_lora) for each in combinations.values() for has_lora in (False, True)]
        assert clock.asked == [each for each in every if each != (combinations["fused"], False)]
        assert note.startswith(" (µs a step, base + LoRA: on ")
    assert found == {key(combinations[chosen])}


@pytest.mark.parametrize(
    ("base", "launched", "fused", "chosen"),
    [
        (5.0, 5.15, 5.07, "fused"),  # half of what adapters add, and less than 1 % of both kinds of steps
        (5.0, 5.15, 5.12, "on"),  # no more than times of one step vary
        (5.0, 8.00, 7.80, "on"),  # little of what adapters add
        (5.0, 5.15, 5.30, "on"),
    ],
)
def test_expanding_in_the_product_is_judged_by_what_adapters_add(base, launched, fused, chosen):
    """It is a few percent of a step of few rows: a share of base and LoRA steps together hides all of it."""
    combinations = combinations_of(USABLE)
    times = {"on": launched, "fused": fused, "on, logits by the library": 1.1 * launched, "off": 1.1 * launched}
    of = {key(each): times[name] for name, each in combinations.items()}

    def seconds(backends, has_lora):
        return (of[key(backends)] if has_lora else base) / 1e3

    assert choose_combination(combinations, seconds, expands=True)[0] == combinations[chosen]


def test_a_refused_backend_is_in_no_combination_but_each_is_still_timed():
    """Ranks that refuse different backends must run the same steps: their collectives wait for each other."""
    asked = {**USABLE, DOWN: [], HEAD: []}
    combinations = combinations_of(asked)
    assert len(combinations) == 4
    assert not any(DOWN in each or HEAD in each for each in combinations.values())
    clock = Clock(0, dict.fromkeys(map(key, combinations.values()), 1.0))
    choose_combination(combinations, clock, expands=True)
    assert len(clock.asked) == 7
    choose_combination(combinations, clock, expands=False)
    assert len(clock.asked) == 7 + 6, "adapters of so many rows are added by launches of their own"


def test_narrow_weights_have_one_more_combination_also_if_their_kernel_is_refused():
    """On the rank that refuses it, too."""
    small, swapped = GemmBackend.SMALL, GemmBackend.SWAPPED
    narrow = GemmKind(64, 96, "int4 in groups of 32", is_narrow=True)
    assert asked_backends("auto", narrow, 64) == [small, swapped]
    assert [asked_backends(setting, narrow, 16) for setting in ("on", "swapped")] == [[small], [swapped]]
    assert asked_backends("swapped", DOWN, 16) == [small]
    assert combinations_of({narrow: [small, swapped], DOWN: [small]})["swapped"] == {narrow: swapped, DOWN: small}
    assert combinations_of({narrow: [small], DOWN: [small]})["swapped"] == {narrow: small, DOWN: small}
    assert "swapped" not in combinations_of({DOWN: [small]})


class ExpertClock:
    """A decoder with experts alone, and a device that times its mixtures: `took(BACKEND, ROWS)`."""

    NARROW = GemmKind(192, 64, "int4 in groups of 64", experts=8, is_narrow=True)
    PLAIN = GemmKind(192, 64, "bfloat16", experts=8)

    def __init__(self, took, wrong=(), kind=NARROW):
        self._took, self._wrong, self._kind, self._last = took, wrong, kind, []
        self.timed, self.failure = [], lambda: None
        self.dtype, self.arena = torch.bfloat16, SimpleNamespace(pages=torch.empty(0))

    def gemms(self, every=False):
        return {
            self._kind: [SimpleNamespace(name="EXPERTS", op=None, layer=layer) for layer in range(3 if every else 1)]
        }

    def run_gemm(self, use, backend, x, lora=None):
        self._last.append((use.layer, backend, len(x)))
        return torch.full((1,), 2.0 if backend in self._wrong else 1.0)

    def seconds(self, run):
        self._last.clear()
        run()
        (each,) = {found[1:] for found in self._last}
        assert [found[0] for found in self._last] == [0, 1, 2], "mixtures of all layers are timed"
        self.timed.append(each)
        return self._took(*each)


@pytest.mark.parametrize(
    ("setting", "slower", "joins"),
    [("auto", 1.01, True), ("auto", 1.05, False), ("on", 9.0, True), ("fused", 9.0, True), ("off", 0.5, False)],
)
@pytest.mark.parametrize("captures", [True, False])
def test_launches_of_experts_are_joined_in_prompts_unless_that_is_clearly_slower(setting, slower, joins, captures):
    """They are timed by themselves: other products of prompts are the library's."""
    library, kind = GemmBackend.LIBRARY, ExpertClock.PLAIN
    clock = ExpertClock(lambda backend, rows: 1.0 if backend is library else slower, kind=kind)
    found = choose_row_backends(setting, clock, clock, most_rows=500, most_logits=64, captures=captures)
    assert [found.of(rows).get(kind, library) for rows in (1, 500)] == [GemmBackend.SMALL if joins else library] * 2
    assert bool(clock.timed) == (setting == "auto")


@pytest.mark.parametrize("kind", [ExpertClock.NARROW, ExpertClock.PLAIN])
def test_mixtures_of_experts_have_the_fastest_kernel_for_each_size(kind):
    """Steps of more rows than are timed have that of the largest that is."""
    small, library, wide = GemmBackend.SMALL, GemmBackend.LIBRARY, GemmBackend.WIDE
    other = GemmBackend.SWAPPED if kind.is_narrow else small
    times = {small: 1.0, library: 1.1}

    def took(backend, rows):
        if backend is wide:
            return 0.8 if rows > 512 else 2.0
        return times.get(backend, 0.9 if rows >= 64 else 0.99)

    clock = ExpertClock(took, kind=kind)
    found = choose_row_backends("auto", clock, clock, most_rows=8192, most_logits=64, captures=True)
    for rows, each in ((1, small), (32, small), (33, other), (512, other), (513, wide), (2048, wide), (9000, wide)):
        assert found.of(rows)[kind] is each, rows
    assert max(rows for _, rows in clock.timed) == 2048
    assert min(rows for backend, rows in clock.timed if backend is wide) == 128, "tiles of few rows are no wider"
    clock = ExpertClock(lambda backend, rows: 0.5 if backend is library else 1.0, kind=kind)
    found = choose_row_backends("auto", clock, clock, most_rows=16, most_logits=64, captures=True)
    assert found.of(16) == {kind: library}


def test_experts_have_operands_swapped_where_they_are_asked_for_and_right(caplog):
    small, swapped, wide = GemmBackend.SMALL, GemmBackend.SWAPPED, GemmBackend.WIDE
    kind = ExpertClock.NARROW
    assert [asked_backends("auto", kind, rows) for rows in (64, 65)] == [[small, swapped], [small, swapped, wide]]
    assert [asked_backends(setting, kind, 65) for setting in ("on", "fused", "swapped")] == [
        [small],
        [small],
        [swapped],
    ]
    numbers = {"most_rows": 64, "most_logits": 64, "captures": True}
    clock = ExpertClock(None)
    assert choose_row_backends("swapped", clock, clock, **numbers).of(64) == {kind: swapped}
    assert choose_row_backends("on", clock, clock, **numbers).of(64) == {kind: small}
    clock = ExpertClock(lambda backend, rows: 0.5 if backend is swapped else 1.0, wrong=[swapped])
    assert choose_row_backends("auto", clock, clock, **numbers).of(64) == {kind: small}
    assert "swapped of EXPERTS 64 → 192 in int4 in groups of 64 is not used: it differs by" in caplog.text


def test_mxfp4_of_one_matrix_is_multiplied_with_operands_swapped_alone():
    """By every setting: the kernel for few rows does not take it."""
    small, swapped = GemmBackend.SMALL, GemmBackend.SWAPPED
    float4 = GemmKind(64, 96, "MXFP4 in groups of 32", is_narrow=True, is_float4=True)
    for setting in ("auto", "on", "fused", "swapped"):
        assert asked_backends(setting, float4, 16) == [swapped]
    assert asked_backends("on", float4._replace(experts=8), 16) == [small]
    found = combinations_of({float4: [swapped], DOWN: [small]})
    assert {name: each.get(float4) for name, each in found.items()} == {
        **dict.fromkeys(("on", "fused", "on, logits by the library", "swapped"), swapped), "off": None,
    }  # fmt: skip


def test_programs_share_the_inputs_of_long_plain_sums_where_the_race_decides():
    small, expanded, split = GemmBackend.SMALL, GemmBackend.EXPANDED, GemmBackend.SPLIT
    down = GemmKind(4096, 14336, "bfloat16")
    assert [asked_backends("auto", down, rows) for rows in (16, 17, 64)] == [
        [small, expanded],
        [small, expanded, split],
        [small, split],
    ]
    others = [down._replace(silu=True), down._replace(is_head=True), down._replace(form="int4 in groups of 128")]
    assert not any(split in asked_backends("auto", each, 64) for each in [*others, down._replace(outputs=28672)])
    assert not any(split in asked_backends(setting, down, 64) for setting in ("on", "fused"))


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"small": 45.0, "split": 36.0, "library": 35.5}, "split"),
        ({"small": 36.0, "split": 35.5, "library": 40.0}, "small"),
        ({"small": 45.0, "split": 40.0, "library": 35.5}, "library"),
        ({"small": 36.0, "library": 35.5}, "small"),
        ({"library": 35.5}, "library"),
    ],
)
def test_a_race_takes_the_first_backend_that_none_is_clearly_faster_than(times, chosen):
    """Each is timed once for a tile, over all uses; what no step may use isn't timed."""
    uses, asked, now = [SimpleNamespace(name="DOWN")] * 3, [], []
    decoder = SimpleNamespace(
        dtype=torch.bfloat16,
        arena=SimpleNamespace(pages=torch.empty(0)),
        gemms=lambda every: {DOWN: uses},
        run_gemm=lambda use, backend, x: now.append((backend, len(x))),
    )

    def seconds(run):
        now.clear()
        run()
        asked.extend(now)
        return times[now[0][0]] * 1e-6

    races = GemmRaces(decoder, SimpleNamespace(seconds=seconds), [24, 64])
    usable = [GemmBackend(each) for each in times if each != "library"]
    for bucket in (24, 64):
        assert races.of(bucket, {DOWN: usable}) == ({} if chosen == "library" else {DOWN: chosen})
    raced = times if usable else ()
    assert asked == [(GemmBackend(each), 64) for each in raced for _ in uses]


def test_experts_have_no_adapters_expanded_in_their_launches():
    assert asked_backends("auto", ExpertClock.PLAIN, 1) == [GemmBackend.SMALL]


def launch_all(decoder: DecoderModel, lora: CudaLoraState, rows: int) -> None:
    """Every product by every way, in all layers, with adapters and without."""
    for kind, places in decoder.gemms(every=True).items():
        x = torch.zeros(rows, kind.inputs, dtype=torch.bfloat16)
        for backend, launches in itertools.product(asked_backends("auto", kind, rows), (None, lora.bucket(rows))):
            for place in places:
                decoder.run_gemm(place, backend, x, launches)
