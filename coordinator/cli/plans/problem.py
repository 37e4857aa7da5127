"""Planning of published placement problems for `hearth plan`; devices and times come from the file."""

from __future__ import annotations

from pathlib import Path

from coordinator.cli.output import out, print_json, write_file
from coordinator.cli.plans.flow import OutputOptions
from coordinator.cli.plans.graph import NUM_ALTERNATIVES, report_strategy
from coordinator.cli.render.graph_tables import candidates_table, planned_as_json, proof_line
from coordinator.cli.render.picture import dot_graph
from coordinator.devices.cluster_file import read_instance
from coordinator.serve.planners.process import solve_instance
from coordinator.serve.state import GraphGoal
from hearth.errors import BadSetting


async def plan_problem(goal: GraphGoal, output: OutputOptions) -> None:
    """Solve a placement problem and print the result, without a unit: the file names none. Raises HearthError."""
    path = Path(goal.model_file)
    if goal.objective != "latency":
        reason = f"{path} is a placement problem with its own devices; only latency is supported"
        raise BadSetting(setting="--objective", reason=reason)
    problem = read_instance(path, goal.congestion)
    planned = await solve_instance(goal, report_strategy)
    solution = planned.chosen.solution
    assert solution is not None
    assignment = solution.assignment.devices
    used = problem.used_bytes(assignment)
    rows = []
    for device, name in enumerate(problem.devices):
        own = [operator for operator, rank in enumerate(assignment) if rank == device]
        busy = sum(problem.seconds[operator][device] for operator in own)
        memory = f"memory {used[device]} of {problem.budget_bytes[device]}"
        rows.append(f"{name}: {len(own)} operators, busy {busy:.6g}, {memory}")
    if output.picture is not None:
        title = f"{problem.name} by {planned.chosen.strategy}: {solution.value:.6g}"
        edges = [(flow.source, target) for flow in problem.flows for target in flow.targets]
        operators = [(name,) for name in problem.operators]
        write_file("--picture", output.picture, dot_graph(title, rows, operators, assignment, edges))
    if output.as_json:
        print_json({**planned_as_json(planned, goal, problem.devices, "as in the file"), "model": problem.name})
        return
    out.print(f"{problem.name}: {problem.num_operators} operators on {problem.num_devices} devices")
    out.print(*rows, sep="\n", markup=False)
    out.print(proof_line(planned.chosen, ""))
    out.print(candidates_table(planned, "latency", "", None if output.explain else NUM_ALTERNATIVES))
    if output.picture is not None:
        out.print(f"wrote {output.picture}")
