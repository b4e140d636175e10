"""The measurement of a trainer's pushes, with a small adapter."""

from __future__ import annotations

import json
import sys

import pytest

from chorus.perf.bench.push import WAYS, main, versions


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_each_way_of_a_push_is_measured(capsys, tmp_path):
    asked = ["--model-size", "tiny", "--rank", "4", "--pushes", "1", "--memory", "16MiB", "--work-dir", str(tmp_path)]
    code = main(asked)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code in (0, 1), "whether it meets its goals depends on the machine"
    assert {*found["seconds"]} == {*WAYS}
    assert all(seconds > 0 for each in found["seconds"].values() for seconds in each) and found["floor"] > 0


def test_versions_differ_in_a_byte():
    made = [each for each, _ in zip(versions(b"weights!"), range(4), strict=False)]
    assert len({*made}) == 4 and all(len(each) == 8 for each in made)
