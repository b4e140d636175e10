"""Errors of a load."""


class LoadError(Exception):
    """A load that can't be sent; the text says what to do about it."""
