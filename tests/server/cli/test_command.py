"""The command line: exit codes, and one clear line for every mistake."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from chorus import __version__
from chorus.core.executors import choice
from chorus.server.cli import command as cli
from chorus.server.cli.command import main
from chorus.server.engine.worker import EngineWorker
from chorus.server.settings import SIZES, Settings
from chorus.server.start import launch
from chorus.server.start.checks import LaunchError, check_model
from chorus.server.start.flags import Parser, UsageError, add_settings, read_settings

pytestmark = pytest.mark.wide


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in os.environ:
        if name.startswith("CHORUS_"):
            monkeypatch.delenv(name)


@pytest.fixture
def model_dir(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def parse(*flags):
    parser = Parser(prog="chorus serve")
    add_settings(parser)
    return read_settings(parser.parse(flags))


def test_flags_in_both_spellings():
    settings = parse("--max-num-seqs", "4", "--max_num_batched_tokens=99", "--no-chunked-prefill", "--access_log")
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (4, 99)
    assert settings.chunked_prefill is False and settings.access_log is True


def test_every_setting_has_a_flag(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help-all"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name in Settings.model_fields:
        assert "--" + name.replace("_", "-") in text


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"chorus {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "COMMAND"),
        (["sing"], 2, "chorus: error: argument COMMAND: 'sing' is no command (see chorus --help)"),
        (["serv"], 2, "'serv' is no command; did you mean serve?"),
        (["adapters", "lst"], 2, "'lst' is no command; did you mean list? (see chorus adapters --help)"),
        (["quantize", "a", "b", "--quantization", "int44"], 2, "did you mean int4?"),
        (["serve", "--frobnicate"], 2, "--frobnicate"),
        (
            ["serve", "--max-num-seq", "3"],
            2,
            "chorus serve: error: unrecognized arguments: --max-num-seq; did you mean --max-num-seqs?",
        ),
        (["generate", "--prompt", "x", "--temprature=1"], 2, "did you mean --temperature?"),
        (["serve", "/nowhere/model"], 1, "/nowhere/model"),
        (["serve", "one", "--model", "two"], 2, "twice"),
        (["serve", "--memory-bytes", "2 elephants"], 2, "2GiB"),
        (["serve", "--lora-modules", "nameless"], 2, "NAME=DIR"),
        (["serve", "--lora-modules", "../x=/tmp"], 2, "lora-modules"),
        (["serve", "--lora-modules", "chorus-builtin:x=/tmp"], 1, "like the base model"),
        (["serve", "--host", "0.0.0.0"], 1, "--allow-unauthenticated"),
        (["serve", "--host", "unix:/run/chorus.sock"], 1, "use --unix-socket for a Unix socket"),
        (["serve", "--api-key", "short"], 2, "8 to 512 characters"),
        (["serve", "--api-key-file", "/nowhere/keys"], 1, "/nowhere/keys"),
        (["serve", "--port"], 2, "--port"),
        (["serve", "--port", "many"], 2, "--port is 'many'"),
        (["serve", "--dtype", "int3"], 2, "float32"),
        (["serve", "--config", "/nowhere.toml"], 2, "/nowhere.toml"),
        (["serve", "--model", "/nowhere/model"], 1, "/nowhere/model"),
        (["demo", "--check", "0"], 2, "below 1"),
        (["demo", "--check", "5", "--model", "/nowhere/model"], 2, "built-in"),
        (["demo", "--model", "/nowhere/model"], 1, "/nowhere/model"),
        (["generate"], 2, "--prompt"),
        (["generate", "--prompt", "x", "--temperature", "-1"], 2, "temperature"),
        (["generate", "--prompt", "x", "--model", "/nowhere/model"], 1, "/nowhere/model"),
        (["generate", "/nowhere/model", "--prompt", "x"], 1, "/nowhere/model"),
        (["generate", "one", "--prompt", "x", "--model", "two"], 2, "chorus generate: error: the model is given twice"),
        (["demo", "/nowhere/model"], 1, "/nowhere/model"),
        (["profile", "/nowhere/model"], 1, "/nowhere/model"),
        (["generate", "--prompt", "x", "--min-p", "2"], 2, "min_p"),
        (["generate", "--prompt", "x", "--min-tokens", "200"], 2, "min_tokens"),
        (["generate", "--prompt", "x", "--frequency-penalty", "3"], 2, "frequency_penalty"),
        (["pull"], 2, "NAME"),
        (["pull", "gpt-17"], 1, "smollm2"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, code, words):
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and words in captured.err


def test_the_demo_says_that_it_starts_before_what_takes_seconds(monkeypatch, capsys):
    monkeypatch.setattr("chorus.server.demo.run.run_demo", lambda *_, **__: print("served") or 0)
    assert main(["demo"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "served\n" and "starting chorus-builtin; this may take a while" in captured.err


def test_a_mistyped_flag_is_named_before_what_is_missing(capsys):
    assert main(["generate", "--promt", "x"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "unrecognized arguments: --promt; did you mean --prompt?" in first
    assert "the following arguments are required: --prompt" in second


def test_a_wrong_environment_variable_is_named(capsys, monkeypatch):
    monkeypatch.setenv("CHORUS_PORT", "many")
    assert main(["serve"]) == 2
    assert "CHORUS_PORT" in capsys.readouterr().err


def test_a_wrong_value_in_the_file_is_named(capsys, tmp_path):
    (tmp_path / "c.toml").write_text('port = "many"\n')
    assert main(["serve", "--config", str(tmp_path / "c.toml")]) == 2
    assert "port in the configuration file" in capsys.readouterr().err


def test_directories_that_are_none(capsys, model_dir, tmp_path):
    assert main(["serve", "--model", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
    assert main(["serve", "--model", str(model_dir), "--adapters", str(tmp_path / "none")]) == 1
    assert f"adapters is {tmp_path}/none" in capsys.readouterr().err
    assert main(["serve", "--model", str(model_dir), "--port", "0"]) == 1
    assert "can't serve" in capsys.readouterr().err


def test_a_port_in_use(capsys, model_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--model", str(model_dir), "--port", port]) == 1
    assert f"port {port}: Address already in use; choose another --host or --port" in capsys.readouterr().err


def test_adapters_named_on_the_command_line(tmp_path, monkeypatch, model_dir):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    flags = [
        "--lora-modules",
        f"a={tmp_path}/a",
        f"b={tmp_path}/b",
        "--lora-modules",
        f'{{"name": "c", "path": "{tmp_path}/c"}}',
    ]
    assert parse(*flags).lora_modules == [(name, tmp_path / name) for name in "abc"]
    monkeypatch.setenv("CHORUS_LORA_MODULES", f"a={tmp_path}/a b={tmp_path}/b")
    assert [name for name, _ in parse().lora_modules] == ["a", "b"]
    (tmp_path / "c.toml").write_text(f'lora_modules = ["a={tmp_path}/a"]\n')
    monkeypatch.delenv("CHORUS_LORA_MODULES")
    assert parse("--config", str(tmp_path / "c.toml")).lora_modules == [("a", tmp_path / "a")]
    twice = parse("--model", str(model_dir), "--lora-modules", f"a={tmp_path}/a", f"a={tmp_path}/b")
    with pytest.raises(LaunchError, match="twice"):
        check_model(twice)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("512MB", 512_000_000),
        ("1.5 gib", 3 << 29),
        ("70k", 70_000),
        ("65536", 65536),
        ("1_000_000", 10**6),
    ],
)
def test_sizes_have_units(text, size):
    assert parse("--memory-bytes", text).memory_bytes == size


def test_every_setting_in_bytes_takes_a_unit():
    """The bounds of files of prefixes, of encoded images and of grammars did not."""
    numbers = {name for name, field in Settings.model_fields.items() if field.annotation in (int, int | None)}
    assert {name for name in numbers if name.endswith("_bytes")} == set(SIZES)


@pytest.mark.parametrize("text", ["", "-1", "GiB", "1XB", "1e9", "9" * 30])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="--memory-bytes"):
        parse("--memory-bytes", text)


def test_a_line_comes_before_anything_heavy(tmp_path):
    """Modules that take seconds to import are only asked for once the user knows that something happens."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'uvicorn', 'numpy'): sys.modules[name] = None\n"
        "from chorus.server.cli.command import main\n"
        "sys.exit(main(['serve', '--port', '0']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stderr.startswith(f"chorus {__version__}: starting chorus-builtin"), ended.stderr


