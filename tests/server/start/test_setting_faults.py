"""All faults of flags, environment variables and the configuration file are told at once, each with its place."""

from __future__ import annotations

import os

import pytest

from chorus import InvalidRequest
from chorus.server.cli.command import main, make_parser
from chorus.server.cluster.router import POLICIES
from chorus.server.library.options import settings_of
from chorus.server.settings import Settings
from chorus.server.start.flags import UsageError, read_settings


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in os.environ:
        if name.upper().startswith("CHORUS_"):
            monkeypatch.delenv(name)


@pytest.fixture
def environment(monkeypatch):
    """Two mistyped names, two wrong values and an empty key."""
    for name, value in (
        ("MAX_NUM_SEQ", "4"),
        ("API_KEY_FIEL", "/keys"),
        ("MAX_NUM_BATCHED_TOKENS", "many"),
        ("PORT", "99999"),
        ("ADMIN_KEY", ""),
    ):
        monkeypatch.setenv(f"CHORUS_{name}", value)
    return (
        "CHORUS_MAX_NUM_SEQ is no setting; did you mean CHORUS_MAX_NUM_SEQS?",
        "CHORUS_API_KEY_FIEL is no setting; did you mean CHORUS_API_KEY_FILE?",
        "CHORUS_MAX_NUM_BATCHED_TOKENS is 'many'; it must be a whole number",
        "CHORUS_PORT is '99999'; it must be at most 65535",
        "CHORUS_ADMIN_KEY is set and empty; give it a value, or unset it to go without",
    )


def told(*args):
    with pytest.raises(UsageError) as caught:
        read_settings(make_parser().parse(args))
    lines = str(caught.value).splitlines()
    assert all(line.startswith("chorus") and ": error: " in line for line in lines)
    return [line.partition(": error: ")[2].partition(" (see ")[0] for line in lines]


def test_variables_beside_wrong_values_of_flags(environment):
    assert sorted(told("serve", "--dtype", "int3", "--threads", "x")) == sorted(
        (
            *environment,
            "--dtype is 'int3'; it must be 'auto', 'float32', 'bfloat16' or 'float16'",
            "--threads is 'x'; it must be a whole number",
        )
    )


def test_variables_beside_flags_that_do_not_exist(environment):
    flags = ("--max-num-seq", "3", "--mem-fraction-static", "0.8", "--threads", "x")
    lines = told("serve", "M", *flags)
    assert set(environment) < set(lines) and len(lines) == len(environment) + 3
    assert "unrecognized arguments: --max-num-seq 3; did you mean --max-num-seqs?" in lines
    assert any(line.startswith("--mem-fraction-static is no flag of chorus; ") for line in lines)


def test_variables_beside_a_command_line_that_can_not_be_read(environment):
    lines = told("serve", "--max-num-batched-tokens", "100", "--mem-fraction-static", "0.8", "--host")
    wanted = [each for each in environment if "BATCHED" not in each]
    assert set(wanted) < set(lines) and len(lines) == len(wanted) + 2, "the flag wins over its variable"
    assert "argument --host: expected one argument" in lines


def test_several_values_of_flags_that_are_no_settings():
    lines = told("serve", "--api-servers", "x", "--engine-process", "offf", "--port", "many", "--threds", "3")
    assert lines == [
        "argument --api-servers/--api-server-count/--fronts: invalid number value: 'x'",
        "argument --engine-process: invalid choice: 'offf' (choose from 'auto', 'on', 'off'); did you mean off?",
        "unrecognized arguments: --threds; did you mean --threads?",
        "--port is 'many'; it must be a whole number",
    ]
    assert told("cluster", "up", "--replicas", "x", "--api-servers", "0")[1].endswith("0 is below 1")


def test_a_parser_reads_a_right_line_after_a_wrong_one():
    parser = make_parser()
    with pytest.raises(UsageError):
        parser.parse(["serve", "--api-servers", "x"])
    assert parser.parse(["serve", "--api-servers", "2"]).api_servers == 2


