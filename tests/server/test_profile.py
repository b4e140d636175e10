"""`chorus profile`: what it measures is printed and can be loaded; what is asked wrongly is told."""

from __future__ import annotations

import pytest

from chorus.core.costs.profile import FitReport, load_profile
from chorus.server.cli import main
from chorus.server.profile import table


def test_profile_of_the_builtin_model(tmp_path, capsys):
    output = tmp_path / "mine.json"
    flags = ["--batches", "16", "--rounds", "1", "--threads", "1", "--max-num-seqs", "4", "--output", str(output)]
    assert main(["profile", *flags]) == 0
    printed = capsys.readouterr().out
    profile = load_profile(output)
    assert profile.decode.fit.samples == 16
    assert f"R² {profile.decode.fit.r2:.4f}" in printed
    assert "16 samples" in printed
    assert "per_adapter_rank" in printed
    assert "noise" in printed
    assert str(output) in printed
    assert "max_num_seqs 4" in profile.source


def test_a_weak_fit_is_called_weak():
    profile = load_profile("a100-llama2-7b")
    assert "weak" not in table(profile)
    weak = profile.decode.model_copy(update={"fit": FitReport(r2=0.94, mean_error=0.2, samples=200)})
    assert "R² 0.9400   mean error 20.0%   200 samples   (weak)" in table(profile.model_copy(update={"decode": weak}))


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--batches", "0"], 2, "--batches: 0 is below 1"),
        (["--output", "nowhere/profile.json"], 1, "there is no directory nowhere"),
        (["--model", "nowhere"], 1, "there is no model directory nowhere"),
        (["--batches", "3", "--rounds", "1", "--threads", "1"], 1, "3 samples can't determine 7 terms"),
    ],
)
def test_what_is_asked_wrongly(flags, code, message, capsys):
    assert main(["profile", *flags]) == code
    assert message in capsys.readouterr().err


def test_a_model_without_adapters_cannot_be_profiled(subject, capsys, monkeypatch):
    monkeypatch.delenv("CHORUS_ADAPTERS", raising=False)
    assert main(["profile", "--model", str(subject("gqa").model)]) == 1
    assert "no adapters to measure with" in capsys.readouterr().err
