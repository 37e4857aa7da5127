"""What the homes of all tests here have in common."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where homes leave what they measured of their devices, for those that come later."""
    return tmp_path_factory.mktemp("known")
