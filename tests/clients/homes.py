"""Homes that third-party clients ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.home import LOOPBACK, TestHome, home_of
from support.profiles import MeasuredProfiles
from support.waiting import wait_for


@contextmanager
def served(model_dir: Path, profiles: MeasuredProfiles, folder: Path, *options: str) -> Iterator[TestHome]:
    """A home of three agents, all of which compute, and its gateway."""
    options = ("--strategy", "hmp", *options)
    with home_of("abc", folder, model_dir, profiles, *options, "--http", f"{LOOPBACK}:0") as home:
        with home.ready() as client:
            plan = client.status().plan
            assert len(plan.devices) == 3
        wait_for("the gateway", lambda: home.port("coordinator", http=True))
        yield home
