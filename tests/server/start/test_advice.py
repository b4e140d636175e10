"""Flags of other servers are taken, or refused with what to do instead."""

import pytest

from chorus.server.cli.command import make_parser
from chorus.server.start.advice import INSTEAD, NEUTRAL, NOTED, SHORT, WITH_VALUE, ForeignFlag, without_foreign_flags
from chorus.server.start.flags import UsageError


def parsed(*args):
    return make_parser().parse(["serve", *args])


def test_flags_that_change_nothing_are_noted(capsys):
    arguments = parsed(
        "--enable-lora", "--max-loras", "4", "M", "--max_cpu_loras=8", "--port", "9", "-pp", "1", "-tp", "2"
    )
    assert (arguments.model_argument, arguments.setting_port, arguments.setting_tensor_parallel_size) == ("M", "9", "2")
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in told] == [
        "--enable-lora", "--max-loras", "--max-cpu-loras", "--pipeline-parallel-size",
    ]  # fmt: skip
    assert "--max-adapters-per-step" in told[1]


@pytest.mark.parametrize("flag", INSTEAD)
def test_flags_that_cannot_be_obeyed_are_refused_by_name(flag):
    for given in ([flag, "2"], [f"{flag}=2"], [flag]):
        with pytest.raises(ForeignFlag) as caught:
            without_foreign_flags(["serve", *given])
        assert str(caught.value) == f"{flag} is no flag of chorus; {INSTEAD[flag]}"


def test_short_flags_and_other_commands():
    with pytest.raises(UsageError, match="--pipeline-parallel-size is no flag"):
        parsed("-pp", "2")
    with pytest.raises(UsageError, match="unrecognized arguments: --enable-lora"):
        make_parser().parse(["doctor", "--enable-lora"])


def test_the_table_holds_no_flag_of_our_own_and_names_only_such(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    help_text = capsys.readouterr().out
    own = {word.strip("[],") for word in help_text.split() if word.startswith(("--", "[--"))}
    assert not own & (NOTED.keys() | INSTEAD.keys()) and not NOTED.keys() & INSTEAD.keys()
    assert NOTED.keys() | INSTEAD.keys() >= WITH_VALUE | NEUTRAL.keys() | set(SHORT.values()) - own
    named = {
        word.strip("`,;.") for text in (*NOTED.values(), *INSTEAD.values()) for word in text.split()
        if word.strip("`").startswith("--")
    }  # fmt: skip
    assert named <= own | {"--replicas"}, named - own


def test_help_shows_the_model_and_the_address_first(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    text = capsys.readouterr().out
    titles = ["what is served, and where:", "access:", "the engine:", "limits of a request:", "the server:"]
    places = [text.index(title) for title in titles]
    assert places == sorted(places) and text.startswith(
        "usage: chorus serve [MODEL] [--host HOST] [--port PORT] [flags]"
    )
    first = text[places[0] : places[1]]
    assert first.index("--model") < first.index("--host") < first.index("--port") < first.index("--adapters")
