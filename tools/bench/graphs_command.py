"""`python -m tools.bench graphs`: ONNX graphs on the testbed, planned for throughput and for latency. Needs root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Optional, get_args

import typer
from rich.status import Status

from coordinator.models.graph_file import kind_of, open_graph, parse_dims
from coordinator.plan.graph.methods import GRAPH_METHODS
from hearth.errors import BadSetting
from hearth.plan.value_formats import ValueFormatName
from tools.bench.findings import Finding
from tools.bench.graphs import GraphsBench
from tools.bench.graphs_findings import (
    ASKED_GAIN,
    NO_GAIN,
    ONE_DEVICE,
    Served,
    of_pipelines,
    of_placements,
    served_table,
)
from tools.bench.homes import agents, hub_scenario
from tools.bench.proofs import collector, conclude, reporter, working
from tools.bench.results import check_files
from tools.graph_models import NETWORKS, Size, build, export

_TWO_BRANCH = "two_branch"
_ASKED_DEVICES = 3  # number of devices to which the target gain applies
_PARTS = ("throughput", "latency")
_File = Optional[Path]  # noqa: UP045 (typer reads the annotation on Python 3.10)


def graphs(
    model: Annotated[
        str, typer.Option(help=f"(Throughput) Network: {', '.join(NETWORKS)}.", metavar="NAME")
    ] = "resnet50",
    onnx: Annotated[
        _File,
        typer.Option(
            help="(Throughput) ONNX file instead of a built-in network.", metavar="FILE.onnx", show_default=False
        ),
    ] = None,
    dim: Annotated[
        list[str], typer.Option(help="Size of a dynamic dimension of FILE.onnx; may be repeated.", metavar="NAME=N")
    ] = [],  # noqa: B006
    devices: Annotated[int, typer.Option(help="Devices, not counting the hub.", min=2, max=4)] = 3,
    cores: Annotated[float, typer.Option(help="CPU share of each device, of one core.", min=0.01, max=1)] = 0.45,
    mbit: Annotated[float, typer.Option(help="Real rate of every link.", min=0.1)] = 60.0,
    slow_mbit: Annotated[float, typer.Option(help="(Latency) Second, slower link rate.", min=0.1)] = 4.0,
    strategies: Annotated[
        str,
        typer.Option(
            help=f"(Throughput) Strategies, from auto, {', '.join(GRAPH_METHODS.names('throughput'))}.", metavar="LIST"
        ),
    ] = "pipeline-exact",
    wires: Annotated[
        str,
        typer.Option(
            help=f"(Throughput) Activation formats, from {', '.join(get_args(ValueFormatName))}.", metavar="LIST"
        ),
    ] = "exact,fp16,int8",
    branch_width: Annotated[
        int, typer.Option(help="(Latency) Channels of each branch; compute grows with the square.", min=8, max=1024)
    ] = 256,
    parts: Annotated[str, typer.Option(help=f"Parts to run, from {', '.join(_PARTS)}.", metavar="LIST")] = ",".join(
        _PARTS
    ),
    time_limit: Annotated[float, typer.Option(help="Time limit of each plan search, in seconds.", min=0.1)] = 10.0,
    rounds: Annotated[int, typer.Option(help="Rounds; each plan is deployed and measured once per round.", min=1)] = 3,
    seconds: Annotated[float, typer.Option(help="Seconds of full load in each round.", min=1)] = 8.0,
    requests: Annotated[int, typer.Option(help="(Latency) Sequential requests in each round.", min=1)] = 10,
    json: Annotated[_File, typer.Option(help="Save the figures to this file.", metavar="FILE")] = None,
    markdown: Annotated[_File, typer.Option(help="Save the tables to this file.", metavar="FILE")] = None,
) -> None:
    """Compare pipelines with one device, and latency placements at a fast and a slow link rate."""
    chosen_parts, chosen_wires = _chosen("--parts", parts, _PARTS), _chosen("--wires", wires, get_args(ValueFormatName))
    chosen = _strategies(strategies)
    if slow_mbit >= mbit:
        raise BadSetting(setting="--slow-mbit", reason=f"{slow_mbit:g} is not slower than {mbit:g} of --mbit")
    _check_model(model, onnx, parse_dims(dim))
    check_files(json, markdown)
    scenario = hub_scenario(devices, cores)
    findings: list[Finding] = []
    tables: list[str] = []
    with working(scenario) as (folder, status):
        found = collector(findings, json)
        exported = _exported(chosen_parts, model, onnx, Size(branch_width=branch_width), folder, status)
        with (
            agents(scenario, folder, mbit) as testbed,
            GraphsBench(testbed, rounds, time_limit, reporter(status)) as bench,
        ):
            if "throughput" in chosen_parts:
                one, pipelines = bench.throughput(exported["throughput"], chosen, chosen_wires, mbit, seconds, dim)
                asked = ASKED_GAIN if devices == _ASKED_DEVICES else None
                for each in of_pipelines(one, pipelines, asked):
                    found(each)
                tables.append(f"Throughput, {exported['throughput'].stem}; seconds for each answer at full load\n\n"
                              f"{served_table([one, *pipelines])}\n")  # fmt: skip
            if "latency" in chosen_parts:
                placed = []
                for group in bench.latency(exported["latency"], (mbit, slow_mbit), requests):
                    placed.append(group)
                    for each in of_placements(*group):
                        found(each)
                found(_both_seen(placed))
                rows = [each for group in placed for each in group if each is not None]
                tables.append(
                    f"Latency, {_TWO_BRANCH} of width {branch_width}; seconds of one request alone\n\n{served_table(rows)}\n"
                )
    title = f"{devices} devices of {cores:g} core, {mbit:g} Mbit/s, {rounds} rounds"
    conclude(title, findings, json, markdown, "\n" + "\n".join(tables))


def _both_seen(placed: Sequence[tuple[Served, Served, Served, Served | None]]) -> Finding:
    """Finding: according to the simulator, several devices win at one rate and one device at another."""
    sides = {one.predicted_seconds / moirai.predicted_seconds > NO_GAIN for one, moirai, *_ in placed}
    missing = {True: "several devices", False: "one device"}
    said = ", ".join(missing[side] for side in (True, False) if side not in sides)
    return Finding(
        what="rates at which several devices win, and at which one does, says the simulator",
        measured=f"none for {said}" if said else "both",
        asked="both",
        holds=not said,
    )


def _exported(
    parts: Sequence[str], model: str, onnx: Path | None, size: Size, folder: Path, status: Status
) -> dict[str, Path]:
    found = {}
    if "throughput" in parts:
        found["throughput"] = onnx or _export(model, size, folder, status)
    if "latency" in parts:
        found["latency"] = _export(_TWO_BRANCH, size, folder, status)
    return found


def _export(name: str, size: Size, folder: Path, status: Status) -> Path:
    """Export a network with random weights; reuse an existing file."""
    path = folder / f"{name}.onnx"
    if not path.exists():
        status.update(f"making {name}")
        export(build(name, size), path)
    return path


def _check_model(model: str, onnx: Path | None, dims: Mapping[str, int]) -> None:
    """Check the model options. Raises BadSetting, BadModelFile."""
    if model not in NETWORKS:
        raise BadSetting(setting="--model", reason=f"'{model}' is none of {', '.join(NETWORKS)}")
    if onnx is None:
        if dims:
            raise BadSetting(
                setting="--dim",
                reason="it is for a file given with --onnx; built-in networks have no dynamic dimensions",
            )
        return
    if not onnx.is_file():
        raise BadSetting(setting="--onnx", reason=f"there is no file {onnx}")
    if kind_of(onnx) != "onnx":
        raise BadSetting(setting="--onnx", reason=f"the name of {onnx} does not end in .onnx")
    open_graph(onnx, dims)


def _strategies(text: str) -> list[str]:
    """Parse --strategies. Raises BadSetting."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise BadSetting(setting="--strategies", reason="it names none")
    for strategy in found:
        GRAPH_METHODS.check(strategy, "throughput")
    if ONE_DEVICE in found:
        raise BadSetting(setting="--strategies", reason=f"{ONE_DEVICE} is always run, as the baseline")
    return found


def _chosen(setting: str, text: str, allowed: Sequence[str]) -> list[str]:
    """Parse a list of allowed values. Raises BadSetting."""
    found = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if wrong := [part for part in found if part not in allowed]:
        raise BadSetting(setting=setting, reason=f"'{wrong[0]}' is none of {', '.join(allowed)}")
    if not found:
        raise BadSetting(setting=setting, reason=f"it names none of {', '.join(allowed)}")
    return found
