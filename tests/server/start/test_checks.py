"""Settings that can't be served are refused before anything heavy is imported."""

from __future__ import annotations

import json

import pytest

from chorus.server.settings import Settings
from chorus.server.start.checks import LaunchError, check_model


def test_an_adapter_given_as_the_model_names_its_base_and_the_flag(tmp_path):
    path = tmp_path / "mine"
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    with pytest.raises(LaunchError, match="it is a LoRA adapter") as caught:
        check_model(Settings(model=path))
    assert f"chorus serve org/base --lora-modules mine={path}" in str(caught.value)
    (path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(LaunchError, match="chorus serve BASE --lora-modules"):
        check_model(Settings(model=path))


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("adapters", "is {}, but there is no such directory; make it, or name another"),
        ("adapter_roots", "has {}, but there is no such directory; make it, or leave it out"),
        ("tokenizer", "is {}, which has no tokenizer.json; name a directory that has one"),
        ("chat_template", "is {}, but there is no such file; name another"),
    ],
)
def test_a_path_that_does_not_exist_is_refused_with_its_setting(tmp_path, field, said):
    path = tmp_path / "none"
    given = [path] if field == "adapter_roots" else path
    with pytest.raises(LaunchError) as caught:
        check_model(Settings(**{field: given}))
    assert str(caught.value) == f"{field} {said.format(path)}"


def test_a_directory_without_a_model_says_so(tmp_path):
    with pytest.raises(LaunchError, match=r"holds no model: it has no config\.json"):
        check_model(Settings(model=tmp_path))


@pytest.mark.parametrize("is_file", [False, True])
def test_a_folder_of_prefixes_that_others_may_use_is_refused_before_the_model_is_loaded(tmp_path, is_file):
    folder = tmp_path / "kv"
    settings = Settings(kv_cache_dir=folder, kv_cache_disk_bytes=1 << 30, host_cache_bytes=1 << 26)
    check_model(settings)
    assert not folder.exists(), "a check makes nothing"
    folder.mkdir(mode=0o700)
    check_model(settings)
    if is_file:
        (folder / "lock").touch()
    (folder / "lock" if is_file else folder).chmod(0o755)
    with pytest.raises(LaunchError, match=r"has mode 755, so other users may use it; chmod [67]00 it"):
        check_model(settings)
