"""What is known of images: by tenant and salt, and shared fairly."""

from __future__ import annotations

from chorus.server.api.images.known_images import KnownImages, Owner
from chorus.server.api.images.request_images import ImageText


def image(name: str) -> ImageText:
    return ImageText(b"", name, "", 1)


def test_an_image_is_known_to_who_sent_it_alone() -> None:
    known = KnownImages[ImageText](8)
    known.add(Owner("a", ""), b"x", image("x"))
    assert known.find(Owner("a", ""), b"x") == image("x")
    assert known.find(Owner("b", ""), b"x") is known.find(Owner("a", "salt"), b"x") is None
    assert known.find(Owner("a", ""), b"y") is None
    known.add(Owner("a", "salt"), b"x", image("x"))
    assert known.count("a") == 2 and known.count("b") == 0


def test_a_tenants_flood_drops_its_own() -> None:
    known = KnownImages[ImageText](8)
    for name in "xyz":
        known.add(Owner("a", ""), name.encode(), image(name))
    for number in range(100):
        known.add(Owner("b", ""), b"%d" % number, image("many"))
    assert known.count("a") == 3 and known.count("b") == 5
    assert known.find(Owner("b", ""), b"94") is None and known.find(Owner("b", ""), b"95") is not None
    for number in range(100):
        known.add(Owner("c", ""), b"%d" % number, image("many"))
    assert sorted(map(known.count, "abc")) == [2, 3, 3]


def test_the_latest_use_counts_and_salts_share_a_tenants_part() -> None:
    known = KnownImages[ImageText](2)
    known.add(Owner("a", ""), b"x", image("x"))
    known.add(Owner("a", "1"), b"y", image("y"))
    assert known.find(Owner("a", ""), b"x") is not None
    known.add(Owner("a", "2"), b"z", image("z"))
    assert known.find(Owner("a", "1"), b"y") is None and known.find(Owner("a", ""), b"x") is not None
    known.add(Owner("a", "2"), b"z", image("z"))
    assert known.count("a") == 2
