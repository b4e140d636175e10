"""What cutting a prompt changes: nothing in the native decoder, and little by PyTorch's operators."""

from __future__ import annotations

import json

import pytest

from chorus.perf.bench.chunk_difference import main
from chorus.perf.bench.models.sizes import TINY

FLAGS = ["--model-size", TINY, "--layers", "2", "--families", "deepseek-v3", "--tokens", "200", "--chunk", "100"]


@pytest.mark.native
@pytest.mark.wide
def test_the_native_decoder_has_no_difference(capsys):
    assert main(FLAGS) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    by_kernels = {row["kernels"]: row for row in rows}
    assert by_kernels["native"]["most"] == 0.0 and by_kernels["native"]["tokens"] == 199
    assert by_kernels["torch"]["tokens"] == 199
    assert by_kernels["torch"]["most"] < 0.5, "on some processors none, with so small a model"
