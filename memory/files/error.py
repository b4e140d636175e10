"""Errors for refused adapters."""

from __future__ import annotations

from enum import StrEnum

_LONGEST = 160


class LoadFailure(StrEnum):
    """Why an adapter is missing, or had too few pages; the values are error codes for clients."""

    UNREADABLE = "adapter_unreadable"
    TIMEOUT = "adapter_timeout"
    CHANGED = "adapter_changed"
    INVALID = "adapter_invalid"
    NO_ROOM = "no_room_beside_pinned"
    PAGES_IN_USE = "pages_in_use"
    REMOVED = "adapter_removed"
    OVERFLOWS = "adapter_overflows"

    @property
    def may_pass(self) -> bool:
        """True if the same request may succeed later with an unchanged adapter."""
        return self in (
            LoadFailure.UNREADABLE,
            LoadFailure.TIMEOUT,
            LoadFailure.NO_ROOM,
            LoadFailure.PAGES_IN_USE,
        )


class AdapterFormatError(ValueError):
    """An adapter directory that can't be served; the message names the file and the field or tensor at fault."""

    failure = LoadFailure.INVALID


class AdapterChanged(AdapterFormatError):
    """A file is no longer the one that was registered."""

    failure = LoadFailure.CHANGED


class AdapterUnreadable(AdapterFormatError):
    """The disk returned an error; the same read may succeed later."""

    failure = LoadFailure.UNREADABLE


def unreadable(path: object, error: Exception) -> AdapterUnreadable:
    """Convert the system's error for a file."""
    return AdapterUnreadable(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}")


class NoRoom(AdapterFormatError):
    """Pinned adapters leave too few pages for this one."""

    failure = LoadFailure.NO_ROOM


class PagesInUse(AdapterFormatError):
    """An adapter that may be pinned has too few pages at the moment: requests in progress hold them."""

    failure = LoadFailure.PAGES_IN_USE


def shown(value: object) -> str:
    """Format `value` for a message: printable, on one line, of bounded length, whatever the file contained."""
    try:
        text = ascii(value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer of too many digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error and of all errors that led to it."""
    left, seen = [error], set()
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [other for other in (one.__cause__, one.__context__) if other is not None]
