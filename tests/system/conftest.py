"""Fixtures for tests with real processes."""

from __future__ import annotations

import os

import pytest
from support.profiles import MeasuredProfiles


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> MeasuredProfiles:
    """Profiles of this machine, shared by the homes of all tests, also of those in other processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "profiles"
    folder.mkdir(exist_ok=True)
    return MeasuredProfiles(folder)
