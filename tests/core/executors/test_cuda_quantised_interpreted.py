"""Quantised models on the CUDA executor, on a CPU: Triton's kernels interpreted, copies as late as a GPU's.

Run in a process that interprets, see `tests/interpreted.py`.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.executors import cuda_float8_gemms, cuda_gemm_backends, cuda_memory
from chorus.core.executors.cuda import CudaExecutor
from chorus.core.model.batch import BY_LIBRARY, GemmBackend
from chorus.core.model.checkpoints.quantization.round_to_nearest import RoundToNearest
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.requests.types import CannotMerge
from chorus.ops.gemm.narrow_weights import NarrowWeight
from chorus.perf.inline_reads import InlineReads
from chorus.server.cli.command import main

from ...conftest import ATTENTION, MLP, ModelSpec, Subject, save_adapter, save_model
from ...graphs.late_device import LateDevice
from ..conftest import Driver, RecordingExecutor, ticking
from ..model.checkpoints.quantization.forms import FORMS
from .test_cuda_interpreted import ask, check, merge

SPEC = ModelSpec(seed=5, hidden=64, ffn=128, layers=2, heads=2, kv_heads=1, vocab=96, positions=64)
ADAPTERS = {"all": (5, ATTENTION + MLP), "qv": (2, ["q_proj", "v_proj"])}
MATRICES = "qkv", "o", "gate_up", "down"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Subject:
    root = tmp_path_factory.mktemp("model")
    save_model(SPEC, root / "model")
    for seed, (name, (rank, targets)) in enumerate(ADAPTERS.items()):
        save_adapter(root / "model", root / name, rank, 8, targets, False, seed)
    return Subject(root / "model", {name: root / name for name in ADAPTERS})


@pytest.fixture(scope="module")
def twins(model, tmp_path_factory) -> dict[str, Subject]:
    """The plain models that quantised weights stand for, with the same adapters."""
    found = {}
    for name in ("int8", "int4"):
        root = tmp_path_factory.mktemp(name) / "model"
        shutil.copytree(model.model, root)
        tensors = load_file(root / "model.safetensors")
        for key, tensor in tensors.items():
            if key.endswith("_proj.weight"):
                tensors[key] = RoundToNearest(name)(tensor.float()).dequantised()
        save_file(tensors, root / "model.safetensors", {"format": "pt"})
        found[name] = Subject(root, model.adapters)
    return found


@pytest.fixture
def drive(model, monkeypatch):
    """`drive(PATH, **config)`: an engine on a late device. few_rows: its kernel for few rows takes float32, too."""
    engines = []

    def make(path: Path = model.model, few_rows: bool = True, device_: LateDevice | None = None, **config) -> Driver:
        if few_rows:
            monkeypatch.setitem(cuda_gemm_backends.TOLERANCE, torch.float32, 1e-5)
        defaults = {
            "dtype": "float32", "device": "cuda", "max_num_seqs": 3, "max_num_batched_tokens": 12, "block_tokens": 4,
            "memory_bytes": 2 << 20, "max_lora_rank": 8, "max_model_len": 64, "threads": 1, "mixed_graph_tokens": 0,
            "graph_capture": "lazy", "small_gemm": "on",
        }  # fmt: skip
        settings = EngineConfig(model=path, **{**defaults, **config})
        executor = RecordingExecutor(CudaExecutor(settings, device_ or LateDevice()))
        engine = Engine(settings, executor, ticking(), InlineReads())
        engines.append(engine)
        for name, directory in model.adapters.items():
            engine.store.register(name, directory)
        return Driver(engine, executor)

    yield make
    for engine in engines:
        engine.close()


def kept(driver: Driver) -> set[type]:
    """Types of the weights of projections."""
    layers = driver.executor.inner.steps.decoder.layers
    return {type(layer[name]) for layer in layers for name in MATRICES}


REQUESTS = (None, 9, 3), ("all", 5, 4), ("qv", 14, 3)


@pytest.mark.slow
@pytest.mark.parametrize("small_gemm", ["on", "fused", "swapped"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_answers_are_those_of_the_model_that_the_weights_stand_for(drive, twins, quantization, small_gemm):
    """Prompts by the library and decode steps by the kernel for few rows, or all by the kernel for any number of rows,
    beside adapters.
    """
    driver = drive(quantization=quantization, small_gemm=small_gemm)
    assert kept(driver) == {NarrowWeight}
    assert used(driver) & {
        "on": {GemmBackend.SMALL}, "fused": {GemmBackend.EXPANDED}, "swapped": {GemmBackend.SWAPPED},
    }[small_gemm]  # fmt: skip
    check(driver, ask(driver, twins[quantization], *REQUESTS))


def used(driver: Driver) -> set[GemmBackend]:
    """Backends of GEMMs in decode steps."""
    backends = driver.executor.inner.steps.decoding.backends
    return {each for of_bucket in backends.values() for each in of_bucket.values()}


class WidenedCount:
    """Counts weights that are widened, and the rows of steps."""

    def __init__(self, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.widened, self.steps = 0, []
        steps, dense = driver.executor.inner.steps, NarrowWeight.dense

        def count(weight: NarrowWeight) -> torch.Tensor:
            self.widened += 1
            return dense(weight)

        def noting(launch, rows_of):
            def run(*args, **kwargs):
                before = self.widened
                found = launch(*args, **kwargs)
                self.steps.append((rows_of(*args), self.widened - before))
                return found

            return run

        monkeypatch.setattr(NarrowWeight, "dense", count)
        monkeypatch.setattr(steps.decoding, "run", noting(steps.decoding.run, lambda bucket, rows, *_: len(rows)))
        monkeypatch.setattr(
            steps, "ragged", noting(steps.ragged, lambda rows, *_: sum(len(row.tokens) for row in rows))
        )


@pytest.mark.slow
@pytest.mark.parametrize("mixed_graph_tokens", [0, 320])
def test_steps_of_many_rows_widen_no_narrow_weight(drive, monkeypatch, mixed_graph_tokens):
    """Prompts of 300 tokens in one step, eager or captured in pieces, and a decode step of 100 sequences."""
    driver = drive(
        quantization="int4", small_gemm="swapped", max_num_seqs=100, max_num_batched_tokens=320,
        mixed_graph_tokens=mixed_graph_tokens, memory_bytes=8 << 20,
    )  # fmt: skip
    count = WidenedCount(driver, monkeypatch)
    for index in range(100):
        driver.add(f"{index}", None, [5 + index % 7, 7, 3], max_tokens=2)
    driver.drain()
    assert count.steps == [(300, 0), (100, 0)]


class WideningClock(LateDevice):
    """Times work by the weights that it widens; each takes `seconds`, all else one second."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def seconds(self, work, count=5):
        widened, dense = [], NarrowWeight.dense
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NarrowWeight, "dense", lambda weight: widened.append(weight) or dense(weight))
            work()
        return 1 + self._seconds * len(widened)


