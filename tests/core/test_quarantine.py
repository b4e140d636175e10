"""A directory of adapters of which some can't be served: the others are."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading

import pytest

from chorus.core.base_name import short_name
from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.quarantine import adapter_directories, stamp_of
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import NotServed, RequestParams
from chorus.memory.files.error import AdapterFormatError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def gqa(subject):
    return subject("gqa")


@pytest.fixture
def directory(gqa, tmp_path):
    """Two good adapters, among them one that is broken in every way that its own name tells."""
    root = tmp_path / "adapters"
    for name in ("r2-qv", "r3-mlp", "cut", "no-weights", "wrong-base", "pipe", "bad-json"):
        shutil.copytree(gqa.adapters[name if name.startswith("r") else "r2-qv"], root / name)
    os.truncate(root / "cut" / WEIGHTS, 100)
    (root / "no-weights" / WEIGHTS).unlink()
    config = json.loads((root / "wrong-base" / CONFIG).read_text())
    (root / "wrong-base" / CONFIG).write_text(json.dumps(config | {"r": 99}))
    (root / "pipe" / CONFIG).unlink()
    os.mkfifo(root / "pipe" / CONFIG)
    (root / "bad-json" / CONFIG).write_text("{")
    shutil.copytree(gqa.adapters["r2-qv"], root / os.fsdecode(b"not-utf8-\xff"))
    shutil.copytree(gqa.adapters["r2-qv"], root / "line\nbreak")
    (root / "no-config").mkdir()
    (root / "a file").write_text("x")
    return root


BROKEN = {"cut", "no-weights", "wrong-base", "pipe", "bad-json", "'not-utf8-\\udcff'", "'line\\nbreak'"}


@pytest.fixture
def build(gqa, directory):
    engines = []

    def make(**fields):
        config = EngineConfig(
            model=gqa.model, adapters=directory, memory_bytes=8 << 20, threads=1, cpu_kernels="torch", **fields
        )
        engines.append(Engine.from_config(config))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_the_rest_is_served_and_the_broken_are_listed(build, gqa, directory, caplog):
    with caplog.at_level(logging.WARNING):
        engine = build()
    assert engine.store.names() == ["r2-qv", "r3-mlp"]
    assert set(engine.adapters.quarantine) == BROKEN
    for name, one in engine.adapters.quarantine.items():
        assert one.name == name
        assert name.isprintable()
        assert one.reason.isprintable()
        assert len(one.reason) < 1500
        assert f"adapter {name} is not served: " in caplog.text
    assert "cut off" in engine.adapters.quarantine["cut"].reason
    assert "UTF-8" in engine.adapters.quarantine["'not-utf8-\\udcff'"].reason
    assert "'no-config'" in caplog.text
    prompt = gqa.prompt("r3-mlp", 7, 5, 1)
    engine.add_request(Request("r", list(prompt), RequestParams(5, temperature=0, ignore_eos=True), "r3-mlp"))
    tokens = []
    while engine.has_work():
        for output in engine.step():
            tokens += output.token_ids
    assert tokens == gqa.greedy("r3-mlp", prompt, 5)


def test_of_a_hundred_adapters_the_broken_ones_are_named_once_with_all_of_the_same_reason(
    build, gqa, directory, caplog
):
    shutil.rmtree(directory)
    for index in range(100):
        path = directory / f"a{index:02}"
        path.mkdir(parents=True)
        for file in (CONFIG, WEIGHTS):
            os.link(gqa.adapters["r2-qv"] / file, path / file)
    broken = [f"a{index:02}" for index in range(7, 100, 20)]
    for name in broken:
        (directory / name / WEIGHTS).unlink()
    with caplog.at_level(logging.WARNING):
        engine = build()
    assert len(engine.store.names()) == 95
    assert sorted(engine.adapters.quarantine) == broken
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "a27" in line] == [
        f"adapters {', '.join(broken)} are not served: {WEIGHTS}: not found; a safetensors file is needed"
    ]
    assert len(lines) == 2


def test_an_adapter_whose_name_is_refused_is_not_tried_again(build, directory, caplog):
    """A change of its files ended the turn that looks after all adapters: a composition's name is printable, too."""
    refused = {"r2*0.5", " blank", "a*2+b"}
    for name in refused:
        shutil.copytree(directory / "r2-qv", directory / name)
    quarantine = build().adapters.quarantine
    assert refused < quarantine.keys()
    unnamed = refused | {name for name in BROKEN if name.startswith("'")}
    assert {name for name, one in quarantine.items() if not one.can_retry} == unnamed
    assert "unless it is their name that is refused" in caplog.text


def test_strictly_the_first_broken_one_stops_the_start(build):
    with pytest.raises(AdapterFormatError, match="bad-json"):
        build(strict_adapters=True)


def test_a_directory_that_hangs_stops_none_of_the_others(build, monkeypatch):
    go_on, hangs = threading.Event(), []
    lstat = os.stat

    def stat(path, *args, **options):
        if "r2-qv" in os.fspath(path) if isinstance(path, (str, os.PathLike)) else False:
            hangs.append(path)
            assert go_on.wait(60)
        return lstat(path, *args, **options)

    monkeypatch.setattr("chorus.core.quarantine.os.stat", stat)
    try:
        engine = build(adapter_load_seconds=0.3)
    finally:
        go_on.set()
    assert hangs
    assert engine.store.names() == ["r3-mlp"]
    assert "did not answer within 0.3 seconds" in engine.adapters.quarantine["r2-qv"].reason


