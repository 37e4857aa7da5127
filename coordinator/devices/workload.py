"""`Workload`: a model to measure on devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel

from coordinator.devices.registry import Device
from hearth.wire.messages import Profile

R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True)
class Workload(Generic[R]):
    """A model to measure on devices."""

    title: str  # shown to users
    request: Profile
    result: type[R]
    cache_prefix: str  # file name prefix of cached results
    cache_key: tuple[object, ...]  # cache key: everything except the device that a result depends on
    total_seconds: Callable[[R], float]  # total seconds of a result, to compare two results
    frames: Callable[[], Sequence[bytes]] = lambda: ()  # payload of the request; called in a worker thread
    path: Path = Path()  # of the file that `frames` reads
    check: Callable[[Device], None] = lambda device: None  # raises if a device cannot run the model
    described: BaseModel | None = None  # kept with a result, for those who read it later without the workload
    probe: Profile | None = None  # a quick request with the same kind of result, for a first plan
    shared: bool = False  # whether the result of one device may stand for that of an equal one
