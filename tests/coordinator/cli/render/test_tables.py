"""The table of devices."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from support.devices import ready_device

from coordinator.cli.render.tables import device_table
from hearth.wire.messages import AgentState, WorkerStatus


def test_workers_are_shown_with_step_silence_failure_and_stuck_processes() -> None:
    computing = WorkerStatus(state="ready", epoch=1, step=7, step_seconds=2.5, silent_seconds=0.4)
    silent = WorkerStatus(deployment="b", state="ready", epoch=1, silent_seconds=1.3)
    failed = WorkerStatus(deployment="c", state="failed", epoch=1, failure="killed [SIGKILL]")
    device = replace(
        ready_device("kitchen"),
        state=AgentState(boot_id="b", workers=(computing, silent, failed), num_abandoned=2, num_hung=3),
    )
    console = Console(width=120, record=True)
    console.print(device_table([device.info(0.0)]))
    shown = " ".join(console.export_text().split())
    for text in (
        "worker ready, step 7 for 2.50 s",
        "worker ready, silent for 1.30 s",
        "worker failed: killed [SIGKILL]",
        "stuck after being killed: 2",
        "the disk does not answer: 3",
    ):
        assert text in shown
