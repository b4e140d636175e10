"""`chorus profile`: its measurements are printed and can be loaded; wrong arguments are reported."""

from __future__ import annotations

import pytest

from chorus.core.costs.profile import FitReport, load_profile
from chorus.server.cli.command import main
from chorus.server.cli.profile import table


@pytest.mark.wide
def test_profile_of_the_builtin_model(tmp_path, capsys):
    output = tmp_path / "mine.json"
    flags = ["--batches", "16", "--rounds", "1", "--threads", "1", "--max-num-seqs", "4", "--output", str(output)]
    assert main(["profile", *flags]) == 0
    printed = capsys.readouterr().out
    profile = load_profile(output)
    assert profile.step.fit.samples == 56
    assert f"R² {profile.step.fit.r2:.4f}" in printed
    assert f"R² of decode steps {profile.step.fit.decode_r2:.4f}" in printed
    assert "56 samples" in printed
    assert "per_adapter_rank" in printed
    assert "noise" in printed
    assert str(output) in printed
    assert "max_num_seqs 4" in profile.source


def test_a_weak_fit_is_called_weak():
    profile = load_profile("a100-llama2-7b")
    assert "weak" not in table(profile)
    for r2, decode_r2, marked in ((0.94, None, True), (0.99, 0.94, True), (0.99, 0.99, False)):
        fit = FitReport(r2=r2, decode_r2=decode_r2, mean_error=0.2, samples=200)
        printed = table(profile.model_copy(update={"step": profile.step.model_copy(update={"fit": fit})}))
        assert f"R² {r2:.4f}   mean error 20.0%   200 samples" in printed
        assert ("(weak)" in printed) is marked


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--batches", "0"], 2, "--batches: 0 is below 1"),
        (["--output", "nowhere/profile.json"], 1, "there is no directory nowhere"),
        (["--model", "nowhere"], 1, "nowhere is neither a directory nor a known model"),
    ],
)
def test_what_is_asked_wrongly(flags, code, message, capsys):
    assert main(["profile", *flags]) == code
    assert message in capsys.readouterr().err


def test_a_model_without_adapters_cannot_be_profiled(subject, capsys, monkeypatch):
    monkeypatch.delenv("CHORUS_ADAPTERS", raising=False)
    assert main(["profile", "--model", str(subject("gqa").model)]) == 1
    assert "no adapters to measure with" in capsys.readouterr().err
