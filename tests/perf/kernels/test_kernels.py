"""Cases that the command that checks kernels refuses; the kernels themselves: `tests/ops/lora/test_sgmv_triton.py`."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest

from chorus.perf.kernels import __main__ as kernels
from chorus.perf.kernels.cost import gemm_cost
from chorus.perf.kernels.variants import FORMS, SHARED_LIMIT, Line, Variant, compile_all, plain_variants, variants

GOOD = Line(
    Variant("expand_prefill", "o", "bf16", 256, 64),
    "sm_90",
    128,
    0,
    4096,
    "wgmma.m64n64k16",
    wide_loads=8,
    loads_before=2,
    barriers=1,
    bytes_in_flight=1 << 16,
    is_early=False,
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"spill_bytes": 8}, "spills 8 bytes"),
        ({"shared_bytes": SHARED_LIMIT + 1}, "shared memory"),
        ({"wide_loads": 0}, "16 bytes"),
        ({"matrix": ""}, "matrix instruction"),
        ({"is_early": True}, "the launch before it"),
        ({"variant": Variant("expand_decode", "o", "bf16", 64, 64), "loads_before": 3}, "3 loads"),
        ({"variant": Variant("multiply_rows", "base.o", "bf16", 16), "loads_before": 3}, "3 loads"),
        ({"variant": Variant("multiply_rows", "base.o", "bf16", 16), "matrix": ""}, "matrix instruction"),
    ],
)
def test_what_a_kernel_must_not_do(change, problem):
    assert not list(GOOD.problems())
    (found,) = replace(GOOD, **change).problems()
    assert problem in found


def test_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert kernels.main(["--compile", "sm_90"]) == 2
    assert "chorus-lora[kernels]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "required: --compile"),
        (["--interpret"], "required: --compile"),
        (["--compile", "hopper"], "hopper is not like sm_90"),
        (["--compile", "sm_90", "--only", "("], "'(' is not a regular expression"),
        (["--compile", "sm_90", "--only", "softmax of nothing"], "--only 'softmax of nothing' matches no kernel"),
        (["--compile", "sm_90", "--keep"], "--keep needs --known FILE"),
        (["--compile", "sm_90", "--translate", "--known", "known.json"], "--translate compiles nothing"),
        (["--compile", "sm_90", "--workers", "0"], "0 is below 1"),
        (["--compile", "sm_90", "--workers", "two"], "invalid"),
    ],
)
def test_bad_arguments(argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        kernels.main(argv)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "usage" in told
    assert said in told


def test_variants_differ():
    listed = [*variants(), *plain_variants()]
    assert len(set(listed)) == len(listed)


def test_a_product_costs_its_weights_once_and_its_rows():
    assert gemm_cost(16, 4096, 4096, 2).bytes == 2 * 4096 * (4096 + 2 * 16)
    assert gemm_cost(16, 4096, 14336, 2, silu=True).bytes == 2 * (4096 * 28672 + 16 * (4096 + 14336))
    assert gemm_cost(16, 4096, 6144, 2).flops == 2 * 16 * 4096 * 6144


@pytest.mark.triton
def test_signatures_name_the_kernels_arguments():
    for variant in plain_variants():
        module = import_module(f"chorus.ops.{variant.module}")
        given = set(variant.signature()) | set(variant.constants())
        assert given == set(getattr(module, variant.kernel).arg_names)


COMPILED = {
    "registers": 128,
    "spill_bytes": 0,
    "shared_bytes": 4096,
    "matrix": "wgmma.m64n64k16",
    "wide_loads": 8,
    "loads_before": 2,
    "barriers": 1,
    "bytes_in_flight": 1 << 16,
    "is_early": False,
}


@pytest.fixture
def compiled(monkeypatch):
    """The variants that are compiled, without a compiler."""
    found = []

    def compile_variant(wanted):
        found.append(wanted)
        return dict(COMPILED)

    def job_of(variant, arch):
        return SimpleNamespace(key=lambda: f"{arch} {variant.launched}")

    monkeypatch.setattr("chorus.perf.kernels.variants.compile_variant", compile_variant)
    monkeypatch.setattr("chorus.perf.kernels.variants.job_of", job_of)
    return found


def test_what_is_one_launch_is_compiled_once_and_other_architectures_get_the_widest(compiled):
    chosen = [*variants(), *plain_variants()]
    lines = compile_all(["sm_90", "sm_80", "sm_120"], 1, chosen, {})
    every, others, same = (
        [line.variant for line in lines if line.arch == arch] for arch in ("sm_90", "sm_80", "sm_120")
    )
    assert every == chosen
    assert others == same
    assert {v.kernel for v in others} == {v.kernel for v in chosen}
    assert Variant("expand_prefill", "down", "bf16", 8192, 256) not in others
    assert Variant("expand_prefill", "gate_up", "bf16", 8192, 256) in others
    products = {v.group for v in others if v.kernel == "multiply_rows"}
    forms = {f"{of}-{form}" for form in FORMS for of in ("base", "lora256", "many", "multi256")}
    assert {name.split(".")[0] for name in products} == {
        "base",
        "lora16",
        "lora256",
        "many",
        "multi16",
        "multi256",
    } | forms
    assert {name.split(".")[1] for name in products} == {"head", "mlp"}
    assert len(others) < len(chosen) / 8
    same = {Variant("shrink_decode", "o", "bf16", tokens, 16) for tokens in (64, 256)}
    assert same <= set(every)
    assert len(same & {variant for variant, _ in compiled}) == 1


def test_what_is_known_is_not_compiled_again_but_for_one_of_each_kernel(compiled):
    chosen, known = [*variants(), *plain_variants()], {}
    lines = compile_all(["sm_90", "sm_80"], 1, chosen, known)
    every = list(compiled)
    assert len(known) == len(every) > 100
    compiled.clear()
    gone = next(key for key in known if key.startswith("sm_80 ('shrink_decode'"))
    del known[gone]
    known["of a kernel as it was"] = COMPILED
    assert compile_all(["sm_90", "sm_80"], 1, chosen, known) == lines
    kernels_of = [variant.kernel for variant, arch in compiled if arch == "sm_90"]
    assert sorted(kernels_of) == sorted({variant.kernel for variant in chosen})
    assert len(compiled) == len(kernels_of) + 1 and len(known) == len(every) and gone in known
    known.update(dict.fromkeys(known, COMPILED | {"registers": 127}))
    with pytest.raises(ValueError, match="known as"):
        compile_all(["sm_90", "sm_80"], 1, chosen, known)


@pytest.mark.triton
def test_a_key_is_of_all_that_decides_on_what_is_compiled():
    from chorus.perf.kernels.variants import job_of

    job = job_of(Variant("multiply_rows", "base.o", "bf16", 16), "sm_90")
    changes = [
        {},
        {"capability": 80},
        {"pointer": "x"},
        {"ready": {"weight"}},
        {"options": {**job.options, "num_warps": 1}},
        {"constants": {**job.constants, next(iter(job.constants)): 1 << 20}},
        {"kernel": other_kernel()},
        {"signature": {**job.signature, "y": "*fp16"}},
    ]
    assert len({replace(job, **change).key() for change in changes}) == len(changes)
    assert job.key() == replace(job).key()


def other_kernel():
    """The same text with another line."""
    from triton import JITFunction

    module = import_module("chorus.ops.gemm.small_gemm_triton")
    kernel = JITFunction(module.multiply_rows.fn)
    kernel._unsafe_update_src(kernel.src + "\n    tl.device_assert(True)")  # noqa: SLF001 - as another file would
    return kernel


@pytest.mark.triton
@pytest.mark.parametrize("broken", [False, True])
def test_translation_names_what_the_front_end_refuses(monkeypatch, capsys, broken):
    """As Triton 3.6 refused the fields of a constant where a function takes a constant."""
    wanted = Variant("widen_rows", "widen-int8", "bf16", 64)
    if broken:
        monkeypatch.setattr(Variant, "signature", lambda self: {})
    monkeypatch.setattr("chorus.perf.kernels.variants.widest", lambda chosen: [wanted])
    assert kernels.main(["--compile", "sm_90,sm_80", "--translate"]) == broken
    said = capsys.readouterr().out
    assert [f"FAILED {arch} Variant(kernel='widen_rows'" in said for arch in ("sm_90", "sm_80")] == 2 * [broken]
    assert "translated by triton 3." in said


def test_only_the_chosen_kernels_are_translated(monkeypatch, capsys):
    pytest.importorskip("triton")
    taken = []

    def job_of(variant, arch):
        return SimpleNamespace(translate=lambda: taken.append((arch, variant.kernel, variant.group)))

    monkeypatch.setattr("chorus.perf.kernels.variants.job_of", job_of)
    assert kernels.main(["--compile", "sm_90,sm_80", "--translate", "--only", "^widen_rows widen-int8$"]) == 0
    assert taken == [(arch, "widen_rows", "widen-int8") for arch in ("sm_90", "sm_80")]
