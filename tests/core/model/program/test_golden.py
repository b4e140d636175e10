"""No change of the engine changes what a configuration is turned into unless `golden.json` is written anew."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from chorus.core.model.compose import attention
from chorus.core.model.compose.composed import composed
from chorus.core.model.compose.decoder_layer import DecoderLayer
from chorus.core.model.program.op import Op
from chorus.core.model.program.ops.logits import Cap

from ....conftest import quiet
from ....kept import kept_files
from . import golden

WITHOUT_TORCH = """
import sys
from pathlib import Path
from chorus.core.model.read_config import read_model_config
for path in Path(sys.argv[1]).iterdir():
    model = read_model_config(path)
    for layer in model.layers:
        model.composed(layer).program
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
    kinds = {each.__name__ for each in _kinds(Op) if each.__module__.startswith("chorus.core.")}
    assert len(kinds) > 60 and found == kinds


def test_columns_of_products_are_in_the_order_of_their_tensors(configs):
    """And so are the numbers of their modules."""
    count = 0
    for path in configs.iterdir():
        model = golden.model_of(path)
        table = model.projections
        for at, layer in enumerate(model.layers):
            of_path = {each.path: each for each in table.layers[at]}
            slots = {slot.name: slot for slot in model.composed(layer).slots}
            for product in table.products(at):
                if (slot := slots.get(product)) is None or slot.count:  # a router's, or each expert's
                    continue
                own = [of_path[tensor.path.removesuffix(".weight")] for tensor in slot.tensors]
                modules = [(table.id(each.name), each.outputs) for each in own]
                assert modules == [(module, width) for module, _, width in table.columns(at, product)]
                assert modules == sorted(modules), (path.name, at, product)
                count += 1
    assert count > 2000


def _ops(configs):
    for path in configs.iterdir():
        model = golden.model_of(path)
        for layer in model.layers:
            yield from model.composed(layer).program.ops
        ends = golden.end_programs(model)
        yield from (*ends.before, *ends.behind, *ends.kept)


def _kinds(kind):
    below = kind.__subclasses__()
    return [kind] * (not below) + [each for one in below for each in _kinds(one)]


FAULTS = {
    "k and v are exchanged": (
        (attention, "kept_in"),
        lambda made: lambda *args: made(*args)[::-1],
        {"projections", "names"},
    ),
    "parts are not added": (
        (DecoderLayer, "add"),
        lambda made: lambda *args: None,
        {"segments"},
    ),
    "a soft cap is left out": (
        (golden, "end_programs"),
        lambda made: lambda config: _without_cap(made(config)),
        {"ends"},
    ),
}


def _without_cap(ends):
    return replace(ends, logits=tuple(op for op in ends.logits if not isinstance(op, Cap)))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(configs, monkeypatch, fault):
    (owner, name), planted, sections = FAULTS[fault]
    names = {"gemma-2"}
    known = {each: golden.read()[each] for each in names}
    assert not [*golden.changed(known, golden.hashes(golden.golden(configs, names)))]
    made = planted(getattr(owner, name))
    for each in [owner, *(it for it in list(sys.modules.values()) if getattr(it, name, None) is getattr(owner, name))]:
        monkeypatch.setattr(each, name, made)
    composed.cache_clear()
    try:
        (line,) = golden.changed(known, golden.hashes(golden.golden(configs, names)))
    finally:
        composed.cache_clear()
    assert sections <= {*line.partition(": ")[2].split(", ")}


def test_no_layer_needs_torch_before_weights(configs):
    run = [sys.executable, "-c", WITHOUT_TORCH, str(configs)]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
