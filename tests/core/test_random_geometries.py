"""The fields that random geometries have are valid, and are no other geometry's."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest

from chorus.core.model.read_config import read_model_config

from .random_geometries import DRAWS
from .tiny_families import EVERY, save_config

pytestmark = pytest.mark.wide

COUNT = 8


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_drawn_is_read(tmp_path, name):
    rng, own = random.Random(name), deepcopy(EVERY[name])
    for number in range(COUNT):
        path = tmp_path / str(number)
        save_config(name, path, DRAWS[name](rng))
        assert read_model_config(path).num_layers > 0
    assert EVERY[name] == own, "a geometry is made of the family's fields, and leaves them as they are"