@pytest.mark.parametrize(("seconds", "wins"), [(0.1, True), (0.0, False)])
def test_auto_takes_the_kernel_for_many_rows_where_it_is_faster_than_widening(drive, seconds, wins):
    """Not where they are equal."""
    driver = drive(
        quantization="int8", small_gemm="auto", max_num_seqs=3, device_=WideningClock(seconds), graph_capture="lazy"
    )
    steps = driver.executor.inner.steps
    found = {rows: set(steps.mixed.backends.of(rows).values()) for rows in (1, 3, 12)}
    assert found == dict.fromkeys((1, 3, 12), {GemmBackend.SWAPPED} if wins else set())
    assert GemmBackend.SWAPPED not in used(driver), "the kernel for few rows is as fast"


def test_settings_that_time_nothing_leave_prompts_to_the_library(drive):
    for small_gemm in ("on", "fused"):
        driver = drive(quantization="int8", small_gemm=small_gemm)
        assert driver.executor.inner.steps.mixed.backends.of(12) == BY_LIBRARY


def test_the_library_multiplies_them_too(drive, twins):
    """Where the kernel for few rows was found to be slower or wrong, the weights still take their few bytes."""
    driver = drive(few_rows=False, quantization="int4")
    assert all(each == BY_LIBRARY for each in driver.executor.inner.steps.decoding.backends.values())
    assert kept(driver) == {NarrowWeight}
    check(driver, ask(driver, twins["int4"], *REQUESTS))


