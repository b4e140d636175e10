"""Errors of a load."""


class LoadError(Exception):
    """A load can't be sent; the text gives the remedy."""
