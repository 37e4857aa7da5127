"""Settings for all tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# No deadline: test machines are shared. Speed is checked by benchmarks, not by tests.
settings.register_profile("hearth", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
# Fewer examples for a second Python version: python -m pytest --hypothesis-profile few.
settings.register_profile("few", settings.get_profile("hearth"), max_examples=10)
settings.load_profile("hearth")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests, and say how to run them, unless `-m` decides about them."""
    if "slow" in config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason="slow: run `make test-slow`, or pytest with `-m slow`")
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(skip)