def test_eager_decode_steps_widen_no_narrow_weight(drive, monkeypatch):
    """Where nothing is captured, the library would widen each weight in a launch of its own."""
    driver = drive(quantization="int4", graph_capture="off", small_gemm="auto", max_num_seqs=1)
    decoding, widened, dense = driver.executor.inner.steps.decoding, [], NarrowWeight.dense
    launch, steps = decoding.run, []

    def counted(*args, **kwargs):
        steps.append(len(widened))
        found = launch(*args, **kwargs)
        steps[-1] = len(widened) - steps[-1]
        return found

    monkeypatch.setattr(NarrowWeight, "dense", lambda weight: widened.append(weight) or dense(weight))
    monkeypatch.setattr(decoding, "run", counted)
    driver.add("base", None, [5, 7, 3], max_tokens=3)
    driver.drain()
    assert steps == [0, 0]
    assert widened, "the prompt is multiplied by the library"


@pytest.mark.slow
def test_a_quantised_checkpoint_is_kept_as_it_is(drive, model, twins, tmp_path):
    assert main(["quantize", str(model.model), str(tmp_path / "out"), "--quantization", "int4"]) == 0
    driver = drive(tmp_path / "out")
    assert kept(driver) == {NarrowWeight}
    check(driver, ask(driver, twins["int4"], *REQUESTS))


@pytest.mark.slow
def test_an_fp8_checkpoint_is_kept_as_it_is(drive, model, tmp_path):
    """A scale per output."""
    for name in ("fp8", "twin"):
        shutil.copytree(model.model, tmp_path / name)
    tensors = load_file(model.model / "model.safetensors")
    twin = dict(tensors)
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        weight = tensors[key].float()
        scale = weight.abs().amax(1, keepdim=True) / 448
        tensors[key] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale"] = scale
        twin[key] = tensors[key].float() * scale
    save_file(tensors, tmp_path / "fp8" / "model.safetensors", {"format": "pt"})
    save_file(twin, tmp_path / "twin" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    (tmp_path / "fp8" / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "fp8"}})
    )
    driver = drive(tmp_path / "fp8")
    assert kept(driver) == {NarrowWeight}
    check(driver, ask(driver, Subject(tmp_path / "twin", model.adapters), *REQUESTS))


@pytest.fixture(scope="module")
def float4(model, tmp_path_factory) -> tuple[Path, Subject]:
    """A checkpoint in MXFP4 of compressed-tensors, and its twin."""
    root, form = tmp_path_factory.mktemp("mxfp4"), FORMS["compressed mxfp4"]
    for name in ("mxfp4", "twin"):
        shutil.copytree(model.model, root / name)
    twin = load_file(model.model / "model.safetensors")
    tensors = dict(twin)
    for key in [key for key in twin if key.endswith("_proj.weight")]:
        module, weight = key.removesuffix(".weight"), tensors.pop(key)
        stored, twin[key] = form.quantise(module, (weight.shape[0], weight.shape[1]))
        tensors |= {f"{module}.{end}": tensor for end, tensor in stored.items()}
    save_file(tensors, root / "mxfp4" / "model.safetensors", {"format": "pt"})
    save_file(twin, root / "twin" / "model.safetensors", {"format": "pt"})
    config = root / "mxfp4" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": form.how}))
    return root / "mxfp4", Subject(root / "twin", model.adapters)


@pytest.mark.parametrize("small_gemm", ["swapped", pytest.param("on", marks=pytest.mark.slow)])
def test_an_mxfp4_checkpoint_is_kept_as_it_is(drive, float4, monkeypatch, small_gemm):
    """Decode steps widen no weight, by any setting; prompts don't, either, if the kernel serves all rows."""
    path, twin = float4
    driver = drive(path, small_gemm=small_gemm)
    layers = driver.executor.inner.steps.decoder.layers
    assert {layer[name].float4 for layer in layers for name in MATRICES} == {True}
    assert GemmBackend.SWAPPED in used(driver)
    count = WidenedCount(driver, monkeypatch)
    check(driver, ask(driver, twin, *REQUESTS))
    assert {widened for rows, widened in count.steps if rows <= 3} == {0}
    assert any(widened for _, widened in count.steps) == (small_gemm == "on")


