"""What a load or a removal changes in a registry's names: the one rule for servers and clusters, as plans to write."""

from __future__ import annotations

from typing import NamedTuple

from .registry_store import Changes, Entry, RegistryStore
from .versions import MAX_NUMBER, number_of, versioned


class LabelTaken(FileExistsError):
    """A version was given other content before; its message says which."""


class Load(NamedTuple):
    """A load as it is to be written. entry: what it makes, or what is there already where `changes` is empty. existed:
    the name meant something before.
    """

    entry: Entry
    changes: Changes
    existed: bool


def plan_load(
    store: RegistryStore,
    entry: Entry,
    *,
    replace: bool = True,
    keep: int = 1,
    before: Entry | None = None,
    last_number: int = 0,
) -> Load:
    """Make `entry` the newest version of its name.

    entry: with a version's label, or "" for the name's next number. keep: versions of the name to keep, the newest
    counted. before: the newest version where the registry doesn't know it. last_number: of that one, if it has one.
    The same content under a version that is there changes nothing. FileExistsError for a name that it may not
    `replace`, LabelTaken for a version that has, or had, another content.
    """
    newest = store.get(entry.name) or before
    there = _version(store, entry, before) if entry.version else None
    if there is not None and there.content_hash == entry.content_hash:
        return Load(there, (), existed=True)
    if newest is not None and not replace:
        raise FileExistsError(entry.name)
    last_number = max(store.last_number(entry.name), last_number)
    if entry.version:
        _check_label(store, entry, is_there=there is not None, last_number=last_number)
    made = entry._replace(version=entry.version or _next_number(store, entry.name, last_number))
    if newest is not None:
        made = made._replace(paused=newest.paused, pinned=newest.pinned)
    return Load(made, _changes(store, made, newest, keep), existed=newest is not None)


def _version(store: RegistryStore, entry: Entry, before: Entry | None) -> Entry | None:
    """The version that has the label already."""
    if before is not None and before.label == entry.version:
        return before
    return store.find(versioned(entry.name, entry.version))


def _next_number(store: RegistryStore, name: str, last_number: int) -> str:
    number = last_number + 1
    while store.get(versioned(name, str(number))) is not None:  # a name of its own, of a start or a store
        number += 1
    return str(number)


def plan_removal(store: RegistryStore, name: str) -> Changes:
    """Forget a name and its kept versions, or one version: if it is the newest, the latest kept one takes its place.
    KeyError.
    """
    entry = store.find(name)
    if entry is None:
        raise KeyError(name)
    if name == entry.plain_name:
        return [*((alias, None) for alias in store.kept(name)), (name, None)]
    kept = store.kept(entry.plain_name)
    if name in kept or name == entry.name:
        return [(name, None)]
    if not kept:
        return [(entry.plain_name, None)]
    heir = store.get(kept[-1])
    assert heir is not None
    heir = heir._replace(name=entry.plain_name, paused=entry.paused, pinned=entry.pinned)
    return [(entry.plain_name, heir), (kept[-1], None)]


def _check_label(store: RegistryStore, entry: Entry, *, is_there: bool, last_number: int) -> None:
    """LabelTaken unless the version is new, or comes back with the content that it had."""
    name, label = entry.name, entry.version
    full = versioned(name, label)
    if is_there:
        raise LabelTaken(f"there is a version '{full}' with other content already")
    content, number = store.retired_content(name, label), number_of(label)
    if content is not None and content != entry.content_hash:
        raise LabelTaken(f"'{full}' was a version with other content, which was retired")
    if number is not None and number > MAX_NUMBER:
        raise LabelTaken(f"a version that is a number is at most {MAX_NUMBER}, not {label}")
    if number is not None and content is None and number <= last_number:
        raise LabelTaken(f"the versions of '{name}' up to {last_number} were given already")


def _changes(store: RegistryStore, made: Entry, newest: Entry | None, keep: int) -> Changes:
    name, kept, changes = made.name, store.kept(made.name), list[tuple[str, Entry | None]]()
    if newest is not None and keep > 1:
        alias = versioned(name, newest.label)
        there = store.get(alias)
        if there is None or there.plain_name == name:  # else it is a name of its own
            changes.append((alias, newest._replace(name=alias, version=newest.label, paused=False, pinned=False)))
            kept = [*(one for one in kept if one != alias), alias]
    gone = kept[: max(0, len(kept) + 1 - keep)]
    changes = [change for change in changes if change[0] not in gone]
    return [*changes, (name, made), *((alias, None) for alias in gone if store.get(alias) is not None)]
