"""Flags of other servers are accepted, or refused with an alternative."""

import re
import subprocess
from pathlib import Path

import pytest

from chorus.core.requests.request_params import InvalidRequest
from chorus.server.cli.command import main, make_parser
from chorus.server.library.options import settings_of
from chorus.server.start.advice import INSTEAD, NEUTRAL, NOTED, SHORT, WITH_VALUE, ForeignFlag, without_foreign_flags
from chorus.server.start.flags import UsageError, read_settings


def parsed(*args):
    return make_parser().parse(["serve", *args])


def test_flags_that_change_nothing_are_noted():
    arguments = parsed(
        "--enable-lora", "--max-loras", "4", "M", "--max_cpu_loras=8", "--port", "9", "-pp", "1", "-tp", "2"
    )
    assert (arguments.model_argument, arguments.setting_port, arguments.setting_tensor_parallel_size) == ("M", "9", "2")
    told = arguments.notes
    assert [line.split()[2] for line in told] == [
        "--enable-lora",
        "--max-loras",
        "--max-cpu-loras",
        "--pipeline-parallel-size",
    ]
    assert "--max-adapters-per-step" in told[1]


@pytest.mark.parametrize("flag", INSTEAD)
def test_flags_that_cannot_be_obeyed_are_refused_by_name(flag):
    for given in ([flag, "2"], [f"{flag}=2"], [flag]):
        with pytest.raises(ForeignFlag) as caught:
            without_foreign_flags(["serve", *given])
        assert str(caught.value) == f"{flag} is no flag of chorus; {INSTEAD[flag]}"


def test_advice_tells_of_what_is_served_now():
    assert "docs/how-to/embeddings.md" in INSTEAD["--task"], "every model embeds, classifies and scores"
    assert "--tensor-parallel-size" in INSTEAD["--pipeline-parallel-size"], "a model may lie on several devices"
    assert "--engine-process off" in NOTED["--disable-frontend-multiprocessing"], "on a GPU the engine has a process"


def test_short_flags_and_other_commands():
    with pytest.raises(UsageError, match="--pipeline-parallel-size is no flag"):
        parsed("-pp", "2")
    with pytest.raises(UsageError, match="unrecognized arguments: --enable-lora"):
        make_parser().parse(["doctor", "--enable-lora"])


def test_the_table_holds_no_flag_of_our_own_and_names_only_such(capsys):
    with pytest.raises(SystemExit):
        parsed("--help-all")
    help_text = capsys.readouterr().out
    own = {word.strip("[],") for word in help_text.split() if word.startswith(("--", "[--"))}
    assert not own & (NOTED.keys() | INSTEAD.keys()) and not NOTED.keys() & INSTEAD.keys()
    assert NOTED.keys() | INSTEAD.keys() >= WITH_VALUE | NEUTRAL.keys() | set(SHORT.values()) - own
    named = {
        word.strip("`,;.")
        for text in (*NOTED.values(), *INSTEAD.values())
        for word in text.split()
        if word.strip("`").startswith("--")
    }
    assert named <= own | {"--replicas", "--ray"}, named - own


def test_help_shows_the_model_and_the_address_first(capsys):
    with pytest.raises(SystemExit):
        parsed("--help-all")
    text = capsys.readouterr().out
    titles = ["what is served, and where:", "access:", "the engine:", "limits of a request:", "the server:"]
    places = [text.index(title) for title in titles]
    assert places == sorted(places) and text.startswith(
        "usage: chorus serve [MODEL] [--host HOST] [--port PORT] [flags]"
    )
    first = text[places[0] : places[1]]
    assert first.index("--model") < first.index("--host") < first.index("--port") < first.index("--adapters")


def test_help_is_one_screen_and_help_all_is_the_rest(capsys):
    for command in (["serve"], ["generate"], ["cluster", "up"], ["batch"], ["demo"], ["profile"]):
        with pytest.raises(SystemExit):
            make_parser().parse([*command, "--help"])
        text = capsys.readouterr().out
        assert text.startswith(f"usage: chorus {' '.join(command)}") and "--help-all" in text
        assert len(text.splitlines()) <= 48 and max(map(len, text.splitlines())) <= 100
        with pytest.raises(SystemExit):
            make_parser().parse([*command, "--help-all"])
        assert len(capsys.readouterr().out.splitlines()) > 100


