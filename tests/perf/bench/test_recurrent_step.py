"""The benchmark of recurrent steps counts what a state's bytes are, and says whether the bar is met."""

from __future__ import annotations

import json

import pytest
import torch

from chorus.ops.library import native_library
from chorus.perf.bench import recurrent_step
from chorus.perf.bench.recurrent_step import Case, main

pytestmark = pytest.mark.skipif(not native_library.available(torch.float32), reason="the native library is not built")

FLAGS = ["--sizes", "0.8b", "--sequences", "1", "--threads", "1", "--rounds", "1", "--memory", str(1 << 20)]


def test_states_are_counted_as_read_and_written():
    assert Case("9b", 3).bytes_moved == 2 * 3 * 32 * 128 * 128 * 4


@pytest.mark.parametrize(("rate", "code"), [(1.0, 0), (1e15, 1)])
def test_the_share_of_the_memorys_rate_is_judged(monkeypatch, capsys, rate, code):
    monkeypatch.setattr(recurrent_step, "read_rate", lambda *_: rate)
    assert main(FLAGS) == code
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["met"] is (code == 0)
    assert result["shares"]["0.8b, 1"] > 0


def test_the_limit_is_measured(capsys):
    main(FLAGS)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["level"] == native_library.level()
