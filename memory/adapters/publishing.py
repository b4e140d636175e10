"""Plans for loading and removing adapters: the changes to a registry's names, by one rule for servers and clusters."""

from __future__ import annotations

from typing import NamedTuple

from .registry_store import Changes, Entry, RegistryStore
from .versions import MAX_NUMBER, number_of, versioned


class LabelTaken(FileExistsError):
    """The version label already belongs to other content; the message names it."""


class Load(NamedTuple):
    """A planned load, ready to be written."""

    entry: Entry
    """The entry that the load makes; the existing entry if `changes` is empty."""
    changes: Changes
    existed: bool
    """True if the name had a meaning before."""


def plan_load(
    store: RegistryStore,
    entry: Entry,
    *,
    replace: bool = True,
    keep: int | None = 1,
    before: Entry | None = None,
    last_number: int = 0,
) -> Load:
    """Plan to make `entry` the newest version of its name.

    entry: has a version label, or "" for the name's next number. keep: number of versions of the name to keep,
    including the newest. None: all others stay, `name@label` is a name of its own, with any number, and the name
    itself has its newest version alone. before: the newest version, if the registry does not know it.
    last_number: its version number, if it has one. Loading the same content under an existing version changes nothing.
    Raises FileExistsError for a name that it may not `replace`, and LabelTaken for a version that has, or had, other
    content.
    """
    plain = entry.plain_name
    newest = store.get(entry.name) or (before if entry.name == plain else None)
    there = _version(store, entry, before) if entry.version else None
    if there is not None and there.content_hash == entry.content_hash:
        return Load(there, (), existed=True)
    if newest is not None and not replace:
        raise FileExistsError(entry.name)
    last_number = max(store.last_number(plain), last_number)
    if entry.version:
        _check_label(store, entry, is_there=there is not None, last_number=0 if keep is None else last_number)
    made = entry._replace(version=entry.version or _next_number(store, entry.name, last_number))
    if newest is not None:
        made = made._replace(paused=newest.paused, pinned=newest.pinned)
    elif store.get(plain) is None:  # its versions are paused together
        made = made._replace(paused=any((one := store.get(each)) and one.paused for each in store.kept(plain)))
    return Load(made, _changes(store, made, newest, keep), existed=newest is not None)


def _version(store: RegistryStore, entry: Entry, before: Entry | None) -> Entry | None:
    """The existing version with this label, or None."""
    if before is not None and before.label == entry.version:
        return before
    return store.find(versioned(entry.plain_name, entry.version))


def _next_number(store: RegistryStore, name: str, last_number: int) -> str:
    number = last_number + 1
    # skips `name@number` that is an adapter of its own, from the command line or a store
    while store.get(versioned(name, str(number))) is not None:
        number += 1
    return str(number)


def plan_removal(store: RegistryStore, name: str) -> Changes:
    """Plan to forget a name and its kept versions, or one version.

    When the newest version is removed, the latest kept version becomes the newest. Raises KeyError for an unknown name.
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
    """Raise LabelTaken unless the version is new, or comes back with its old content."""
    name, label = entry.plain_name, entry.version
    full = versioned(name, label)
    if is_there:
        raise LabelTaken(f"version '{full}' already exists with other content; choose another version")
    content, number = store.retired_content(name, label), number_of(label)
    if content is not None and content != entry.content_hash:
        raise LabelTaken(f"version '{full}' had other content and was retired; choose another version")
    if number is not None and number > MAX_NUMBER:
        raise LabelTaken(f"a numeric version is at most {MAX_NUMBER}, not {label}; choose another version")
    if number is not None and content is None and number <= last_number:
        raise LabelTaken(f"versions of '{name}' up to {last_number} were already given; choose a higher one")


def _changes(store: RegistryStore, made: Entry, newest: Entry | None, keep: int | None) -> Changes:
    if keep is None:
        return [(made.name, made)]
    name, kept, changes = made.name, store.kept(made.name), list[tuple[str, Entry | None]]()
    if newest is not None and keep > 1:
        alias = versioned(name, newest.label)
        there = store.get(alias)
        if there is None or there.plain_name == name:  # else the alias is an adapter of its own
            changes.append((alias, newest._replace(name=alias, version=newest.label, paused=False, pinned=False)))
            kept = [*(one for one in kept if one != alias), alias]
    gone = kept[: max(0, len(kept) + 1 - keep)]
    changes = [change for change in changes if change[0] not in gone]
    return [*changes, (name, made), *((alias, None) for alias in gone if store.get(alias) is not None)]