def test_commands_of_commands_suggest_their_flags():
    assert told("cluster", "up", "--max-num-seq", "3")[0].endswith("; did you mean --max-num-seqs?")


def test_commands_without_settings_have_no_faults_of_settings(environment, capsys):
    assert main(["keys", "list", "keys", "--tenants", "x"]) == 2
    assert "CHORUS_" not in capsys.readouterr().err


def test_all_of_a_configuration_file(environment, tmp_path):
    path = tmp_path / "chorus.toml"
    path.write_text(
        'prot = 5\nthreads = "x"\nmax_num_seq = 3\nassist_workers = 1\noffload_workers = 2\nport = "many"\n'
    )
    assert sorted(told("serve", "--config", str(path), "--dtype", "int3")) == sorted(
        (
            *environment,
            f"{path} sets prot, which does not exist; did you mean port?",
            f"{path} sets max_num_seq, which does not exist; did you mean max_num_seqs?",
            f"{path} sets assist_workers and offload_workers, which are the same setting; leave out assist_workers",
            "threads in the configuration file is 'x'; it must be a whole number",
            "--dtype is 'int3'; it must be 'auto', 'float32', 'bfloat16' or 'float16'",
        )
    )
    missing = tmp_path / "none.toml"
    assert set(told("serve", "--config", str(missing), "--port", "x")) == {
        f"the configuration file {missing} does not exist",
        "--port is 'x'; it must be a whole number",
        *(each for each in environment if "PORT" not in each),
    }


def test_names_in_small_letters_are_read_and_checked(monkeypatch):
    monkeypatch.setenv("chorus_port", "many")
    monkeypatch.setenv("chorus_max_num_seq", "3")
    assert told("serve") == [
        "chorus_max_num_seq is no setting; did you mean CHORUS_MAX_NUM_SEQS?",
        "CHORUS_PORT is 'many'; it must be a whole number",
    ]


def test_two_old_names_are_told_with_the_rest(monkeypatch):
    monkeypatch.setenv("CHORUS_ASSIST_WORKERS", "1")
    monkeypatch.setenv("CHORUS_OFFLOAD_WORKERS", "2")
    lines = told("serve", "--port", "many")
    assert len(lines) == 2 and "CHORUS_ASSIST_WORKERS is the old name of CHORUS_OFFLOAD_WORKERS" in lines[0]


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_variable_is_accepted_or_named(name, monkeypatch):
    monkeypatch.setenv(f"CHORUS_{name.upper()}", "{?")
    try:
        read_settings(make_parser().parse(["serve"]))
    except UsageError as error:
        if name == "kv_cache_dir":  # any text is a path
            assert str(error).startswith("chorus: error: kv_cache_dir is set, but kv_cache_disk_bytes is not")
        elif name != "config":
            assert f"CHORUS_{name.upper()} is " in str(error)


def test_the_library_names_a_variable_and_a_file(monkeypatch, tmp_path):
    monkeypatch.setenv("CHORUS_MAX_NUM_SEQS", "many")
    with pytest.raises(InvalidRequest, match=r"^CHORUS_MAX_NUM_SEQS is 'many'; it must be a whole number$") as caught:
        settings_of({})
    assert caught.value.field == "max_num_seqs"
    assert settings_of({"max_num_seqs": 3}).max_num_seqs == 3
    path = tmp_path / "chorus.toml"
    path.write_text("max_num_seq = 3\n")
    with pytest.raises(
        InvalidRequest, match="sets max_num_seq, which does not exist; did you mean max_num_seqs"
    ) as caught:
        settings_of({"config": path, "max_num_seqs": 3})
    assert caught.value.field == "config"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_no_command(policy):
    """The parser of commands looked for further ones among the choices of flags, and a policy is a function."""
    assert make_parser().parse(["cluster", "up", "--policy", policy]).policy == policy