def test_with_json_lines_every_line_of_a_start_is_json():
    """Also the first one, notes about flags, and the error that ends the start."""
    command = [sys.executable, "-m", "chorus.server", "serve", "--host", "203.0.113.1", "--allow-unauthenticated"]
    command += ["--log-format", "json", "--log-level", "error", "--enable-lora"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1, ended.stderr
    note, start, *_, error = map(json.loads, ended.stderr.splitlines())
    assert note["message"] == "chorus serve: --enable-lora changes nothing here: adapters are always served"
    assert start["message"].startswith(f"chorus {__version__}: starting chorus-builtin") and start["level"] == "INFO"
    assert error["message"].startswith("chorus: error: ") and error["level"] == "ERROR"


def test_an_interrupt_while_modules_are_imported_leaves_no_traceback():
    """Importing takes seconds; the process ends by the signal, as a shell expects."""
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a parent may ignore it
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'chorus.server.cli.command':\n"
        "            print('importing', flush=True)\n"
        "            time.sleep(600)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "from chorus.server.__main__ import run\n"
        "run()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT
        assert process.stderr.read() == b""


def test_the_installed_command_is_the_one_that_an_interrupt_ends_quietly():
    with (Path(__file__).parents[3] / "pyproject.toml").open("rb") as file:
        scripts = tomllib.load(file)["project"]["scripts"]
    assert scripts == {"chorus": "chorus.server.__main__:run"}


def test_no_memory_is_a_line_with_numbers_and_no_traceback():
    """The page pool wants more than the process may have."""
    command = [sys.executable, "-m", "chorus.server", "generate", "--prompt", "x", "--memory-bytes", "6GiB"]
    ended = subprocess.run(
        ["/bin/sh", "-c", 'ulimit -v 4194304; exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1, ended.stderr
    assert "out of memory ([Errno 12] Cannot allocate memory for " in ended.stderr
    assert "ulimit -v lets this process have 4 GiB; lower --memory-bytes" in ended.stderr


def test_a_fault_of_the_machine_in_any_command_is_a_line(capsys, monkeypatch):
    """Whatever raises it; an error of the program itself keeps its traceback."""

    def fails(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/store/x")

    monkeypatch.setattr(cli.models, "families", fails)
    assert main(["models"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("chorus: error: /store/x can't be written: its file system is read-only;")
    assert told.count("\n") == 1

    def is_wrong(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(cli.models, "families", is_wrong)
    with pytest.raises(ZeroDivisionError):
        main(["models"])


def test_generate_asks_the_builtin_model_as_it_was_trained(capsys, monkeypatch, make_engine, tokenizer):
    engine = make_engine(["reverse"])

    def load(settings):
        worker = EngineWorker(lambda: engine)
        worker.start()
        return worker, tokenizer

    monkeypatch.setattr("chorus.server.llm.load", load)
    for prompt in ("hello", "hello\n"):
        assert main(["generate", "--adapter", "reverse", "--prompt", prompt]) == 0
        assert engine.asked[-1].token_ids[1:7] == [*b"hello\n"]
    assert main(["generate", "--chat", "--prompt", "hello"]) == 0
    assert engine.asked[-1].token_ids[:13] == [*b"user: hello\na"], "a conversation has its own form"


def test_generate_prints_the_answer(capsys, model_dir, monkeypatch, make_engine, tokenizer):
    def load(settings):
        worker = EngineWorker(lambda: make_engine(["alice"]))
        worker.start()
        return worker, tokenizer

    monkeypatch.setattr("chorus.server.llm.load", load)
    assert main(["generate", "--model", str(model_dir), "--prompt", "hé"]) == 0
    assert capsys.readouterr().out == "hé\n"
    assert main(["generate", "--model", str(model_dir), "--prompt", "hello", "--adapter", "alice", "--stop", "e"]) == 0
    assert capsys.readouterr().out == "oll\n"
    assert main(["generate", "--model", str(model_dir), "--prompt", "hello", "--adapter", "eve"]) == 2
    assert "eve" in capsys.readouterr().err
    assert main(["generate", "--model", str(model_dir), "--prompt", "hi", "--chat", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out == "user\n"


def test_generate_takes_the_sampling_flags(capsys, model_dir, monkeypatch, make_engine, tokenizer):
    engine = make_engine([])

    def load(settings):
        worker = EngineWorker(lambda: engine)
        worker.start()
        return worker, tokenizer

    monkeypatch.setattr("chorus.server.llm.load", load)
    flags = "--min-p 0.1 --presence-penalty 1 --frequency-penalty -1 --repetition-penalty 1.5 --min-tokens 3 --stop l"
    command = ["generate", "--model", str(model_dir), "--prompt", "hello", "--bad-word", "no", "--bad_word", "x"]
    assert main([*command, *flags.split()]) == 0
    assert capsys.readouterr().out == "hel\n", "the first l is within min_tokens"
    params = engine.asked[0].params
    assert (params.min_p, params.presence_penalty, params.frequency_penalty) == (0.1, 1.0, -1.0)
    assert (params.repetition_penalty, params.min_tokens) == (1.5, 3)
    assert params.bad_words == (tuple(b"no"), tuple(b"x"))


def test_pull_and_serve_by_name(capsys, tmp_path, monkeypatch, model_dir):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "--model", "smollm2"]) == 1
    error = capsys.readouterr().err
    assert error == "chorus: error: model smollm2 has not been fetched yet; run: chorus pull smollm2\n"
    pulled = tmp_path / "chorus" / "models" / "smollm2"
    pulled.parent.mkdir(parents=True)
    model_dir.rename(pulled)
    assert main(["pull", "smollm2"]) == 0
    assert capsys.readouterr().out == f"smollm2 is already in {pulled}\n"
    settings = parse("--model", "smollm2")
    assert settings.model == pulled and settings.base_name == "smollm2" and settings.adapters is None


def test_adapter_roots_must_be_there(capsys, model_dir, tmp_path):
    assert main(["serve", "--model", str(model_dir), "--adapter-roots", f"{tmp_path}:/nowhere/else"]) == 1
    assert "/nowhere/else" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["model", "model:alice"])
def test_an_adapter_named_like_the_base_is_refused(model_dir, monkeypatch, make_engine, tokenizer, name):
    """A request for `model:alice` means the adapter `alice`."""

    def load(settings):
        worker = EngineWorker(lambda: make_engine([name]))
        worker.start()
        return worker, tokenizer

    monkeypatch.setattr(launch, "load", load)
    with pytest.raises(launch.LaunchError, match="served-model-name"):
        launch.build_app(Settings(model=model_dir))
    assert launch.build_app(Settings(model=model_dir, served_model_name="other"))


def test_help_needs_no_torch():
    code = "import sys; from chorus.server.cli import command; command.make_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.slow
def test_a_reader_that_has_read_enough_ends_the_command_without_a_trace():
    """As in `chorus adapters list | head -1`."""
    code = "from chorus.server.cli.command import run; run()"
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-c", code, "doctor"], stdout=writer, stderr=subprocess.PIPE, timeout=120, check=False
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_packages_add_commands_by_entry_point(monkeypatch, capsys):
    """The server may not import `perf`, whose command it runs all the same."""
    entry = EntryPoint("simulate", "chorus.perf.simulate.command", cli.COMMANDS)
    monkeypatch.setattr(cli, "entry_points", lambda group: [entry] if group == entry.group else [])
    assert cli.main(["simulate", "--list"]) == 0
    assert "fairness" in capsys.readouterr().out


def test_every_declared_command_can_be_loaded():
    project = tomllib.loads((Path(cli.__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    for name, module in project["entry-points"][cli.COMMANDS].items():
        command = EntryPoint(name, module, cli.COMMANDS).load()
        assert command.HELP
        assert callable(command.run)


def test_the_readmes_example_prints_what_it_says(capsys):
    assert main(["generate", "--adapter", "reverse", "--prompt", "hello", "--threads", "1"]) == 0
    assert capsys.readouterr().out.strip() == "olleh"


@pytest.mark.parametrize(
    ("flags", "api_servers"),
    [
        ([], None),
        (["--engine-process", "off"], None),
        (["--engine-process", "on"], 1),
        (["--api-servers", "3"], 3),
        (["--engine-process", "on", "--api-servers", "2"], 2),
        (["--device", "cuda"], 1),
        (["--device", "cuda", "--engine-process", "off"], None),
        (["--device", "cuda", "--kv-events-endpoint", "tcp://127.0.0.1:5557"], None),
    ],
)
def test_an_engine_in_a_process_of_its_own_is_a_cluster_of_one(monkeypatch, model_dir, flags, api_servers):
    asked = []
    monkeypatch.setattr("chorus.server.start.launch.serve", lambda settings: asked.append(None) or 0)
    monkeypatch.setattr("chorus.server.cluster.up.up", lambda plan, settings, given: asked.append((plan, given)) or 0)
    assert main(["serve", "--model", str(model_dir), *flags]) == 0
    (found,) = asked
    if api_servers is None:
        assert found is None
    else:
        plan, given = found
        assert (plan.replicas, plan.api_servers, plan.registry, given["model"]) == (
            1,
            api_servers,
            None,
            str(model_dir),
        )


@pytest.mark.parametrize(("driver", "visible", "found"), [(True, None, True), (True, "", False), (False, None, False)])
def test_a_gpu_is_looked_for_where_the_driver_shows_one(monkeypatch, tmp_path, driver, visible, found):
    monkeypatch.setattr(choice, "DRIVER", tmp_path if driver else tmp_path / "none")
    monkeypatch.setattr(choice, "find_spec", lambda name: name)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choice.may_use_gpu("auto") == found and choice.may_use_gpu("cuda:1") and not choice.may_use_gpu("cpu")


def test_several_fronts_share_no_process_with_the_engine(capsys, model_dir):
    assert main(["serve", "--model", str(model_dir), "--api-servers", "2", "--engine-process", "off"]) == 2
    assert "--api-servers 2 needs an engine in a process of its own" in capsys.readouterr().err
