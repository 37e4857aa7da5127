"""Commands of `python -m tools.bench` that compare measured figures with their targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Optional, cast, get_args

import typer
from rich.status import Status

from coordinator.cli.output import err, handles_errors, out
from coordinator.models.checkpoint.families import read_json_object
from hearth.errors import BadSetting
from hearth.plan.model_spec import WeightFormat
from hearth.platform.units import parse_bytes
from tools.bench import interrupts
from tools.bench.capacity import CapacityBench
from tools.bench.findings import Finding, all_hold, as_json, findings_table
from tools.bench.homes import agents
from tools.bench.measure import temporary_folder
from tools.bench.push import PushBench
from tools.bench.results import check_files
from tools.bench.shapes import SHAPES, save_random_model
from tools.bench.soak import SoakBench
from tools.testbed import Scenario, load_scenario
from tools.testbed.cluster import check_possible

_HUB = "hub"  # scenario whose coordinator has its own link
GPT2_LARGE: Mapping[str, Any] = SHAPES["gpt2-large"].config
SMALL_LLAMA: Mapping[str, Any] = {
    "model_type": "llama", "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 12,
    "num_key_value_heads": 6, "num_hidden_layers": 6, "vocab_size": 16000, "max_position_embeddings": 512,
}  # fmt: skip

Model = Annotated[
    Optional[Path],  # noqa: UP045 (typer reads the annotation on Python 3.10)
    typer.Option(
        help="A decoder's directory, or only its config.json. Default: random weights of GPT-2 large, in bfloat16.",
        show_default=False,
    ),
]
Weights = Annotated[
    str,
    typer.Option(help=f"Weight format in the devices' memory: {', '.join(get_args(WeightFormat))}.", metavar="FORMAT"),
]
Json = Annotated[Optional[Path], typer.Option("--json", help="Save the figures to this file.", metavar="FILE")]  # noqa: UP045
Markdown = Annotated[Optional[Path], typer.Option(help="Save the table to this file.", metavar="FILE")]  # noqa: UP045


@handles_errors
def push(
    mbit: Annotated[float, typer.Option(help="Real rate of every link.", min=1)] = 250.0,
    devices: Annotated[int, typer.Option(help="Devices that receive weights, not counting the hub.", min=2, max=4)] = 4,
    model: Model = None,
    weights: Weights = "bfloat16",
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Measure the push of weights to the devices: time, bytes and memory. Needs root."""
    check_files(json, markdown)
    scenario, findings = _with_hub(devices), list[Finding]()
    with working(scenario) as (folder, status):
        model_dir = model_of(model, folder, status)
        with agents(scenario, folder, mbit) as testbed:
            found = collector(findings, json)
            with PushBench(testbed, model_dir, _format(weights), mbit, reporter(status), found) as bench:
                bench.run()
    conclude(f"{scenario.name}, {devices} devices, {mbit:g} Mbit/s", findings, json, markdown)


