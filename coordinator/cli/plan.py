"""`hearth plan`: what would run where, how fast, and why; changes nothing on the devices."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Optional

import typer

from coordinator.cli.options import AsJson, Devices, Interfaces, KeyPath, interface_list
from coordinator.cli.output import err, handles_errors, out, print_json
from coordinator.cli.tables import alternatives_table, plan_tables
from coordinator.config import load_settings
from coordinator.fleet import Fleet
from coordinator.goal import open_model
from coordinator.planners import PlanRequest, make_plan
from coordinator.profiling import Profiler
from coordinator.state import ServingGoal, write_atomically
from hearth.errors import BadSetting, NoDevices, NotAuthorised
from hearth.plan import STRATEGIES, Plan, WireFormat
from hearth.security import HomeKey, agent_access, resolve_credential
from hearth.units import format_seconds

StrategyOption = Annotated[
    str, typer.Option(help=f"auto, {', '.join(STRATEGIES)}: how the devices share the work.", metavar="NAME")
]
SeqLen = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(help="Tokens that one step must hold. Default: what the model takes, at most 512.", min=1),
]
Wire = Annotated[str, typer.Option(help="Activations on the wire: exact, bf16, fp16 or int8.", metavar="FORMAT")]
Lz4 = Annotated[str, typer.Option("--lz4", help="auto, on or off: compress activations.", metavar="WHEN")]
Exclude = Annotated[list[str], typer.Option(help="A device to leave out; may be repeated.", metavar="NAME")]


def goal_of(model: Path, strategy: str, seq_len: int | None, wire: str, lz4: str, exclude: list[str]) -> ServingGoal:
    """The user's wishes, checked. Raises BadSetting."""
    for option, value, allowed in (
        ("--strategy", strategy, ("auto", *STRATEGIES)),
        ("--wire", wire, ("exact", "bf16", "fp16", "int8")),
        ("--lz4", lz4, ("auto", "on", "off")),
    ):
        if value not in allowed:
            raise BadSetting(setting=option, reason=f"'{value}' is none of {', '.join(allowed)}")
    return ServingGoal.model_validate(
        {
            "model_dir": str(model.resolve()),
            "strategy": strategy,
            "seq_len": seq_len,
            "wire": WireFormat.model_validate({"values": wire, "lz4": lz4}),
            "exclude": tuple(exclude),
        }
    )


@handles_errors
def plan(
    model: Annotated[Path, typer.Argument(help="Model directory: config.json, *.safetensors, tokenizer.json.")],
    strategy: StrategyOption = "auto",
    seq_len: SeqLen = None,
    wire: Wire = "exact",
    lz4: Lz4 = "auto",
    exclude: Exclude = [],  # noqa: B006 (typer's way to say "none")
    save: Annotated[Path | None, typer.Option(help="Save the plan as JSON, for `hearth serve --plan`.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds without a new device after which to plan.", min=0.1)] = 1.5,
    static: Devices = None,
    mdns_interfaces: Interfaces = None,
    key: KeyPath = None,
    as_json: AsJson = False,
) -> None:
    """Plan a model on the devices of this home: shares, bytes against budgets, predicted time, alternatives."""
    goal = goal_of(model, strategy, seq_len, wire, lz4, exclude)
    made = asyncio.run(_plan(goal, wait, static or "", mdns_interfaces, key))
    if save is not None:
        write_atomically(save, made.model_dump_json(indent=1))
    if as_json:
        print_json(made.model_dump(mode="json"))
        return
    out.print(*plan_tables(made), sep="\n")
    predicted = made.predicted
    out.print(
        f"predicted: {format_seconds(predicted.total_seconds)} a step "
        f"(busiest device {format_seconds(predicted.compute_seconds)}, "
        f"busiest link {format_seconds(predicted.transfer_seconds)})"
    )
    if made.alternatives:
        out.print(alternatives_table(made))


async def _plan(goal: ServingGoal, wait: float, static: str, interfaces: str | None, key: Path | None) -> Plan:
    credential = resolve_credential(key)
    if not isinstance(credential, HomeKey):
        raise NotAuthorised(role=credential.kind, action="profile devices")
    model = open_model(goal)
    limit = max(wait * 4, 5.0)
    async with Fleet(
        agent_access(credential), None, interfaces=interface_list(interfaces), static_devices=static
    ) as fleet:
        await fleet.settle(wait, 1, limit)
        chosen = [device for device in fleet.usable() if not {device.name, device.device_id} & set(goal.exclude)]
        if not chosen:
            raise NoDevices(seconds=limit)
        profiler = Profiler(fleet, load_settings({}).state_dir / "profiles", lambda line: err.print(line))
        cluster = await profiler.cluster(chosen, model.spec, model.seq_len)
    return make_plan(PlanRequest(model.spec, cluster, model.seq_len, goal.wire, goal.strategy))
