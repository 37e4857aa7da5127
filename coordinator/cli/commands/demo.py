"""`hearth demo`: agents, a coordinator and a client on this machine, compared with `transformers`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.options import AsJsonOption
from coordinator.cli.output import err, out, print_json
from coordinator.cli.render.tables import device_table, link_table, plan_tables
from hearth.platform.units import format_bytes, format_seconds

MAX_DIFFERENCE = 1e-5  # between embeddings: above the float32 rounding of another summation order, below any real error


def demo(
    model: Annotated[Path, typer.Option(help="Model directory; `make demo` downloads one.")] = Path(".models/minilm"),
    num_devices: Annotated[int, typer.Option(help="Number of agents to start.", min=1, max=8)] = 3,
    patience: Annotated[float, typer.Option(help="Factor of all deadlines, for a slow machine.", min=1.0)] = 1.0,
    as_json: AsJsonOption = False,
) -> None:
    """Run agents and a coordinator on this machine, which match smart-home sentences to commands (strategy hmp)."""
    from coordinator.cli.demo_run import run_demo
    from coordinator.serve.opening import check_model
    from coordinator.serve.state import TransformerGoal

    # Raises for a missing or broken model before anything is started.
    check_model(TransformerGoal(model_dir=str(model)))
    began = time.monotonic()

    def report(line: str) -> None:
        if not as_json:
            err.print(f"[dim]{time.monotonic() - began:5.1f} s[/] {line}", soft_wrap=True)

    result = run_demo(model.resolve(), num_devices, report, patience)
    if as_json:
        print_json(result.as_json())
    else:
        device_list = result.devices
        names = {device.device_id: device.name for device in device_list.devices}
        links = link_table(device_list.links, names)
        tables = (device_table(device_list.devices), "", links, "", *plan_tables(result.plan))
        out.print("", *tables, "", sep="\n")
        for answer in result.answers:
            out.print(f"  {answer['text']:<45} -> {answer['command']} ({answer['similarity']:.2f})", soft_wrap=True)
        weights = [device.memory.weights + device.memory.embeddings for device in result.plan.devices]
        out.print(
            f"\nexactness: largest difference from transformers on one device {result.max_abs_difference:.1e}\n"
            f"memory: {format_bytes(min(weights))} to {format_bytes(max(weights))} of weights on each device, "
            f"{format_bytes(sum(weights))} in all\n"
            f"latency: {result.num_texts} sentences in {format_seconds(result.latency_seconds)} on "
            f"{result.plan.num_ranks} devices, {format_seconds(result.single_device_latency_seconds)} on one; here all "
            "share this machine's cores, so that more devices cannot be faster",
            soft_wrap=True,
        )
    if result.max_abs_difference > MAX_DIFFERENCE:
        err.print(f"[red]error:[/] the difference is larger than {MAX_DIFFERENCE}")
        raise typer.Exit(1)