@handles_errors
def capacity(
    limit: Annotated[str, typer.Option(help="Memory limit of each device.", metavar="SIZE")] = "900M",
    agent: Annotated[str, typer.Option(help="Part of the limit reserved for the agent.", metavar="SIZE")] = "80M",
    devices: Annotated[int, typer.Option(help="Devices, not counting the hub.", min=2, max=4)] = 4,
    model: Model = None,
    weights: Weights = "bfloat16",
    context: Annotated[int, typer.Option(help="Tokens of each answer, with its prompt.", min=2)] = 256,
    sequences: Annotated[int, typer.Option(help="Concurrent answers.", min=1, max=64)] = 4,
    mbit: Annotated[float, typer.Option(help="Real rate of every link.", min=1)] = 500.0,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Serve a model too large for one device on several with kernel memory limits; compare planned and actual memory.

    Needs root.
    """
    check_files(json, markdown)
    limit_bytes, agent_bytes = _bytes("--limit", limit), _bytes("--agent", agent)
    scenario = _with_hub(devices)
    limited = tuple(
        device if device.name == scenario.coordinator else device.model_copy(update={"memory_bytes": limit_bytes})
        for device in scenario.devices
    )
    scenario = Scenario.model_validate({**scenario.model_dump(), "devices": [each.model_dump() for each in limited]})
    with working(scenario) as (folder, status):
        model_dir = model_of(model, folder, status)
        with agents(scenario, folder, mbit, "--memory-bytes", str(limit_bytes - agent_bytes)) as testbed:
            with CapacityBench(testbed, model_dir, _format(weights), context, sequences, reporter(status)) as bench:
                findings, by_device = bench.run()
    title = f"{devices} devices of {limit}, {weights}, {sequences} answers of {context} tokens at once"
    conclude(title, findings, json, markdown, by_device)


@handles_errors
def soak(
    clients: Annotated[int, typer.Option(help="Concurrent clients.", min=1, max=64)] = 8,
    devices: Annotated[int, typer.Option(help="Devices, not counting the hub.", min=2, max=4)] = 3,
    seconds: Annotated[float, typer.Option(help="Duration in seconds.", min=1)] = 120.0,
    model: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="A decoder's directory, or only its config.json. Default: a small Llama.", show_default=False
        ),
    ] = None,
    mbit: Annotated[float, typer.Option(help="Real rate of every link.", min=1)] = 125.0,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Run concurrent clients that cancel a third of their requests; check answers, memory and leftover work.

    Needs root.
    """
    check_files(json, markdown)
    scenario = _with_hub(devices)
    with working(scenario) as (folder, status):
        model_dir = model_of(model, folder, status, SMALL_LLAMA, "float32")
        with agents(scenario, folder, mbit, "--log-level", "debug") as testbed:
            with SoakBench(testbed, model_dir, clients, seconds, reporter(status)) as bench:
                findings, memory = bench.run()
    conclude(f"{clients} clients, {devices} devices, {mbit:g} Mbit/s", findings, json, markdown, memory)


# ---- the same for all -----------------------------------------------------------------------------------------------


@contextmanager
def working(scenario: Scenario | None = None) -> Iterator[tuple[Path, Status]]:
    """A temporary folder and a status line. Raises BadSetting if the scenario cannot be emulated."""
    if scenario is not None:
        check_possible(scenario)
    with temporary_folder() as folder, Status("", console=err) as status:
        yield folder, status


def reporter(status: Status) -> Callable[[str], None]:
    """A callback that updates the status line and raises KeyboardInterrupt after an interrupt."""

    def report(what: str) -> None:
        interrupts.check()
        status.update(what)

    return report


def collector(findings: list[Finding], json: Path | None) -> Callable[[Finding], None]:
    """A callback that prints and saves each figure at once, so that an interrupt loses only the missing ones."""

    def found(each: Finding) -> None:
        findings.append(each)
        err.print(f"{each.what}: {each.measured}", soft_wrap=True, markup=False)
        if json is not None:
            json.write_text(as_json(findings))

    return found


def conclude(title: str, findings: Sequence[Finding], json: Path | None, markdown: Path | None, more: str = "") -> None:
    """Print and save the findings. Exits with 1 if a figure misses its target."""
    text = f"{findings_table(title, findings).markdown()}\n{more}"
    if json is not None:
        json.write_text(as_json(findings))
    if markdown is not None:
        markdown.write_text(text)
    out.print(text, soft_wrap=True, markup=False)
    if not all_hold(findings):
        err.print("[red]error:[/] a figure misses its target; see the table", soft_wrap=True)
        raise typer.Exit(1)


def model_of(
    path: Path | None, folder: Path, status: Status, default: Mapping[str, Any] = GPT2_LARGE, dtype: str = "bfloat16"
) -> Path:
    """The model directory, or random weights in `folder`, without an end token, which they would emit at random."""
    if path is not None and path.is_dir():
        return path
    status.update("making the model")
    config = default if path is None else read_json_object(path)
    return save_random_model(folder / "model", {**config, "bos_token_id": None, "eos_token_id": None}, dtype=dtype)


def _with_hub(devices: int) -> Scenario:
    """The first `devices` devices of the hub scenario, and the hub."""
    scenario = load_scenario(_HUB)
    return scenario.model_copy(update={"devices": (*scenario.devices[:devices], scenario.devices[-1])})


def _bytes(setting: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise BadSetting(setting=setting, reason=str(error)) from None


def _format(weights: str) -> WeightFormat:
    if weights not in get_args(WeightFormat):
        raise BadSetting(setting="--weights", reason=f"'{weights}' is none of {', '.join(get_args(WeightFormat))}")
    return cast(WeightFormat, weights)
