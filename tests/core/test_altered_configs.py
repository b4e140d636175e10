"""A `config.json` with one field altered is computed as transformers computes it, or refused by that field's name."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from ..conftest import quiet
from ..kept import kept_files
from . import test_text_parts as text_parts
from .altered_configs import LINEAR, MISSING, OLD_LINEAR, YARN_SCALING, Alteration, Checkpoint
from .tiny_families import EVERY, save_family

pytestmark = pytest.mark.native(needed=False)

WITH_IMAGES = {**text_parts.MODELS, **text_parts.RENAMED}
CHECKPOINTS = [*EVERY, *WITH_IMAGES]

#: Alterations of a family that a run without slow tests compares.
SAMPLE = 8


@cache
def checkpoint(name: str, *, is_scaled: bool = False) -> Checkpoint:
    root = kept_files(f"altered {name}", lambda root: _save(name, root / "model"))
    return Checkpoint(root / "model", name if name in WITH_IMAGES else None, is_scaled)


@quiet()
def _save(name: str, path: Path) -> None:
    if name in WITH_IMAGES:
        text_parts.save_whole(name, *WITH_IMAGES[name], path)
    else:
        save_family(name, path)


@pytest.mark.wide
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_some_alterations_are_computed_as_by_transformers_or_refused(family):
    one = checkpoint(family)
    some = random.Random(family).sample(one.alterations, SAMPLE)
    assert not [fault for each in some if (fault := one.fault(each))]


@pytest.mark.wide
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_alterations_of_scaled_ropes_are_computed_as_by_transformers_or_refused(family):
    """Fields beside a rope of the default type often have no effect."""
    one = checkpoint(family, is_scaled=True)
    if one.has_ropes:
        some = one.rope_alterations
        some = random.Random(family).sample(some, min(SAMPLE, len(some)))
        some += [each for each in one.rope_alterations if each.path[-1] == "original_max_position_embeddings"]
        assert not [fault for each in some if (fault := one.fault(each))]


#: Ropes as files had them before `rope_parameters`.
OLDER = [
    {"rope_theta": 300.0},
    {"rope_theta": 300.0, "rope_scaling": OLD_LINEAR},
    {"rope_theta": 300.0, "rope_scaling": LINEAR},
    {"rope_theta": 300.0, "rope_scaling": {**YARN_SCALING, "type": "linear"}},
    {"rope_scaling": OLD_LINEAR},
    {"rope_theta": 300.0, "partial_rotary_factor": 0.5},
    {"rope_theta": 300.0, "partial_rotary_factor": 0.5, "rope_scaling": LINEAR},
    {"rope_theta": 300.0, "original_max_position_embeddings": 32, "rope_scaling": {"type": "yarn", "factor": 4.0}},
]


@pytest.mark.wide
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_older_forms_of_ropes_are_computed_as_by_transformers_or_refused(family):
    one, faults = checkpoint(family), []
    text = one.raw[one.part[0]] if one.part else one.raw
    if not text.get("rope_parameters"):
        return
    for values in OLDER:
        raw = Alteration((*one.part, "rope_parameters"), MISSING).of(one.raw)
        for name, value in values.items():
            raw = Alteration((*one.part, name), value).of(raw)
        ours = one.ours(raw)
        if ours.logits is None or ours.equals(want := one.reference(raw)):
            continue
        if "'NoneType'" not in want.why:  # transformers derives no head_dim then
            faults.append(f"{values}: {want.why or 'other logits'}")
    assert not faults


_TYPES = ["full_attention", "sliding_attention", "full_attention"]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "values"),
    [
        *((family, {"sliding_window": 8, "layer_types": _TYPES[:2]}) for family in ("mistral", "ministral-3")),
        ("LlavaForConditionalGeneration", {"sliding_window": 8, "layer_types": _TYPES}),
        ("Mistral3ForConditionalGeneration", {"sliding_window": 8, "layer_types": _TYPES}),
        ("ministral", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    ],
    ids=str,
)
def test_fields_that_act_together_are_computed_as_by_transformers_or_refused(family, values):
    """`layer_types` of Mistral's text parts and of Ministral 3 have no effect, unlike those of Mistral alone."""
    one = checkpoint(family)
    raw = one.raw
    for name, value in values.items():
        raw = Alteration((*one.part, name), value).of(raw)
    ours = one.ours(raw)
    assert ours.logits is None or ours.equals(one.reference(raw))


@pytest.mark.slow
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_every_alteration_is_computed_as_by_transformers_or_refused(family):
    one = checkpoint(family)
    assert not [fault for each in one.alterations if (fault := one.fault(each))]
