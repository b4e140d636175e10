"""Regular expressions that an untrusted file matches module names with: none may keep its reader for long."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import regex

from .adapter_error import shown

MAX_CHARACTERS = 2000


class MatchTime:
    """Seconds that all matches of one file may take together: some expressions take years for one name."""

    def __init__(self, seconds: float = 2.0) -> None:
        self.seconds_left = seconds


class NamePattern:
    """One expression, as Python's `re` takes it. Refused if it is none, and when its file's time is used up."""

    def __init__(
        self, pattern: str, refuse: Callable[[str], Exception], time_left: MatchTime, template: str = "{}"
    ) -> None:
        """refuse: makes the error to raise from what is wrong. template: what is matched, `{}` being the pattern."""
        self._pattern, self._refuse, self._time = pattern, refuse, time_left
        if len(pattern) > MAX_CHARACTERS:
            raise refuse(f"a pattern has {len(pattern)} characters, at most {MAX_CHARACTERS} are taken")
        whole = template.replace("{}", pattern)
        try:
            re.compile(whole)  # the other library takes more than PEFT would
            self._compiled = regex.compile(whole)
        except (re.error, regex.error, OverflowError, RecursionError) as error:
            raise refuse(f"{shown(pattern)} is no regular expression: {error}") from None

    def match(self, name: str) -> Any:
        """The match at the name's beginning, None if there is none."""
        return self._timed(self._compiled.match, name)

    def fullmatch(self, name: str) -> Any:
        return self._timed(self._compiled.fullmatch, name)

    def _timed(self, match: Any, name: str) -> Any:
        began = time.monotonic()
        try:
            if self._time.seconds_left > 0:
                return match(name, timeout=self._time.seconds_left)
        except TimeoutError:
            pass  # told below
        finally:
            self._time.seconds_left -= time.monotonic() - began
        raise self._refuse(f"matching {shown(self._pattern)} takes too long; write it without nested repeats")
