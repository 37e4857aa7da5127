"""Tables of devices, of plans, and of what is prepared for losses."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from support.devices import ready_device, with_telemetry
from support.plans import BERT_LARGE, make_plan

from coordinator.cli.render.tables import device_lines, device_table, loss_table, plan_tables
from hearth.wire.messages import AgentState, PreparedLoss, WorkerStatus


def test_workers_are_shown_with_step_silence_failure_and_stuck_processes() -> None:
    computing = WorkerStatus(state="ready", epoch=1, step=7, step_seconds=2.5, silent_seconds=0.4)
    silent = WorkerStatus(deployment="b", state="ready", epoch=1, silent_seconds=1.3)
    failed = WorkerStatus(deployment="c", state="failed", epoch=1, failure="killed [SIGKILL]")
    device = replace(
        ready_device("kitchen"),
        state=AgentState(boot_id="b", workers=(computing, silent, failed), num_abandoned=2, num_hung=3),
    )
    device = with_telemetry(device, gpu_problem="no [new] driver", confined="files calls")
    console = Console(width=120, record=True)
    console.print(device_table([device.info(0.0)]))
    shown = " ".join(console.export_text().split())
    for text in (
        "computes on the CPU: no [new] driver",
        "workers not confined: network",
        "worker ready, step 7 for 2.50 s",
        "b ready, silent for 1.30 s",
        "c failed: killed [SIGKILL]",
        "stuck after being killed: 2",
        "the disk does not answer: 3",
    ):
        assert text in shown
    dead = replace(device, health="dead", reason="it has not answered for 5 s").info(0.0)
    console.print(device_table([dead]), device_lines([dead]))
    shown = " ".join(console.export_text().split())
    assert "has not answered" in shown
    assert not any(text in shown for text in ("step 7", "SIGKILL", "stuck", "disk"))


def test_losses_are_shown_with_what_is_stored_and_missing_and_their_pause() -> None:
    losses = (
        PreparedLoss(device="kitchen", is_prepared=True, spare_bytes=40 << 20, pause_seconds=0.94),
        PreparedLoss(device="attic", is_prepared=False, spare_bytes=30 << 20, missing_bytes=12 << 20),
        PreparedLoss(device="cellar", is_prepared=False),
        PreparedLoss(device="garage", is_prepared=False, reason="the model does not fit"),
    )
    console = Console(width=80, record=True)
    console.print(loss_table(losses))
    rows = [" ".join(line.replace("│", " ").split()) for line in console.export_text().splitlines()]
    assert rows[2:] == [
        "kitchen yes 40.0 MiB 0 B 0.9 s",
        "attic not yet 30.0 MiB 12.0 MiB -",
        "cellar not yet - - -",
        "garage no - - -",
    ]


def test_names_of_devices_are_not_broken_in_a_table_of_memory_at_80_columns() -> None:
    plan = make_plan(BERT_LARGE, "hmp", (1, 1))
    devices = tuple(
        each.model_copy(update={"name": name}) for each, name in zip(plan.devices, ("kitchen", "attic-2"), strict=True)
    )
    console = Console(width=80, record=True)
    console.print(
        *plan_tables(plan.model_copy(update={"devices": devices}), {devices[0].device_id: 500 << 20}), sep="\n"
    )
    memory = console.export_text().partition("Bytes on each device")[2]
    assert all(name in memory for name in ("kitchen", "attic-2", "peak so far", "500 MiB"))
