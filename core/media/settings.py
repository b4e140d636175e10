"""What a request may set of how its images are prepared, and how images are made smaller to have fewer tokens.

The image processor's own settings are the bounds: a request can only ask for less. They are numbers of pixels, tiles or
tokens, the longest edge, and switches.

Tests: tests/core/media/test_settings.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .images import BadImage

_SIZE, _EDGE = "size", "longest_edge"

LOWERED = ("max_pixels", _SIZE, "max_patches", "max_tiles")
"""Settings that make images smaller, those first that lose least."""

_NUMBERS = {
    f"min_{what}": f"max_{what}" for what in ("pixels", "patches", "tiles", "image_tokens")
}  # the least → the most

DETAIL, LOW = "detail", "low"
"""A setting of an image that is no image processor's: it is reduced before."""

LOW_SIDE = 512
"""The longest side of an image with low detail, as OpenAI's."""

_SWITCHES = ("crop_to_patches", "do_image_splitting")


class BadSetting(ValueError):
    """A setting that can't be had; the text says why."""


@dataclass(slots=True)
class ImageSettings:
    """The settings of a model's image processor that requests may change."""

    numbers: dict[str, int] = field(default_factory=dict)
    """Names, and the most that each may be."""
    switches: tuple[str, ...] = ()
    edge: int | None = None
    """The longest edge that `size` may have; None: it can't be changed."""

    @classmethod
    def of(cls, processor: Any) -> ImageSettings:
        """Those of an image processor of transformers."""
        known, size = processor.valid_kwargs.__annotations__, getattr(processor, _SIZE, None) or {}
        size = {name: value for name, value in dict(size).items() if value is not None}
        mosts = {most: getattr(processor, most, None) for most in _NUMBERS.values()} | {"max_pixels": size.get(_EDGE)}
        owns = {name: mosts[most] for least, most in _NUMBERS.items() for name in (least, most) if name in known}
        numbers = {name: own for name, own in owns.items() if isinstance(own, int)}
        has_edge = "max_pixels" not in numbers and set(size) == {_EDGE}
        return cls(numbers, tuple(name for name in _SWITCHES if name in known), size[_EDGE] if has_edge else None)

    @property
    def names(self) -> list[str]:
        """Those that requests may give."""
        return sorted((*self.numbers, *self.switches, *([_SIZE] if self.edge is not None else [])))

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a request. Raises BadSetting."""
        for name, value in given.items():
            if name not in self.names:
                raise BadSetting(f"{name[:60]} is no setting of this model's images; it has {self._listed()}")
            self._check(name, value)
        for least, most in _NUMBERS.items():
            if least in given and given[least] > given.get(most, self.numbers[least]):
                raise BadSetting(f"{least} is {given[least]}, more than {most}")
        return {name: given[name] for name in sorted(given)}

    def _listed(self) -> str:
        return ", ".join(self.names) or "none"

    def _check(self, name: str, value: Any) -> None:
        if name in self.switches:
            if not isinstance(value, bool):
                raise BadSetting(f"{name} must be true or false")
            return
        what, most = name, self.numbers.get(name)
        if name == _SIZE:
            if not isinstance(value, Mapping) or value.keys() != {_EDGE}:
                raise BadSetting(f'{_SIZE} must be an object with {_EDGE} alone, such as {{"{_EDGE}": {self.edge}}}')
            what, value, most = f"{_SIZE}.{_EDGE}", value[_EDGE], self.edge
        assert most is not None, "each number has a most"
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise BadSetting(f"{what} must be a whole number from 1 to {most}, the model's own")

    def smaller(self, settings: Mapping[str, Any], fits: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any] | None:
        """The settings with the first of `LOWERED` that the processor has lowered as far as `fits` needs; None if it
        has none, or none is enough.
        """
        name = next((name for name in LOWERED if name in self.names), None)
        if name is None:
            return None
        own = self.edge if name == _SIZE else self.numbers[name]
        given = settings.get(name, own)
        high = given[_EDGE] if isinstance(given, Mapping) else given
        low = next((value for value in _halves(high) if fits(_with(settings, name, value))), None)
        if low is None:
            return None
        high = min(high, 2 * low + 1)  # too much
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(_with(settings, name, middle)) else (low, middle)
        return _with(settings, name, low)


def _with(settings: Mapping[str, Any], name: str, value: int) -> dict[str, Any]:
    least = next((least for least, most in _NUMBERS.items() if most == name and least in settings), None)
    found = {**settings, name: {_EDGE: value} if name == _SIZE else value}
    return found if least is None else {**found, least: min(settings[least], value)}


def _halves(value: int) -> Iterator[int]:
    while (value := value // 2) > 0:
        yield value


@dataclass(slots=True)
class TokenLimit:
    """The most tokens of an image, and how they are counted from its size alone."""

    most: int
    settings: ImageSettings
    count: Callable[[tuple[int, int], Mapping[str, Any]], int | None]
    """At most so many tokens has an image of a width and height, with settings; None: it can't be told."""

    def fitted(self, size: tuple[int, int], settings: dict[str, Any]) -> dict[str, Any]:
        """Settings with which an image has at most so many tokens. Raises BadImage if there are none."""
        count = self.count(size, settings)
        if count is None or count <= self.most:
            return settings
        smaller = self.settings.smaller(settings, lambda each: (self.count(size, each) or self.most + 1) <= self.most)
        if smaller is None:
            raise self.refusal(size, f"up to {count}")
        return smaller

    def refusal(self, size: tuple[int, int], tokens: str) -> BadImage:
        width, height = size
        return BadImage(
            f"of {width} x {height} pixels makes {tokens} tokens, at most {self.most} are taken (max_image_tokens); "
            "send a smaller one"
        )
