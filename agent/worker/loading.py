"""The end of a load whose plan has been replaced."""

from __future__ import annotations


class LoadGivenUp(Exception):
    """A load ended early, because its plan has been replaced. The next runtime may take what this one has."""
