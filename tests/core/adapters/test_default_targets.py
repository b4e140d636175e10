"""`target_modules: null` beside `target_parameters`: tokens are those of PEFT, which chooses by the model's type."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ..paths.asked import answers, told
from ..tiny_families import load_peft
from ..tiny_mixtures import Mixture, make_mixture

pytestmark = pytest.mark.wide


@pytest.fixture
def kernels() -> str:
    """The native library computes mixtures, where it is there."""
    return "auto"


@pytest.mark.parametrize(
    ("family", "trained", "found"),
    [
        ("mixtral", ["q_proj", "v_proj"], ("q_proj", "v_proj", "experts.down_proj")),
        ("mixtral", [], ("experts.down_proj",)),
        ("qwen3-moe", [], ("experts.down_proj",)),
    ],
    ids=["default", "default without tensors", "no default"],
)
def test_null_beside_parameters_is_as_in_peft(drive, tmp_path, family, trained, found):
    recipe = {"r": 4, "lora_alpha": 8, "target_modules": trained, "target_parameters": ["experts.down_proj"]}
    name = "-".join(["parameters", *trained])
    kept = make_mixture(family, {name: recipe})
    adapter = Path(shutil.copytree(kept.adapters[name], tmp_path / name))
    file = adapter / "adapter_config.json"
    # initialised so that PEFT, too, adds nothing by modules that the file has no tensors of
    changes = {"target_modules": None, "init_lora_weights": True}
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    it = Mixture(kept.model, {"null": adapter}, load_peft)
    driver = drive(it, max_num_seqs=8, max_num_batched_tokens=24)
    assert driver.engine.store.get("null").manifest.targets == found
    want = answers(it, driver, 4, seed=1, adapters=("null", None))
    assert told(driver, want) == want
    assert len({tuple(tokens) for tokens in want.values()}) > 1
