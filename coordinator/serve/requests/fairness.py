"""Turns of requests of several keys: those of one key keep their order, and the keys take turns. Pure.

This is start-time fair queueing with requests of equal size. A key that has sent many requests waits for its own; the first
request of another key gets its turn next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Turns:
    """Gives out turns, which are served in increasing order."""

    def __init__(self) -> None:
        self._served = 0  # the latest turn that was served
        self._latest = 0  # that was given out
        self._latest_of: dict[str, int] = {}

    def next(self, key: str) -> int:
        """The turn of a new request of this key."""
        turn = max(self._served, self._latest_of.get(key, -1) + 1)
        self._latest_of[key] = turn
        self._latest = max(self._latest, turn)
        return turn

    def last(self) -> int:
        """A turn behind all that were given out so far."""
        return self._latest

    def serve(self, turn: int) -> None:
        """A request with this turn is served."""
        self._served = max(self._served, turn)
        self._latest_of = {key: latest for key, latest in self._latest_of.items() if latest >= self._served}


def greediest(keys: Iterable[str], newcomer: str) -> str:
    """Of the keys of the waiting requests, the one that must give up a place; the newcomer's, if no other has more."""
    counts = Counter(keys)
    key = max(counts, key=counts.__getitem__)
    return key if counts[key] > counts[newcomer] else newcomer
