"""Rules that map the name of an unregistered adapter to the location of its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from .plugins import GROUP, plugin, schemes

_CAPTURED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)*(?:@[A-Za-z0-9_][A-Za-z0-9._-]*)?")
"""Pattern of the text for `*`: parts of a path, none of which begins with a dot, and a revision."""

_SCHEMES = ("https", "http", "hf", "s3", "gs")


@dataclass(frozen=True, slots=True)
class Location:
    """The location of an adapter's files."""

    url: str
    """A URL, or the path of a directory."""
    sha256: str | None = None
    """SHA-256 of the archive or of the weights file, if the rule gives it."""

    @property
    def scheme(self) -> str:
        """`https`, `http`, `hf`, `s3`, `gs`, or a plugin's; empty for a directory."""
        return urlsplit(self.url).scheme if "://" in self.url else ""


@dataclass(frozen=True, slots=True)
class Rule:
    """PATTERN=URL: the `*` in the URL stands for the same text as the `*` in the pattern."""

    pattern: str
    location: Location

    def find(self, name: str) -> Location | None:
        """The location of the adapter `name` by this rule; None if the rule does not match."""
        before, star, after = self.pattern.partition("*")
        if not star:
            return self.location if name == self.pattern else None
        if len(name) < len(before) + len(after) or not (name.startswith(before) and name.endswith(after)):
            return None
        captured = name[len(before) : len(name) - len(after)]
        if not _CAPTURED.fullmatch(captured):
            return None
        return Location(self.location.url.replace("*", captured), self.location.sha256)

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Raises ValueError for an invalid rule."""
        pattern, equals, url = text.partition("=")
        if not pattern or not equals or not url:
            raise ValueError(
                "a source must be given as PATTERN=URL, such as acme/*=https://adapters.acme.example/*.tar.gz"
            )
        if pattern.count("*") > 1 or url.count("*") != pattern.count("*"):
            raise ValueError("a source's pattern and its URL must have one * each, or none")
        url, _, checksum = url.partition("#")
        sha256 = checksum.removeprefix("sha256=").lower() if checksum else None
        if sha256 is not None and not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ValueError("the part after a source's # must be sha256= and 64 hexadecimal digits")
        location = Location(url, sha256)
        _check_url(location)
        return cls(pattern, location)


class Rules:
    """Rules in order; the first that matches a name applies."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = tuple(rules)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules)

    def find(self, name: str) -> tuple[int, Location] | None:
        """The rule's number and the location of the adapter `name`; None if no rule fits."""
        for number, rule in enumerate(self._rules):
            if (location := rule.find(name)) is not None:
                return number, location
        return None


def _check_url(location: Location) -> None:
    if not location.scheme:
        if not location.url.startswith("/"):
            raise ValueError("a source that is a directory must be an absolute path")
        return
    parts = urlsplit(location.url)
    is_plugin = location.scheme not in _SCHEMES
    if is_plugin and plugin(location.scheme) is None:
        known = ", ".join((*_SCHEMES, *schemes()))
        raise ValueError(
            f"a source must be a directory, or a URL of {known}, not of {location.scheme}; a package with the entry "
            f"point {location.scheme!r} of {GROUP} would read it"
        )
    if parts.username is not None or "*" in parts.netloc.partition(":")[2]:
        raise ValueError("a source's URL must have neither a user nor a * in its port")
    if location.scheme != "hf" and not is_plugin and "*" in parts.netloc:
        raise ValueError("a source's URL must name its host or bucket; the * comes after it")
