"""Names and versions of adapters."""

from types import SimpleNamespace

import pytest

from chorus.memory.adapters.versions import VersionNames, full_name, split_version


def put(names, name, label, keep=1):
    return [one.label for one in names.put(name, SimpleNamespace(label=label), keep)]


def label_of(names, name):
    found = names.find(name)
    assert found is not None
    return found.label


@pytest.mark.parametrize(
    ("name", "parts"),
    [("a", ("a", "")), ("a@1", ("a", "1")), ("a@b@1", ("a@b", "1")), ("@1", ("@1", "")), ("a@", ("a@", ""))],
)
def test_a_version_is_behind_the_last_mark(name, parts):
    assert split_version(name) == parts


def test_the_newest_versions_are_kept():
    names = VersionNames()
    assert put(names, "a", "1", 3) == put(names, "a", "2", 3) == put(names, "a", "3", 3) == []
    assert list(names) == ["a", "a@1", "a@2"] and names.kept("a") == ["a@1", "a@2"]
    assert [label_of(names, one) for one in ("a", "a@3", "a@2", "a@1")] == ["3", "3", "2", "1"]
    assert put(names, "a", "4", 3) == ["1"] and put(names, "a", "5", 1) == ["4", "2", "3"]
    assert list(names) == ["a"] and names.find("a@4") is None and names.find("b") is None


def test_a_name_with_a_mark_that_is_no_version_stays():
    names = VersionNames()
    put(names, "a@b", "1")
    put(names, "a", "2", 2)
    assert put(names, "a", "3", 1) == ["2"] and label_of(names, "a@b") == "1"
    put(names, "c@x", "x", None)
    put(names, "c", "y", None)
    assert names.kept("c") == ["c@x"] and put(names, "c", "z", None) == ["y"] and "c@x" in names
    assert names.find("c@x@x") is None, "a version of its own has no versions"
    assert names.pop("c@x").label == "x" and names.kept("c") == []


def test_a_version_is_named_once():
    assert full_name("a", "1") == full_name("a@1", "1") == "a@1" and full_name("a@1", "2") == "a@1@2"
