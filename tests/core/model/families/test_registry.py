"""The list of families is what the modules of their folder have."""

from __future__ import annotations

from collections import Counter

from chorus.core.model.families.jetmoe.family import JETMOE
from chorus.core.model.families.mistral import MISTRAL, MISTRAL_PART
from chorus.core.model.families.registry import ALL, FAMILIES, OF_TYPES
from chorus.core.model.families.seeing_texts import LLAMA_3_2_VISION_TEXT


def test_each_architecture_and_type_has_one_family():
    for table, of in ((FAMILIES, "architectures"), (OF_TYPES, "model_types")):
        named = Counter(name for family in ALL for name in getattr(family, of))
        assert named == Counter(table.keys())


def test_families_of_modules_and_folders_are_there_once():
    assert ALL.count(MISTRAL) == ALL.count(JETMOE) == ALL.count(LLAMA_3_2_VISION_TEXT) == 1
    assert len(ALL) >= 201


def test_parts_of_others_are_not_there():
    assert MISTRAL_PART not in ALL and all(family.architectures for family in ALL)


def test_titles_are_in_order():
    titles = [family.title.casefold() for family in ALL]
    assert titles == sorted(titles)