def test_help_of_serve_fits_a_terminal_and_has_examples(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 24 and "examples:" in lines
    assert sum(line.startswith("  --") for line in lines) == 11, "ten that matter, and --help-all"
    assert sum(line.startswith("  chorus serve") for line in lines) == 3
    for example in (line.split("  ")[1] for line in lines if line.startswith("  chorus serve")):
        make_parser().parse(example.split()[1:])


@pytest.mark.parametrize(
    "flag",
    [
        "--hf-overrides",
        "--rope-scaling",
        "--download-dir",
        "--response-role",
        "--middleware",
        "--default-chat-template-kwargs",
        "--log-config",
        "--task",
    ],
)
def test_flags_of_vllm_have_advice(flag):
    with pytest.raises(UsageError, match=f"{flag} is no flag of chorus; "):
        parsed(flag, "x")


def test_values_that_ask_for_nothing_are_taken():
    for flag, values in NEUTRAL.items():
        for value in values:
            _, notes = without_foreign_flags(["serve", flag, value])
            assert len(notes) == 1
    kept, notes = without_foreign_flags(["serve", "--load-format", "safetensors", "--load-format=auto", "M"])
    assert kept == ["serve", "--load-format=auto", "M"] and len(notes) == 1


def test_all_errors_of_a_command_line_are_told_at_once():
    with pytest.raises(UsageError) as caught:
        parsed("M", "--mem-fraction-static", "0.8", "--lora-target-modules", "q_proj", "v_proj", "--uds", "/s",
               "--max-num-seq", "3", "--port", "many", "--dtype", "int3")  # fmt: skip
    told = str(caught.value).splitlines()
    assert len(told) == 6, told
    for line, said in zip(
        told,
        ("--mem-fraction-static is no flag", "--lora-target-modules is", "--uds is", "did you mean --max-num-seqs?",
         "--port is 'many'", "--dtype"),
        strict=False,
    ):  # fmt: skip
        assert any(said in one for one in told), (said, line)
    with pytest.raises(UsageError) as caught:
        read_settings(parsed("--port", "many", "--dtype", "int3"))
    assert len(str(caught.value).splitlines()) == 2


def test_names_of_sglang_are_taken():
    arguments = parsed("--model-path", "M", "--tp", "2", "--context-length=99", "--lora-paths", "a=/x", "b=/y")
    assert (arguments.setting_model, arguments.setting_tensor_parallel_size) == ("M", "2")
    assert arguments.setting_max_model_len == "99" and len(arguments.setting_lora_modules) == 2
    with pytest.raises(UsageError, match="--data-parallel-size is no flag of chorus; use `chorus cluster up"):
        parsed("--dp", "2")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("enable_prefix_caching", "use prefix_cache"),
        ("tp_size", "use tensor_parallel_size"),
        ("block_size", "use block_tokens"),
        ("mem_fraction_static", "use gpu_memory_utilization"),
        ("max_cpu_loras", "use host_cache_bytes"),
        ("num_gpu_blocks_override", "use num_pages"),
        ("tokenizer_mode", "the model's fast tokenizer is used: leave it out"),
        ("speculative_config", "use speculation"),
    ],
)
def test_options_of_other_libraries_are_answered_by_the_right_one(name, said):
    with pytest.raises(InvalidRequest, match=f"LLM has no option '{name}'; ") as caught:
        settings_of({name: 1})
    assert said in str(caught.value) and "--" not in str(caught.value)


def test_old_names_of_flags_are_accepted_with_a_note():
    for flag in ("--fronts", "--api-server-count", "--api-servers"):
        kept, notes = without_foreign_flags(["serve", flag, "3"])
        assert kept == ["serve", flag, "3"] and parsed(flag, "3").api_servers == 3
        assert notes == (["--fronts is now --api-servers"] if flag == "--fronts" else [])


def test_pages_that_advice_names_exist():
    root = Path(__file__).parents[3]
    pages = {page for text in (*NOTED.values(), *INSTEAD.values()) for page in re.findall(r"docs/[a-z/-]+\.md", text)}
    assert pages and all((root / page).is_file() for page in pages), pages


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_flags(capsys, shell):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "max-model-len" in script and "adapters" in script and "engine-process" in script


def test_bash_completes_what_is_begun(capsys):
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    ask = 'COMP_WORDS=(chorus serve --max-mod); COMP_CWORD=2; _shtab_chorus; echo "${COMPREPLY[@]}"'
    told = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.split() == ["--max-model-len"], told.stderr


@pytest.mark.parametrize(
    ("given", "setting", "value"),
    [
        (["--no-enable-prefix-caching"], "prefix_cache", False),
        (["--no-enable-chunked-prefill"], "chunked_prefill", False),
        (["--model-id", "M"], "model", "M"),
        (["--hostname=::1"], "host", "::1"),
        (["-c", "4096"], "max_model_len", "4096"),
        (["--ctx-size=4096"], "max_model_len", "4096"),
        (["-np", "4"], "max_num_seqs", "4"),
        (["--quantize", "int8"], "quantization", "int8"),
    ],
)
def test_flags_of_other_servers_with_one_of_ours_are_taken(given, setting, value):
    arguments = parsed(*given)
    assert getattr(arguments, f"setting_{setting}") == value


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--adapter-id", "org/a"], "--adapter-id is no flag of chorus; adapters are named by each request"),
        (["--max-input-length", "1024"], "use --max-model-len"),
        (["-ngl", "99"], "--n-gpu-layers is no flag of chorus; leave it out"),
        (["--lora", "a.gguf"], "use --lora-modules NAME=DIR"),
        (["--mmproj", "x.gguf"], "vision tower"),
    ],
)
def test_flags_of_lorax_and_llama_cpp_have_advice(given, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        parsed("M", *given)


def test_flags_of_lorax_and_llama_cpp_that_change_nothing_are_noted():
    arguments = parsed("M", "--max-active-adapters", "8", "--jinja", "--cont-batching", "--waiting-served-ratio=1.2")
    assert len(arguments.notes) == 4 and "--max-adapters-per-step" in arguments.notes[0]
