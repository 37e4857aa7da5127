"""Settings for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No deadline: machines are shared, and speed is held by benchmarks, never by timed tests.
settings.register_profile("hearth", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hearth")
