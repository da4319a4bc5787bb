"""The one thing a schedule can end with that is not allowed."""

from __future__ import annotations


class Violation(AssertionError):
    """Something that must never happen has happened."""
