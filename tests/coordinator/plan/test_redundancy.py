"""What the loss of each device of a plan would cost."""

from __future__ import annotations

from coordinator.plan.redundancy import Loss, describe_losses, describe_spares

MB = 1_000_000
LOSS_OF_A = Loss("a", lacking={"id-b": {"x": 30 * MB, "y": 10 * MB}, "id-c": {"z": 5 * MB}})
LOSS_OF_B = Loss("b", lacking={"id-c": {"z": 5 * MB, "y": 4 * MB}})


def test_pause_is_that_of_the_device_that_loads_most_and_names_its_parts() -> None:
    text = describe_losses([LOSS_OF_A, LOSS_OF_B], 0.6)
    assert text.startswith("yes, any one device; predicted pause about 1.9 s: 0.6 s to notice it")
    assert "1.0 s to read 38.1 MiB of weights from an SD card, 0.3 s to start" in text


def test_devices_that_cannot_be_lost_are_named_with_the_reason() -> None:
    losses = [Loss("a", "m does not fit: 5 bytes are missing"), LOSS_OF_B, Loss("c", "no placement")]
    assert describe_losses(losses, 0.6) == "cannot lose a (m does not fit: 5 bytes are missing), c (no placement)"
    assert describe_spares(losses) == "8.58 MiB for b; 8.58 MiB on all disks together"
    assert describe_spares(losses[:1]) == ""


def test_weights_that_two_losses_need_on_a_device_are_stored_once() -> None:
    text = describe_spares([LOSS_OF_A, LOSS_OF_B])
    assert text == "42.9 MiB for a, 8.58 MiB for b; 46.7 MiB on all disks together"
