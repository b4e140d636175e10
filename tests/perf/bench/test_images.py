"""The benchmark of images, of a tiny model for a moment."""

from __future__ import annotations

import json

import pytest

from chorus.perf.bench.images import main
from tests.core.media.tiny_vision import needs_vision

pytestmark = [pytest.mark.vision, needs_vision]

FLAGS = ["--model-size", "tiny", "--threads", "1", "--rounds", "1", "--seconds", "0.3", "--images", "3000"]


def test_each_bar_has_its_ratio(tmp_path, capsys):
    main([*FLAGS, "--memory-mib", "16", "--output-tokens", "8", "--work-dir", str(tmp_path)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["ratios"].keys() == {"encoding", "adapters"} and min(found["ratios"].values()) > 0
    assert found["text"].keys() == found["longest"].keys() == {"first", "alone", "images", "requests"}
    assert found["text"]["alone"] == 1 and min(found["longest"].values()) >= 1
    assert found["images"]["alone"] == 0 < min(found["images"][kind] for kind in ("images", "requests"))
    assert found["again"] == 0, "the second use of an image costs no encoding"
