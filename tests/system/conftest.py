"""Fixtures for tests with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def profile_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the profiles of devices, shared by the homes of all tests."""
    return tmp_path_factory.mktemp("profile_cache")
