"""Errors of a plan."""

from __future__ import annotations


class PlanError(ValueError):
    """A plan that can't be made; the text names the field, the value and the fix."""
