"""The table of paths: every subject is served in every way, and gets the tokens of transformers + peft."""

from __future__ import annotations

import pytest
import torch

from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.requests.types import CannotMerge
from chorus.ops.library import native_library

from ..conftest import KERNELS
from ..tiny_families import EVERY
from .adapter_rows import ADAPTER_ROWS
from .asked import check_variety
from .family_rows import FAMILY_ROWS
from .path import RANKS, TORCH_BITS, Cell
from .paths import PATHS
from .subjects import SUBJECTS
from .weight_rows import WEIGHT_ROWS

CELLS = [
    (subject.name, path.name, kernels)
    for subject in SUBJECTS.values()
    for path in PATHS.values()
    for kernels in KERNELS
    if path.runs(subject, kernels)
]


@pytest.mark.wide(each=("subject", "path"))
@pytest.mark.parametrize(("subject", "path", "kernels"), CELLS)
def test_tokens_are_those_of_transformers_and_peft(request, subject, path, kernels):
    it, way = SUBJECTS[subject], PATHS[path]
    if RANKS in way.needs and (reason := native_library.why_unavailable(torch.float32)):
        pytest.skip(f"no native library: {reason}")
    cell = Cell(it, kernels, request.getfixturevalue)
    if (why := it.why_refused(way.needs)) is None:
        way.serve(cell)
    else:
        with pytest.raises((UnsupportedModel, CannotMerge), match=why):
            way.serve(cell)


def test_rows_speak_of_what_paths_need():
    """A reason by another name would be of no path, and the cell would run or end otherwise than the row says."""
    needs = {need for path in PATHS.values() for need in path.needs}
    assert {key for row in SUBJECTS.values() for key in (*row.refused, *row.untold)} <= {*needs, TORCH_BITS}
    assert len(SUBJECTS) == len(FAMILY_ROWS) + len(ADAPTER_ROWS) + len(WEIGHT_ROWS), "two rows of one name"
    assert {row.name for row in FAMILY_ROWS} == {*EVERY}


@pytest.mark.slow
@pytest.mark.parametrize("subject", [row.name for row in FAMILY_ROWS])
def test_comparisons_mean_something(subject):
    """Answers vary, and every adapter changes them."""
    check_variety(SUBJECTS[subject].it)
