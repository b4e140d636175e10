"""Keys of blocks in files: whatever KV depends on changes them."""

from __future__ import annotations

import pytest

from chorus.memory.disk.keys import BASE, BlockKeys

IDENTITY = {"weights": "w", "dtype": "bfloat16", "kv": "auto", "pages": "16"}
SCOPE = ("tenant", "salt")


def chain(identity=IDENTITY, owner="aa", scope=SCOPE, blocks=((1, 2), (3, 4))):
    keys = BlockKeys(identity)
    digest = keys.root(owner, scope)
    for tokens in blocks:
        digest = keys.after(digest, tokens)
    return digest


@pytest.mark.parametrize("name", IDENTITY)
def test_every_part_of_the_identity_counts(name):
    assert chain() == chain(dict(reversed(IDENTITY.items())))
    assert chain(IDENTITY | {name: "other"}) != chain()


@pytest.mark.parametrize(
    "other",
    [
        {"owner": "bb"},
        {"owner": BASE},
        {"scope": ("other", "salt")},
        {"scope": ("tenant", "")},
        {"scope": ("tenantsalt", "")},
        {"blocks": ((1, 2), (3, 5))},
        {"blocks": ((1, 2), (4, 3))},
        {"blocks": ((0, 2), (3, 4))},
        {"blocks": ((1, 2, 3, 4),)},
        {"blocks": ((1, 2),)},
    ],
)
def test_adapter_scope_and_every_token_count(other):
    assert chain(**other) != chain()


def test_a_branch_is_another_block_for_each_adapter_and_token():
    keys = BlockKeys(IDENTITY)
    root = keys.root(BASE, SCOPE)
    found = {
        keys.after(root, (1, 2)),
        keys.after(root, (1, 2), "aa", 1),
        keys.after(root, (1, 2), "aa", 0),
        keys.after(root, (1, 2), "bb", 1),
    }
    assert len(found) == 4


def test_rows_of_images_count_and_are_no_tokens():
    """The placeholder's token is the same for all images."""
    blocks = [((0, 2), (3, 4)), ((("aa", 0), 2), (3, 4)), ((("aa", 1), 2), (3, 4)), ((("bb", 0), 2), (3, 4))]
    assert len({chain(blocks=each) for each in blocks}) == len(blocks)