def test_a_stamp_changes_with_what_is_in_the_directory(directory):
    path = directory / "cut"
    stamps = [stamp_of(path)]
    assert stamp_of(path) == stamps[0]
    for change in (
        lambda: os.truncate(path / WEIGHTS, 101),
        lambda: (path / CONFIG).write_text("{}"),
        lambda: (path / WEIGHTS).unlink(),
        lambda: shutil.rmtree(path),
    ):
        change()
        stamps.append(stamp_of(path))
    assert len(set(stamps)) == len(stamps)


def test_skipped_directories_are_named_in_the_log(directory, caplog):
    with caplog.at_level(logging.WARNING):
        found = adapter_directories(directory)
    assert len(found) == len(BROKEN) + 2
    assert "skipped the directory 'no-config'" in caplog.text
    assert "a file" not in caplog.text


def test_modules_are_set_aside_as_the_directorys_adapters_are(gqa, directory, tmp_path):
    config = EngineConfig(model=gqa.model, adapters=directory, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
    good = directory / "r3-mlp"
    modules = [("x", tmp_path / "nowhere"), ("good", good), ("r2-qv", directory / "cut"), ("cut", good)]
    engine = Engine.from_config(config, modules=modules)
    assert set(engine.adapters.quarantine) == (BROKEN | {"x", "r2-qv"}) - {"cut"}, "the later one of a name counts"
    assert "no such directory" in engine.adapters.quarantine["x"].reason
    assert engine.store.names() == ["cut", "good", "r3-mlp"]
    with pytest.raises(NotServed, match=r"'x' is not served: .*no such directory"):
        engine.add_request(Request("r", [1, 2], RequestParams(), "x"))
    engine.close()
    strict = config.model_copy(update={"adapters": None, "strict_adapters": True})
    with pytest.raises(AdapterFormatError, match="no such directory"):
        Engine.from_config(strict, modules=modules)


def test_an_adapter_of_another_base_model_is_told_or_refused(gqa, tmp_path, caplog):
    for name, base in (("own", f"/elsewhere/{gqa.model.name}/"), ("other", "org/Other-7B"), ("none", None)):
        shutil.copytree(gqa.adapters["r2-qv"], tmp_path / name)
        config = json.loads((tmp_path / name / CONFIG).read_text())
        (tmp_path / name / CONFIG).write_text(json.dumps(config | {"base_model_name_or_path": base}))
    config = EngineConfig(model=gqa.model, adapters=tmp_path, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
    engine = Engine.from_config(config)
    named = {name: engine.store.get(name).manifest.names_other_base for name in engine.store.names()}
    assert named == {"own": False, "other": True, "none": False}
    assert "adapter other was trained on 'org/Other-7B'" in caplog.text
    assert "adapter own" not in caplog.text
    assert engine.adapters.check(tmp_path / "other").names_other_base
    engine.close()
    strict = Engine.from_config(config.model_copy(update={"strict_base": True}))
    assert list(strict.adapters.quarantine) == ["other"]
    with pytest.raises(AdapterFormatError, match="in served_model_name if it is, or leave strict_base out"):
        strict.adapters.check(tmp_path / "other")
    strict.close()
    served = Engine.from_config(config.model_copy(update={"strict_base": True, "served_model_name": "hub/other-7b"}))
    assert not served.adapters.quarantine
    served.close()


@pytest.mark.parametrize(
    "suffix",
    [
        "-bnb-4bit",
        "-unsloth-bnb-4bit",
        "-AWQ",
        "-GPTQ-Int4",
        "-GPTQ-Int8",
        "-FP8",
        "-FP8-dynamic",
        "-FP8-KV",
        "-FP8-block",
        "-FP8-Static-KV",
        "-W4A16-G128",
        "-GPTQ-4bit-128g",
        "-GPTQModel-4bit",
        "-4bit-DWQ",
        "-GGUF",
        "-4bit",
        "-quantized.w4a16",
        "-NVFP4",
        "-NVFP4A16",
        "-MXFP4_MOE.gguf",
        "-UD-Q4_K_XL.gguf",
        "-TQ1_0.gguf",
        "-W4A16-ASYM",
        "-Q4_K_M-GGUF",
        "-bf16",
        "-8bit",
    ],
)
def test_a_name_of_the_same_model_in_another_format_is_the_models(suffix):
    for name in ("Qwen2.5-7B-Instruct", "Meta-Llama-3.1-8B", "gemma-2-9b-it"):
        assert short_name(f"unsloth/{name}{suffix}") == short_name(f"org/{name}") == name.casefold()
        assert short_name(f"org/{name}-Math{suffix}") != short_name(name)
    assert short_name("org/AWQ") == "awq", "nothing would be left"


def test_adapters_of_one_other_base_model_are_one_warning(gqa, tmp_path, caplog):
    source = gqa.adapters["r2-qv"]
    settings = json.loads((source / CONFIG).read_text())
    for number in range(24):
        path = tmp_path / f"a{number:02}"
        shutil.copytree(source, path)
        base = "org/other-13b" if number % 8 == 0 else "org/other-7b"
        (path / CONFIG).write_text(json.dumps(settings | {"base_model_name_or_path": base}))
    config = EngineConfig(model=gqa.model, adapters=tmp_path, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
    Engine.from_config(config).close()
    told = [record.getMessage() for record in caplog.records if "trained on" in record.getMessage()]
    assert len(told) == 2
    assert told[0].startswith("3 adapters were trained on 'org/other-13b', by base_model_name_or_path")
    assert told[0].endswith("(a00, a08, a16)")
    assert told[1].startswith("21 adapters were trained on 'org/other-7b'") and told[1].endswith("and 13 others)")


def test_short_names():
    for name in (
        "org/Llama-2-7b",
        "/models/llama-2-7b/",
        "llama-2-7b",
        "/cache/hub/models--org--Llama-2-7b/snapshots/0123",
    ):
        assert short_name(name) == "llama-2-7b"
    assert short_name("/") == ""
