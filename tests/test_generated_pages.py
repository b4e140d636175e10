"""Pages that `docs/generate.py` writes say what the program says: defaults, values as they are typed, labels."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from chorus.core.model.families.reading import ON_OPERATORS
from chorus.core.model.families.registry import ALL

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(page):
    """Cells of a page's tables, by the first name of the first cell."""
    found = {}
    for line in page.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            found[cells[0].split("`")[1]] = cells[1:]
    return found


def test_hidden_flags_are_not_in_the_command_line(generate):
    page = generate.command_line()
    assert "SUPPRESS" not in page and "--first-write-seconds" not in page


def test_defaults_that_only_the_text_tells_are_shown(generate):
    page = rows(generate.command_line())
    assert page["--adapter"][1] == "the base model" and page["--cpus"][1] == "all" and page["--top-k"][1] == "0"


def test_values_keep_their_spelling(generate):
    page = rows(generate.command_line()) | rows(generate.settings())
    assert page["--load-format"][0].startswith("auto: ")
    assert page["--listen"][0].startswith(("tcp://", "unix:"))
    assert page["--slo-tpot"][0].startswith("Most time"), "words begin with a capital letter"
    assert page["--quantization"][0].startswith("Quantise ") and page["NAME=VALUE"][0].startswith("adapters=")


def test_a_default_is_shown_though_the_text_speaks_of_defaults(generate):
    page = rows(generate.settings())
    assert page["--generation-config"][1] == "`auto`"
    assert page["--max-num-seqs"][1] == "", "the text has it, by device"
    assert page["--weights"][1] == "" and page["--override-generation-config"][1] == ""


def test_series_have_their_labels_though_no_request_runs(generate):
    page = generate.metrics()
    assert "\n* `chorus_tenant_requests_running` (`tenant`): " in page
    assert "\n* `chorus_account_standing` (`account`): " in page
    assert "\n* `chorus_merged_adapter` (`adapter`): " in page
    assert "\n* `chorus_adapter_tier` (`adapter`, `tier`): " in page


def test_the_types_of_options_are_fresh(generate):
    path = "server/library/option_types.py"
    assert (ROOT / path).read_text() == generate.WRITTEN[path](), "run make docs"


def test_notes_of_families_say_what_the_native_decoder_lacks(generate):
    """Of ranks' shares the support matrix speaks alone."""
    lacking = {title for title, lacks in generate.not_native().items() if not any("ranks" in each for each in lacks)}
    noted = {family.title for family in ALL if ON_OPERATORS in family.notes}
    assert lacking and lacking <= noted


def test_defaults_are_written_before_pages_that_read_families(generate):
    assert next(iter(generate.WRITTEN)) == "core/model/families/defaults.json"


def test_a_stale_file_is_named(generate, monkeypatch, capsys):
    monkeypatch.setattr(generate, "WRITTEN", {"server/library/option_types.py": lambda: "other"})
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().out == "server/library/option_types.py is stale\n"
