"""What the loss of each device of a plan would cost."""

from __future__ import annotations

from coordinator.plan.redundancy import Loss, describe_losses


def test_pause_is_that_of_the_device_that_loads_most_and_names_its_parts() -> None:
    text = describe_losses([Loss("a", load_bytes=40_000_000), Loss("b", load_bytes=4_000_000)], 0.6)
    assert text.startswith("yes, any one device; predicted pause about 1.9 s: 0.6 s to notice it")
    assert "1.0 s to read 38.1 MiB of weights from an SD card, 0.3 s to start" in text


def test_devices_that_cannot_be_lost_are_named_with_the_reason() -> None:
    losses = [Loss("a", "m does not fit: 5 bytes are missing"), Loss("b", load_bytes=1), Loss("c", "no placement")]
    assert describe_losses(losses, 0.6) == "cannot lose a (m does not fit: 5 bytes are missing), c (no placement)"
