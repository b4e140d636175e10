"""Defaults of configuration classes: as transformers has them, and as families take them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from chorus.core.model.families.defaults import (
    FILE,
    SHAPE,
    TOKENS,
    UNREAD,
    Defaults,
    class_defaults,
    of_text_alone,
)
from chorus.core.model.families.registry import ALL
from chorus.core.model.families.seeing_texts import _TEXTS
from chorus.core.model.read_config import read_model_config

from ....conftest import quiet
from ....kept import kept_files
from ..program import golden

ROOT = Path(__file__).resolve().parents[4]
OF_CLASSES = [each.defaults for each in (*ALL, *_TEXTS.values()) if isinstance(each.defaults, Defaults)]


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def moved(before, now):
    """Lines about fields whose defaults differ."""
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name, {}), now.get(name, {})
        for field in sorted(old.keys() | new.keys()):
            if field not in old or field not in new or old[field] != new[field]:
                yield f"{name}.{field}: {old.get(field, 'none')} -> {new.get(field, 'none')}"


def test_the_file_has_the_defaults_of_transformers(generate):
    import transformers

    written = generate.family_defaults()
    lines = [*moved(class_defaults(), json.loads(written)["classes"])]
    assert not lines, "\n".join(
        [
            f"transformers {transformers.__version__} has other defaults than {FILE.name}:",
            *lines,
            "Run `python docs/generate.py` and look at each line: a checkpoint that leaves the field out is read with "
            "the new value. If a family's model does not follow, its `Defaults` gives the old one.",
        ]
    )
    assert FILE.read_text() == written, "run `python docs/generate.py`"


def test_an_older_version_leaves_the_file_as_it_is(generate, monkeypatch):
    monkeypatch.setattr("transformers.__version__", "0.1")
    assert generate.family_defaults() == FILE.read_text()


@pytest.mark.parametrize(("default", "version"), [(1e-6, None), (0.5, "999.0")])
def test_a_newer_version_is_named_if_a_default_has_moved(generate, default, version, monkeypatch):
    import transformers

    known = json.loads(FILE.read_text())
    known["classes"] = {"LlamaConfig": known["classes"]["LlamaConfig"]}
    monkeypatch.setattr("transformers.__version__", "999.0")
    monkeypatch.setattr(transformers.LlamaConfig.__dataclass_fields__["rms_norm_eps"], "default", default)
    written = json.loads(generate.with_classes(known, ["LlamaConfig"]))
    assert written["classes"]["LlamaConfig"] == {**known["classes"]["LlamaConfig"], "rms_norm_eps": default}
    assert written["transformers"] == (version or known["transformers"])


@pytest.mark.parametrize("defaults", OF_CLASSES, ids=lambda each: each.config_class)
def test_exceptions_are_none_of_the_class(defaults):
    of_class = class_defaults()[defaults.config_class]
    for name, value in defaults.own.items():
        assert name in of_class if value is UNREAD else of_class.get(name, UNREAD) != value, name
    assert {*defaults.takes} <= {*SHAPE, *TOKENS} & of_class.keys() - defaults.own.keys()


def test_a_class_that_the_file_does_not_have_yet_is_named():
    with pytest.raises(KeyError, match=r"defaults\.json has no NewConfig: run `make docs`"):
        of_text_alone(Defaults("NewConfig"))


def test_a_model_of_text_alone_has_no_default_of_its_shape():
    own = Defaults("LlamaConfig", {"head_dim": 8, "rms_norm_eps": UNREAD})
    part, alone = dict(own), of_text_alone(own)
    assert part["head_dim"] == alone["head_dim"] == 8 and part["hidden_size"] == 4096
    assert part.keys() - alone.keys() == {*SHAPE}
    assert not part.keys() & {*TOKENS, "rms_norm_eps"}


def test_families_take_fields_by_name():
    own = Defaults("LlamaConfig", {"bos_token_id": 7}, takes=("intermediate_size", "eos_token_id"))
    assert of_text_alone(own).keys() & {*SHAPE, *TOKENS} == {"bos_token_id", "eos_token_id", "intermediate_size"}
    assert own["bos_token_id"] == 7 and own["eos_token_id"] == 2


def test_a_plain_mapping_has_the_same_defaults_everywhere():
    assert of_text_alone({"hidden_size": 8}) == {"hidden_size": 8}


def test_no_configuration_is_read_with_transformers(tmp_path):
    shape = dict.fromkeys(SHAPE, 64) | {"num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **shape}))
    code = f"""
import sys
from pathlib import Path
from chorus.core.model import read_config
from chorus.core.model.families.defaults import class_defaults
assert not class_defaults.cache_info().currsize, "read before it is needed"
model = read_config.read_model_config(Path({str(tmp_path)!r}))
assert model.max_position_embeddings == 2048 and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


_BASES = [
    {},
    {"rope_theta": 300.0},
    {"rope_parameters": {"rope_type": "default"}},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 300.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": 300.0},
]


@pytest.mark.parametrize("family", ["ling-2.6", "gpt-oss", "hy-v4", "qwen3", "apertus", "cwm"])
@pytest.mark.parametrize("values", _BASES, ids=str)
def test_the_base_of_a_rope_is_the_classes(tmp_path, family, values):
    """Some classes make an object of their own, to which the base beside it belongs; others' has one already."""
    from transformers import AutoConfig

    path = kept_files("configurations of geometries", quiet()(golden.make_configs)) / family
    raw = json.loads((path / "config.json").read_text())
    raw = {name: value for name, value in raw.items() if name not in ("rope_theta", "rope_parameters")} | values
    (tmp_path / "config.json").write_text(json.dumps(raw))
    want = AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"]
    assert {each.rope.theta for each in read_model_config(tmp_path).attention_layers} == {want}
