"""The standbys that follow this coordinator: copies of its state, and the hand-over when it stops.

The answer to a change of keys waits until they have it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coordinator.serve.clients.key_registry import KeyRegistry
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.standby.leadership import Leadership
from coordinator.serve.standby.replica import ReplicaFile, replica_files
from coordinator.serve.state import StateFile
from hearth.errors import BadRequest
from hearth.platform.asyncio_tools import Signal, loop_time, with_timeout
from hearth.platform.disk import FILE_SECONDS, hung_paths, on_disk
from hearth.wire import messages as wire
from hearth.wire.rpc import Reply

log = logging.getLogger(__name__)

_ALIVE_SECONDS = 0.25  # interval of the leader's signs of life: several fit into the silence that a standby waits for
# Interval at which files for a standby are compared with those sent; the state itself is sent at once.
_SCAN_SECONDS = 5.0
# For a standby to confirm a change of keys: several round trips on a slow link, and two small files written to an SD card.
_CONFIRM_SECONDS = 1.0
# For a standby to accept, which takes a round trip; without an answer the leader stops as if there were none.
_ACCEPT_SECONDS = 2.0
_DISK_CHECK_SECONDS = 10.0  # short compared with the time limits of accesses to a disk


class Follower:
    """One standby, from its `Follow` to the end of that stream. `confirms`: it says what it has stored."""

    def __init__(self, name: str, confirms: bool) -> None:
        self.name = name
        self.confirms = confirms
        self.confirmed = -1  # the number of changes that it has stored; -1: it has no complete copy yet
        self.is_late = False  # it did not confirm a change in time, and none since
        self.receipts: dict[int, int] = {}  # the number of changes that each receipt stands for
        self.news = Signal()  # there is something to send


class Followers:
    """All standbys that follow now. A receipt is a number, different for each standby and change, that it sends back."""

    def __init__(self) -> None:
        self.num_changes = 0  # of keys, in this run
        self.latest_is_copied = False  # whether all standbys have confirmed the latest change
        self._followers: list[Follower] = []
        self._receipts = itertools.count(1)
        self._progress = asyncio.Event()  # set, and replaced, at each confirmation and when a standby leaves

    def __len__(self) -> int:
        return len(self._followers)

    def join(self, name: str, confirms: bool) -> Follower:
        """A standby follows."""
        follower = Follower(name, confirms)
        self._followers.append(follower)
        return follower

    def leave(self, follower: Follower) -> None:
        """It no longer follows."""
        self._followers.remove(follower)
        self._wake_waiting()

    def wake(self) -> None:
        """There is something to send to all."""
        for follower in self._followers:
            follower.news.set()

    def receipt(self, follower: Follower, num_changes: int) -> int:
        """The receipt to send after a copy with so many changes; 0 if there is nothing to confirm."""
        if not follower.confirms or num_changes <= max(follower.receipts.values(), default=follower.confirmed):
            return 0
        receipt = next(self._receipts)
        follower.receipts[receipt] = num_changes
        return receipt

    def confirm(self, receipt: int) -> None:
        """A standby has stored what was sent before this receipt."""
        for follower in self._followers:
            if receipt in follower.receipts:
                follower.confirmed = follower.receipts.pop(receipt)
                follower.is_late = False
                self._wake_waiting()

    async def copy_change(self) -> None:
        """Send a change of keys that was made to all standbys, and wait until they have confirmed it.

        The wait is bounded; a standby that was late is not waited for again before it confirms something.
        """
        self.num_changes += 1
        number = self.num_changes
        awaited = [each for each in self._followers if each.confirms and not each.is_late]
        self.wake()
        with suppress(asyncio.TimeoutError):
            await with_timeout(_CONFIRM_SECONDS, self._confirmed(awaited, number))
        for follower in awaited:
            if follower.confirmed < number:
                follower.is_late = True
                log.warning(
                    "the standby %s has not confirmed a change of keys: if this coordinator is lost now, repeat the change",
                    follower.name,
                )
        self.latest_is_copied = bool(self._followers) and all(each.confirmed >= number for each in self._followers)

    async def _confirmed(self, awaited: list[Follower], number: int) -> None:
        while any(each in self._followers and each.confirmed < number for each in awaited):
            await self._progress.wait()

    def _wake_waiting(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()


class HandOver:
    """The leader's side. A standby that has stopped, or has no complete copy yet, does not accept."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self.accepted = asyncio.Event()
        self.is_offered = False  # whether the leader waits for a standby to accept

    async def offer(self) -> bool:
        """Offer the leader's place; returns whether a standby has accepted it."""
        if not self._followers:
            return False
        self.is_offered = True
        self._followers.wake()
        try:
            await with_timeout(_ACCEPT_SECONDS, self.accepted.wait())
        except asyncio.TimeoutError:
            self.is_offered = False
            return False
        return True

    async def watch_disk(self) -> None:
        """Hand over when a disk hangs, since a standby has a copy of the state on a disk of its own. Runs until cancelled."""
        while True:
            await asyncio.sleep(_DISK_CHECK_SECONDS)
            if self._followers and (paths := hung_paths()):
                log.error("the disk that holds %s does not answer", paths[0])
                await self.offer()

    def accept(self) -> None:
        """A standby takes over. Raises BadRequest if that was not offered."""
        if not self.is_offered:
            raise BadRequest(reason="this coordinator goes on leading")
        self.accepted.set()


@dataclass(frozen=True)
class Replication:
    """Sends the state of this coordinator to its standbys. `keys`: of apps and devices; `model_files`: as `replica_files`."""

    settings: CoordinatorSettings
    state: StateFile
    keys: Sequence[KeyRegistry]
    leadership: Leadership
    followers: Followers
    hand_over: HandOver
    model_files: Callable[[], Mapping[str, Sequence[Path]]]

    async def to_standby(self, standby: str, confirms: bool) -> AsyncGenerator[Reply, None]:
        """Send the state to one standby, as it changes, with signs of life in between."""
        self.leadership.add_standby()
        follower = self.followers.join(standby, confirms)
        state_dir = self.settings.state_dir
        stamps: dict[str, tuple[int, ...]] = {}
        sent, scan_at = None, 0.0
        try:
            while not self.hand_over.accepted.is_set():
                num_changes = self.followers.num_changes
                state = self.state.current, *(each.current for each in self.keys)
                if state != sent or loop_time() >= scan_at:
                    files = await on_disk(state_dir, FILE_SECONDS, self._files)
                    changed = any(stamps.get(file.path) != file.stamp for file in files)
                    for file in files:
                        if stamps.get(file.path) != file.stamp or (changed and file is files[-1]):
                            parts = file.parts()
                            while part := await on_disk(state_dir, FILE_SECONDS, next, parts, None):
                                yield Reply(part[0], [part[1]])
                            stamps[file.path] = file.stamp
                    sent, scan_at = state, loop_time() + _SCAN_SECONDS
                yield Reply(
                    wire.LeaderAlive(
                        name=self.settings.name,
                        is_complete=True,
                        configuration=self.leadership.quorum.current,
                        is_leaving=self.hand_over.is_offered,
                        receipt=self.followers.receipt(follower, num_changes),
                    )
                )
                await follower.news.wait(_ALIVE_SECONDS)
                follower.news.clear()
        finally:
            self.followers.leave(follower)

    def _files(self) -> list[ReplicaFile]:
        return replica_files(self.settings.state_dir, self.state.current, self.keys, self.model_files())
