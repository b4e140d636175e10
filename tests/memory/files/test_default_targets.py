"""`target_modules: null` means PEFT's default for the base model's type, also beside `target_parameters`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as OF_PEFT
from transformers.models.auto import modeling_auto

from chorus.core.model import read_config
from chorus.memory.files.default_targets import DEFAULT_TARGETS, default_targets
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from tests.tables import TINY_PATHS


def test_the_table_is_peft_s():
    for name, targets in DEFAULT_TARGETS.items():
        assert OF_PEFT[name] == (targets if isinstance(targets, str) else list(targets))
    assert default_targets(None) == ("q_proj", "v_proj")
    assert default_targets("glm4") is None


def test_every_served_type_with_a_default_is_in_it(monkeypatch):
    """Of Chorus's own families: to ask about others reads what is installed, for each of hundreds of names."""
    monkeypatch.setattr(read_config, "plugin", lambda name: None)
    lists = (
        modeling_auto.MODEL_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    served = set()
    for model_type, names in ((name, each[name]) for each in lists for name in each):
        if any(read_config.family_of(name)[0] is not None for name in ([names] if isinstance(names, str) else names)):
            served.add(model_type)
    assert len(served) > 100
    assert served & OF_PEFT.keys() == DEFAULT_TARGETS.keys()


@pytest.mark.parametrize(
    ("model_type", "modules"),
    [("llama", ("q_proj", "v_proj")), ("nemotron_h", ("q_proj", "k_proj", "v_proj", "o_proj"))],
)
def test_null_is_the_default_of_the_type(adapter_draft, tmp_path, model_type, modules):
    it = adapter_draft(modules)
    it.config["target_modules"] = None
    path, base = it.write(tmp_path / "a"), replace(TINY_PATHS, model_type=model_type)
    assert inspect_adapter(path, base).targets == modules
    del it.config["target_modules"]
    assert inspect_adapter(it.write(tmp_path / "b"), base).targets == modules


def test_null_is_refused_where_peft_has_no_default(adapter_draft, tmp_path):
    it = adapter_draft(("q_proj", "v_proj"))
    it.config["target_modules"] = None
    why = "target_modules is None: PEFT has no default for a base model of type 'glm4'; name the modules"
    with pytest.raises(AdapterFormatError, match=why):
        inspect_adapter(it.write(tmp_path / "a"), replace(TINY_PATHS, model_type="glm4"))


def test_a_default_module_without_tensors_stays_the_base_model_s(adapter_draft, tmp_path):
    """PEFT's B of it is zero."""
    it = adapter_draft(("q_proj",))
    it.config["target_modules"] = None
    manifest = inspect_adapter(it.write(tmp_path / "a"), replace(TINY_PATHS, model_type="llama"))
    assert manifest.targets == ("q_proj",) and manifest.untrained == ("v_proj",)
