"""The events that are kept, of each kind the newest. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from itertools import takewhile

from hearth.wire.messages import EVENT_KINDS, RecordedEvent

# Of each kind, so that frequent ones do not push out the others. In all 2 to 3 MB, and 2 MB as text.
KEPT: Mapping[str, int] = {
    "request_ended": 1000,
    "device_sampled": 1500,  # of five devices: five hours at one a minute, half an hour while somebody watches
    "device_changed": 500,
    "link_rated": 500,
    "plan_changed": 200,
    "phase_changed": 500,
    "coordinator_started": 50,
}
assert KEPT.keys() == set(EVENT_KINDS)


class EventRing:
    """Events by number. Numbers must grow."""

    def __init__(self, kept: Mapping[str, int] = KEPT) -> None:
        self._kept = {kind: deque[RecordedEvent](maxlen=limit) for kind, limit in kept.items()}
        self._last_dropped = dict.fromkeys(kept, 0)  # number of the newest event that was dropped

    def add(self, recorded: RecordedEvent) -> None:
        """Keep an event; the oldest one of its kind is dropped if there are too many."""
        kind = recorded.event.kind
        kept = self._kept[kind]
        if len(kept) == kept.maxlen:
            self._last_dropped[kind] = kept[0].number
        kept.append(recorded)

    def after(self, number: int, kinds: Collection[str], limit: int) -> list[RecordedEvent]:
        """The first `limit` events of these kinds (empty: all) after this number, oldest first."""
        newer = [
            each
            for kind, kept in self._kept.items()
            if not kinds or kind in kinds
            for each in takewhile(lambda one: one.number > number, reversed(kept))
        ]
        return sorted(newer, key=lambda each: each.number)[:limit]

    def has_dropped(self, number: int, kinds: Collection[str]) -> bool:
        """Whether an event of these kinds after this number was dropped."""
        return any(last > number for kind, last in self._last_dropped.items() if not kinds or kind in kinds)
