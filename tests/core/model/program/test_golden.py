"""No change of the engine changes what a configuration is turned into unless `golden.json` is written anew."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from chorus.core.model.program import builder, end_ops, layer_program
from chorus.core.model.program.ops import Op
from chorus.memory.pages import layer_projections

from ....conftest import quiet
from ....kept import kept_files
from . import golden

WITHOUT_TORCH = """
import sys
from pathlib import Path
from chorus.core.model.program.layer_program import layer_program
from chorus.core.model.read_config import read_model_config
for path in Path(sys.argv[1]).iterdir():
    model = read_model_config(path)
    for layer in model.layers:
        layer_program(layer, model.norm)
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def configs() -> Path:
    return kept_files("configurations of geometries", quiet()(golden.make_configs))


def test_no_geometry_is_turned_into_anything_else(configs):
    told = "python -m tests.core.model.program.golden --out FILE in both checkouts, then --diff, shows what changed"
    known, now = golden.read(), golden.hashes(golden.golden(configs))
    if not golden.is_of_this_version():  # then some configurations have other defaults
        same = [name for name in known.keys() & now.keys() if known[name]["file"] == now[name]["file"]]
        known, now = ({name: each[name] for name in same} for each in (known, now))
        assert len(known) > 50
    assert not [*golden.changed(known, now)], told


def test_every_kind_of_op_is_in_a_geometry(configs):
    found = {type(op).__name__ for op in _ops(configs)}
    kinds = {each.__name__ for each in _kinds(Op) if each.__module__.startswith(builder.__package__)}
    assert len(kinds) > 60 and found == kinds


def _ops(configs):
    for path in configs.iterdir():
        model = golden.model_of(path)
        for layer in model.layers:
            yield from layer_program.layer_program(layer, model.norm).ops
        ends = golden.end_programs(model)
        yield from (*ends.before, *ends.behind, *ends.kept)


def _kinds(kind):
    below = kind.__subclasses__()
    return [kind] * (not below) + [each for one in below for each in _kinds(one)]


FAULTS = {
    "k and v are exchanged": (
        (layer_projections, "attention_projections"),
        lambda made: lambda *args, **fields: (lambda q, k, v, o: (q, v, k, o))(*made(*args, **fields)),
        {"projections", "names"},
    ),
    "a layer's last op is left out": (
        (golden, "layer_program"),
        lambda made: lambda spec, norm: _without_last(made(spec, norm)),
        {"segments"},
    ),
    "a soft cap is left out": (
        (golden, "end_programs"),
        lambda made: lambda config: _without_cap(made(config)),
        {"ends"},
    ),
}


def _without_last(program):
    return replace(program, after=program.after[:-1])


def _without_cap(ends):
    return replace(ends, logits=tuple(op for op in ends.logits if not isinstance(op, end_ops.Cap)))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(configs, monkeypatch, fault):
    (module, name), planted, sections = FAULTS[fault]
    names = {"gemma-2"}
    known = {each: golden.read()[each] for each in names}
    assert not [*golden.changed(known, golden.hashes(golden.golden(configs, names)))]
    made = planted(getattr(module, name))
    for each in [each for each in list(sys.modules.values()) if getattr(each, name, None) is getattr(module, name)]:
        monkeypatch.setattr(each, name, made)
    (line,) = golden.changed(known, golden.hashes(golden.golden(configs, names)))
    assert sections <= {*line.partition(": ")[2].split(", ")}


def test_no_layer_needs_torch_before_weights(configs):
    run = [sys.executable, "-c", WITHOUT_TORCH, str(configs)]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
