"""The CPU cost of communication in a profile."""

from __future__ import annotations

import pytest

from agent.worker import profiling
from agent.worker.profiling import measure_wire_cost
from hearth.wire.codec import NUMPY_CASTS


@pytest.mark.parametrize("beside_compute", [False, True])
def test_costs_are_those_of_the_cpu_time_that_a_device_provides(
    monkeypatch: pytest.MonkeyPatch, beside_compute: bool
) -> None:
    monkeypatch.setattr(profiling, "_socket_cost", lambda encrypt: (1e-9 if encrypt else 5e-10, 2e-5))
    cost = measure_wire_cost(0.5, NUMPY_CASTS, beside_compute)
    assert cost.encrypted_seconds_per_byte == pytest.approx(2e-9)  # of half a core
    assert cost.plain_seconds_per_byte == pytest.approx(1e-9)
    assert cost.seconds_per_message == pytest.approx(4e-5)
    assert cost.beside_compute is beside_compute
