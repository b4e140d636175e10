"""The source of an adapter by its name, and the limits of names."""

import pytest

from chorus.server.stores.rules import Location, Rule, Rules


@pytest.mark.parametrize(
    ("rule", "name", "url"),
    [
        ("acme/*=https://a.example/x/*.tar.gz", "acme/one", "https://a.example/x/one.tar.gz"),
        ("acme/*=https://a.example/x/*.tar.gz", "acme/one/two", "https://a.example/x/one/two.tar.gz"),
        ("hf/*=hf://*", "hf/org/repo@v1.0", "hf://org/repo@v1.0"),
        ("*=/data/*", "one", "/data/one"),
        ("*-lora=s3://bucket/*/v1", "legal-lora", "s3://bucket/legal/v1"),
        ("legal=https://a.example/legal", "legal", "https://a.example/legal"),
    ],
)
def test_a_name_says_where_its_files_are(rule, name, url):
    assert Rule.parse(rule).find(name) == Location(url)


@pytest.mark.parametrize(
    "name",
    [
        "acme/",
        "acme/../x",
        "acme/x/../../y",
        "acme/.x",
        "acme//x",
        "acme/x?y",
        "acme/x#y",
        "acme/x%2e",
        "acme/x y",
        "acme/@evil",
        "acme/a\\b",
        "acme/é",
        "other/x",
        "\0",
        "acme/x@a@b",
        "acme/x/",
    ],
)
def test_other_names_are_nowhere(name):
    assert Rule.parse("acme/*=https://a.example/*").find(name) is None


def test_the_first_rule_that_fits_counts_and_a_checksum_is_kept():
    digest = "AB" * 32
    rules = Rules(map(Rule.parse, [f"a/x=https://a.example/x.zip#sha256={digest}", "a/*=/data/*"]))
    assert rules.find("a/x") == (0, Location("https://a.example/x.zip", digest.lower()))
    assert rules.find("a/y") == (1, Location("/data/y"))
    assert rules.find("b") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a=",
        "=b",
        "a/*=/data/x",
        "a=/data/*",
        "a/*/*=/data/*/*",
        "a/*=data/*",
        "a/*=ftp://h/*",
        "a/*=file:///*",
        "a/*=https://*/x",
        "a/*=https://user@host/*",
        "a/*=https://h/*#sha256=12",
        "a/*=s3://*",
    ],
)
def test_what_is_no_rule_is_refused(text):
    with pytest.raises(ValueError, match=r"source"):
        Rule.parse(text)
