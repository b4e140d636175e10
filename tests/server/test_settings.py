"""Flags before environment before file before defaults, and clear errors."""

import pytest
from pydantic import ValidationError

from chorus.core.config import EngineConfig
from chorus.server.cli.command import make_parser
from chorus.server.settings import Settings
from chorus.server.start.flags import UsageError, read_settings
from chorus.server.start.setting_faults import WrongSettings, checked_settings


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, tmp_path):
    import os

    for name in os.environ:
        if name.startswith("CHORUS_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def write(tmp_path, text):
    path = tmp_path / "chorus.toml"
    path.write_text(text)
    return path


def test_precedence(tmp_path, monkeypatch):
    path = write(tmp_path, 'port = 1\nhost = "file"\nmax_num_seqs = 3\n')
    monkeypatch.setenv("CHORUS_PORT", "2")
    monkeypatch.setenv("CHORUS_HOST", "environment")
    settings = Settings(config=path, port=3)
    assert (settings.port, settings.host, settings.max_num_seqs, settings.block_tokens) == (3, "environment", 3, 16)


def test_the_file_can_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("CHORUS_CONFIG", str(write(tmp_path, "port = 7\nmax-num-seqs = 4\n")))
    assert (Settings().port, Settings().max_num_seqs) == (7, 4)
    other = tmp_path / "other.toml"
    other.write_text("port = 9\n")
    assert Settings(config=other).port == 9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 5\n", "prot.*did you mean port"),
        ("config = 'x'\n", "config"),
        ("port =", "can't be read"),
        (None, "no"),
    ],
)
def test_files_that_are_wrong(tmp_path, text, words):
    path = tmp_path / "missing.toml" if text is None else write(tmp_path, text)
    with pytest.raises(WrongSettings, match=words) as caught:
        checked_settings({"config": path})
    assert str(path) in str(caught.value)


def test_a_wrong_value_in_the_file(tmp_path):
    with pytest.raises(ValidationError):
        Settings(config=write(tmp_path, 'port = "many"\n'))


def test_the_builtin_model_brings_its_adapters(tmp_path, monkeypatch):
    monkeypatch.setattr("chorus.server.settings.BUILTIN_ADAPTERS", tmp_path)
    settings = Settings()
    assert settings.is_builtin and settings.adapters == tmp_path and settings.base_name == "chorus-builtin"
    other = Settings(model=tmp_path / "llama")
    assert other.adapters is None and other.base_name == "llama" and not other.is_builtin
    assert Settings(adapters=tmp_path / "mine").adapters == tmp_path / "mine"
    assert Settings(served_model_name="choir").base_name == "choir"


def test_every_engine_field_is_a_setting(tmp_path):
    assert EngineConfig.model_fields.keys() <= Settings.model_fields.keys()
    config = Settings(model=tmp_path, max_num_seqs=5, seed=3).engine_config()
    assert type(config) is EngineConfig
    assert (config.model, config.max_num_seqs, config.seed) == (tmp_path, 5, 3)


def test_engine_rules_hold_for_settings():
    with pytest.raises(ValidationError, match="max_num_batched_tokens"):
        Settings(max_num_seqs=100, max_num_batched_tokens=10)


def test_adapter_roots(tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    assert Settings(model=tmp_path).loadable_from == ()
    assert Settings(model=tmp_path, adapters=one).loadable_from == (one,)
    assert Settings(model=tmp_path, adapters=one, adapter_roots=f"{one}:{two}").loadable_from == (one, two)
    assert Settings(model=tmp_path, adapters=one, adapter_roots="none").loadable_from == ()
    path = write(tmp_path, f'adapter_roots = ["{two}"]\n')
    assert Settings(model=tmp_path, config=path).loadable_from == (two,)
    monkeypatch.setenv("CHORUS_ADAPTER_ROOTS", str(one))
    assert Settings(model=tmp_path, config=path).loadable_from == (one,)
    monkeypatch.setenv("CHORUS_ADAPTER_ROOTS", "none")
    assert Settings(model=tmp_path, config=path, adapters=one).loadable_from == ()


def test_weights_are_read_from_flags_files_and_the_environment(tmp_path, monkeypatch):
    want = {"support": 2.0, "a=b": 0.5}
    assert Settings(weights="support=2, a=b=0.5").engine_config().weights == want
    path = tmp_path / "chorus.toml"
    path.write_text('[weights]\nsupport = 2\n"a=b" = 0.5\n')
    assert Settings(config=path).weights == want
    monkeypatch.setenv("CHORUS_WEIGHTS", "support=2,a=b=0.5")
    assert Settings().weights == want
    for text, message in (
        ("support", "'support' is not NAME=WEIGHT"),
        ("a=0", "weight of 'a' is 0"),
        ("a=x", "number"),
    ):
        with pytest.raises(ValidationError, match=message):
            Settings(weights=text)


class TestASettingThatWasRenamed:
    """`assist_workers` is `offload_workers`; the old name is accepted for one release."""

    @staticmethod
    def read(*flags):
        return read_settings(make_parser().parse(["serve", *flags]))

    def test_its_old_name_is_accepted_as_a_flag_a_variable_and_a_line(self, tmp_path, monkeypatch):
        assert self.read("--assist-workers", "2").offload_workers == 2
        (note,) = make_parser().parse(["serve", "--assist-workers", "2"]).notes
        assert "--assist-workers is now called --offload-workers" in note
        assert self.read("--config", str(write(tmp_path, "assist-workers = 3\n"))).offload_workers == 3
        monkeypatch.setenv("CHORUS_OFFLOAD_WORKERS", "")  # has it undone: reading sets it
        monkeypatch.delenv("CHORUS_OFFLOAD_WORKERS")
        monkeypatch.setenv("CHORUS_ASSIST_WORKERS", "4")
        assert self.read().offload_workers == 4

    def test_two_values_under_both_names_are_refused(self, tmp_path, monkeypatch):
        path = write(tmp_path, "assist_workers = 1\noffload_workers = 2\n")
        with pytest.raises(UsageError, match="sets assist_workers and offload_workers, which are the same setting"):
            self.read("--config", str(path))
        monkeypatch.setenv("CHORUS_ASSIST_WORKERS", "1")
        monkeypatch.setenv("CHORUS_OFFLOAD_WORKERS", "2")
        with pytest.raises(UsageError, match="CHORUS_ASSIST_WORKERS is the old name of CHORUS_OFFLOAD_WORKERS"):
            self.read()
