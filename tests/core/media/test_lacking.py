"""Servers that can't see say why, and serve text as before."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.media import lacking, serving
from chorus.core.media.serving import why_blind
from chorus.core.model.read_config import read_model_config

from .tiny_vision import needs_vision, tiny


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"PIL": object(), "torchvision": None, "num2words": None}
    monkeypatch.setattr(lacking, "find_spec", found.get)
    assert lacking.why_lacking() == ("torchvision and num2words are not installed: pip install 'chorus-lora[vision]'")
    monkeypatch.setattr(lacking, "find_spec", lambda _: object())
    assert lacking.why_lacking() is None


@needs_vision
@pytest.mark.vision
def test_each_reason_is_told() -> None:
    path = tiny("smolvlm")
    config, model = EngineConfig(model=path), read_model_config(path)
    assert model.image_token is not None

    def why(model: Any = model, on_gpu: bool = False, **fields: Any) -> str | None:
        return why_blind(config.model_copy(update=fields), model, on_gpu=on_gpu)

    assert why() is None
    assert why(on_gpu=True) is why(tensor_parallel_size=2) is None
    blocks = read_model_config(tiny("gemma3"))
    assert "see each other" in str(why(blocks, on_gpu=True)) and why(blocks) is None
    assert why(blocks, on_gpu=True, attention="torch") is None
    assert "dummy" in str(why(load_format="dummy"))
    assert "allows no image" in str(why(limit_mm_per_prompt={"image": 0}))
    elsewhere = config.model_copy(update={"model": path / "adapters"})
    assert "preprocessor_config.json" in str(why_blind(elsewhere, model, on_gpu=False))
    assert "text alone" in str(why(model=replace(model, vision=None)))
    told = replace(model, vision=None, why_text_alone="its tower is a secret")
    assert "served for text alone: its tower is a secret" in str(why(model=told))


@needs_vision
@pytest.mark.vision
def test_transformers_is_imported_beside_any_torch() -> None:
    """A torchvision of the package index would keep transformers' tokenizers from being imported."""
    program = (
        "from chorus.memory.files.tokens.torchvision import mend_torchvision; mend_torchvision();"
        "from transformers import AutoTokenizer, LlamaConfig, AutoImageProcessor; print('imported')"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=250)
    assert found.stdout.strip() == "imported", found.stderr


@needs_vision
@pytest.mark.vision
def test_the_doctor_knows_whether_peft_can_be_imported() -> None:
    """Beside a torchvision of another build it can be only after Chorus has mended that."""
    mend = "from chorus.memory.files.tokens.torchvision import mend_torchvision as mend; print(mend());"
    use = "import peft; print(peft.LoraConfig(r=2).r)"

    def run(program: str) -> list[str]:
        command = [sys.executable, "-W", "ignore", "-c", program]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250).stdout.split()

    mended, rank = run(mend + use)
    assert rank == "2"
    assert run(use) == ([] if mended == "True" else ["2"])


@needs_vision
@pytest.mark.vision
def test_a_start_says_what_the_towers_tensors_are_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=tiny("smolvlm"), memory_bytes=64 << 20, cpu_kernels="torch", device="cpu", threads=1)
    caplog.set_level("INFO")
    Engine.from_config(config).close()
    assert "tensors of the checkpoint are the vision tower's: the first image has them read" in caplog.text
    assert "no effect" not in caplog.text and "images are not served" not in caplog.text
    caplog.clear()
    monkeypatch.setattr(serving, "why_lacking", lambda: "pillow is not installed: pip")
    Engine.from_config(config).close()
    assert "images are not served: pillow is not installed" in caplog.text
    assert "have no effect on text and are left out" in caplog.text and "has them read" not in caplog.text


def test_a_processor_is_not_imported_for_text() -> None:
    """`chorus.core.engine` imports neither Pillow nor torchvision."""
    program = "import sys, chorus.core.engine; print(sorted({'PIL', 'torchvision'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=250)
    assert found.stdout.strip() == "[]", found.stderr