@pytest.mark.slow
def test_an_mxfp4_checkpoint_is_served_by_the_library_too(drive, float4):
    """Where the kernel is slower or wrong."""
    path, twin = float4
    driver = drive(path, few_rows=False)
    assert kept(driver) == {NarrowWeight}
    check(driver, ask(driver, twin, *REQUESTS))


class RoundingSubject(Subject):
    """A reference that rounds the rows of the base model's projections to FP8, but not those of adapters."""

    def _reference(self):
        if self._peft is None:
            for name, module in super()._reference().named_modules():
                if isinstance(module, torch.nn.Linear) and name.removesuffix(".base_layer").endswith("_proj"):
                    module.register_forward_pre_hook(lambda _module, args: (to_float8(args[0]),))
        return self._peft


def to_float8(x: torch.Tensor) -> torch.Tensor:
    scale = torch.exp2((x.abs().amax(-1, keepdim=True) / 448).log2().ceil())
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize(
    "in_float8", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["as they are", "widened"]
)
def test_activations_in_fp8_are_those_of_the_reference_in_steps_of_any_size(
    drive, model, tmp_path, monkeypatch, in_float8
):
    """Prompts by the library, decode steps by the kernel for few rows, beside adapters, which get them unrounded."""
    monkeypatch.setattr(cuda_float8_gemms, "DTYPES", {torch.float32})
    if not in_float8:
        monkeypatch.setattr(cuda_float8_gemms, "NEAR", math.nan)  # the device's clock says 0
    twin = shutil.copytree(model.model, tmp_path / "twin")
    tensors = load_file(twin / "model.safetensors")
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        tensors[key] = RoundToNearest("fp8")(tensors[key].float()).dequantised()
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    driver = drive(quantization="fp8", fp8_activations=True)
    layers = driver.executor.inner.steps.decoder.layers
    assert {layer[name].multiplies_float8 for layer in layers for name in MATRICES} == {in_float8}
    check(driver, ask(driver, RoundingSubject(twin, model.adapters), *REQUESTS))
    if in_float8:
        with pytest.raises(CannotMerge, match="activations are rounded to 8 bits"):
            driver.engine.merge("qv")


def test_activations_in_fp8_need_weights_that_ask_for_them(drive, monkeypatch):
    monkeypatch.setattr(cuda_float8_gemms, "DTYPES", {torch.float32})
    with pytest.raises(UnsupportedModel, match="no weights of the model are FP8 with activations in FP8; leave it out"):
        drive(quantization="int8", fp8_activations=True)


@pytest.mark.slow
def test_an_adapter_is_merged_into_what_they_stand_for(drive, twins):
    """The merged copy is in the model's dtype, beside the narrow matrices that it leaves alone."""
    driver = drive(quantization="int8")
    merge(driver, "qv")
    check(driver, ask(driver, twins["int8"], ("qv", 6, 4), (None, 3, 3)))


def test_without_the_kernel_they_are_dequantised_once(drive, twins, caplog):
    with caplog.at_level(logging.WARNING):
        driver = drive(quantization="int8", small_gemm="off")
    assert "take as much memory" in caplog.text
    assert kept(driver) == {torch.Tensor}
    check(driver, ask(driver, twins["int8"], *REQUESTS))


@pytest.mark.slow
def test_memory_is_checked_for_what_is_kept(drive, model, tmp_path, monkeypatch):
    """A model that fits a GPU only in few bits is loaded."""
    asked = {}
    monkeypatch.setattr(cuda_memory, "check_weights", lambda weights, *_: asked.setdefault(form, weights))
    assert main(["quantize", str(model.model), str(tmp_path / "out"), "--quantization", "int4"]) == 0
    for form, path, quantization in (
        ("plain", model.model, None), ("int8", model.model, "int8"), ("stored", tmp_path / "out", None),
    ):  # fmt: skip
        driver = drive(path, quantization=quantization)
        layers = driver.executor.inner.steps.decoder.layers
        sizes = [layer[name] for layer in layers for name in MATRICES]
        asked[form, "layers"] = sum(each.nbytes for each in sizes)
    others = asked["plain"] - asked["plain", "layers"]
    assert asked["int8"] == others + asked["int8", "layers"]
    assert others < asked["stored"] <= others + asked["stored", "layers"]
