"""Kind `versions`: the speed of two checkouts, for instance before and after a change of structure.

Each side runs the programs of its checkout on its own testbed, with the same devices, cores, quotas and link rates. Both
sides stay loaded, and one works at a time in the order A B B A A B B A, so that background load affects both. Both sides
are controlled through interfaces that the versions share: the `hearth` command, the JSON requests of `tools.bench.runner`,
and files. Both run the same plan, made by the old checkout; the new one must read the old format.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pydantic import Field

from coordinator.plan.graph.predict import requests_in_flight
from hearth.errors import InternalError
from hearth.plan.plan import GraphPlan, TransformerPlan, plan_from_json
from hearth.plan.profile import ClusterProfile
from hearth.platform.units import format_seconds
from tools.bench.drive import EngineRunners, Profiles, Report, StoredModel, made_up_prompt
from tools.bench.experiment import Context, Experiment
from tools.bench.homes import agent_names, agents, checkout, decoder_directory, hub_scenario, on_quietest_core
from tools.bench.load import interleaved
from tools.bench.measure import Models, emulated
from tools.bench.results import Record, Summary, Table
from tools.bench.shapes import LLAMA, find_shape
from tools.bench.stats import Ratio, paired_ratio
from tools.graph_models import build, export
from tools.testbed import Testbed, load_scenario
from tools.testbed.cluster import wait_until

MOST_RATIO = 1.02  # new / old seconds; its confidence interval must also reach 1.00 or below
_LAYERS, _ROWS = 4, 284  # of BERT-Large
_STEPS = 3  # per round, of which the median counts
_PROMPT, _TOKENS = 256, 64  # tokens of a generation request
_PIPELINE_DEVICES, _PIPELINE_CORES, _PIPELINE_MBIT = 3, 0.45, 60.0  # number, CPU share and link rate of the devices
_LOAD_SECONDS = 8.0  # at full load, after half as long with one request at a time
_READY_SECONDS = 240.0  # for the coordinator to serve


class Round(NamedTuple):
    """One round of one side: seconds by figure, and its output if it is to be compared."""

    seconds: dict[str, float]
    output: Any = None


Work = Callable[[], Round]
Trees = tuple[Path, Path]  # the old checkout, and the new one
Sides = tuple[Work, Work]  # of these


@dataclass(frozen=True)
class Steps:
    """A case with steps of a transformer. `mbit`: real rate of the links; None: the scenario's rates, scaled."""

    scenario: str
    strategy: str
    mbit: float | None = None
    generates: bool = False  # generate with a Llama with int8 weights instead of running BERT-Large


PIPELINE = "resnet50"
Case = Literal["galaxy-a", "galaxy-c", "slow-hmp", "slow-auto", "generate-local", "generate-hmp", "resnet50"]
STEPS: dict[str, Steps] = {
    "galaxy-a": Steps("galaxy-a", "hmp"),
    "galaxy-c": Steps("galaxy-c", "hmp"),
    "slow-hmp": Steps("galaxy-c", "hmp", 60.0),
    "slow-auto": Steps("galaxy-c", "auto", 60.0),
    "generate-local": Steps("whole-cores", "local", 500.0, generates=True),
    "generate-hmp": Steps("whole-cores", "hmp", 500.0, generates=True),
}


class VersionsRow(Record):
    """One figure of one case. Seconds are by round."""

    case: str
    figure: str
    ratio: Ratio  # over rounds, new / old
    same_output: bool | None  # bit-equal in all rounds; None: nothing to compare
    distrust: str  # background load of the machine; empty if it was small
    old_seconds: tuple[float, ...]
    new_seconds: tuple[float, ...]

    @property
    def holds(self) -> bool:
        return self.ratio.median <= MOST_RATIO and self.ratio.low <= 1.0 and self.same_output is not False


class Versions(Experiment[VersionsRow]):
    """The speed of two checkouts, in alternating rounds. Does not hold if the new one is slower."""

    old: Path = Path("../hearth-old")  # made by `git worktree add ../hearth-old COMMIT`
    new: Path = Path()
    cases: tuple[Case, ...] = get_args(Case)
    rounds: int = Field(15, ge=2)  # of each side and case

    def measure(self, context: Context) -> Iterator[VersionsRow]:
        trees = (checkout("old", self.old), checkout("new", self.new))
        for name in self.cases:
            at = context.folder / name
            at.mkdir()
            make = steps if name in STEPS else pipeline
            with make(name, trees, at, context.report) as works:
                yield from compare(name, works, self.rounds, context.report)

    def summary(self, rows: Sequence[VersionsRow]) -> Summary:
        slower = [f"{row.case} {row.figure}" for row in rows if not row.holds]
        return Summary(
            tables=(Table.of_columns("A ratio below 1 means that the new version is faster", _COLUMNS, rows),),
            failure=f"not shown to be as fast as the old version: {', '.join(slower)}" if slower else "",
        )


_COLUMNS: dict[str, Callable[[VersionsRow], str]] = {
    "case": lambda row: row.case,
    "figure": lambda row: row.figure,
    "old": lambda row: format_seconds(statistics.median(row.old_seconds)),
    "new": lambda row: format_seconds(statistics.median(row.new_seconds)),
    "new / old": lambda row: f"{row.ratio.median:.3f}",
    "95 %": lambda row: f"{row.ratio.low:.3f} to {row.ratio.high:.3f}",
    "rounds": lambda row: str(len(row.old_seconds)),
    "outputs": lambda row: {None: "-", True: "equal", False: "**differ**"}[row.same_output],
    "holds": lambda row: "yes" if row.holds else "**no**",
    "disturbed by": lambda row: row.distrust or "-",
}


def compare(name: str, sides: Sides, rounds: int, report: Report) -> Iterator[VersionsRow]:
    """Measure both sides in rounds; yield a row for each figure."""
    found, load = interleaved(dict(enumerate(sides)), rounds, lambda step: report(f"{name}: {step}"))
    first = found[0][0]
    same = None if first.output is None else all(each.output == first.output for each in (*found[0], *found[1]))
    for figure in first.seconds:
        old, new = (tuple(each.seconds[figure] for each in side) for side in found.values())
        yield VersionsRow(
            case=name, figure=figure, ratio=paired_ratio(new, old), same_output=same, distrust=load.distrust,
            old_seconds=old, new_seconds=new,
        )  # fmt: skip


@contextmanager
def steps(name: str, trees: Trees, folder: Path, report: Report) -> Iterator[Sides]:
    """Rounds of transformer steps or generations, alternating between both checkouts."""
    case = STEPS[name]
    scenario = load_scenario(case.scenario)
    names = [device.name for device in scenario.devices]
    report(f"{name}: making the model and the testbeds")
    model, num_rows = _model(case.generates, folder)
    with ExitStack() as stack:
        old = stack.enter_context(emulated(scenario, folder / "old", case.mbit is not None, trees[0]))
        new = stack.enter_context(emulated(scenario, folder / "new", True, trees[1]))
        new.link_scale = old.link_scale
        for testbed in (old, new):
            testbed.set_mbit(case.mbit)
        runners = [stack.enter_context(EngineRunners(each, names, not case.generates)) for each in (old, new)]
        measured = Profiles(scenario, new, runners[1], report).current(model, names, num_rows, case.mbit)
        context = _PROMPT + _TOKENS if case.generates else None
        plan, text = plan_of_checkout(old, model, measured, case.strategy, num_rows, context)
        rate = min(old.mbit(device.name, case.mbit) for device in plan.devices) * 1e6 / 8
        for each in runners:
            report(f"{name}: loading")
            each.load(name, plan, model, rate, text)
        old_work, new_work = (_work(case, name, model.spec.vocab_size, each) for each in runners)
        yield old_work, new_work


def plan_of_checkout(
    testbed: Testbed, model: StoredModel, profile: ClusterProfile, strategy: str, seq_len: int, context: int | None
) -> tuple[TransformerPlan, str]:
    """The plan that the testbed's checkout makes, also in its file format. `context`: tokens of one sequence, of a decoder."""
    path = testbed.folder / "profile.json"
    path.write_text(profile.model_dump_json())
    options = ["--strategy", strategy, "--seq-len", str(seq_len), "--load-profile", str(path)]
    if context is not None:
        options += ["--context", str(context), "--sequences", "1", "--weights", model.spec.weights]
    text = testbed.plan(str(model.directory), *options)
    return plan_from_json(text, TransformerPlan), text


def _model(generates: bool, folder: Path) -> tuple[StoredModel, int]:
    """The model, and the number of rows of a step or a prompt."""
    if not generates:
        return Models(folder).get(find_shape("bert-large"), _LAYERS, _ROWS), _ROWS
    return StoredModel(decoder_directory(LLAMA, folder, "float32"), folder / "store", "int8"), _PROMPT


def _work(case: Steps, name: str, vocab_size: int, runners: EngineRunners) -> Work:
    prompt = made_up_prompt(vocab_size, _PROMPT)

    def step() -> Round:
        samples = [runners.run(name, _ROWS) for _ in range(_STEPS)]
        return Round({"step": statistics.median(each.seconds for each in samples)}, [each.sums for each in samples])

    def answer() -> Round:
        found = runners.generate(name, prompt, _TOKENS)
        return Round({"prefill": found["prefill"], "decode": found["decode"]}, found["tokens"])

    return answer if case.generates else step


@contextmanager
def pipeline(name: str, trees: Trees, folder: Path, report: Report) -> Iterator[Sides]:
    """Rounds of requests through a full graph pipeline, alternating between both checkouts."""
    scenario = hub_scenario(_PIPELINE_DEVICES, _PIPELINE_MBIT, _PIPELINE_CORES)
    report(f"{PIPELINE}: making the model and the testbeds")
    model = export(build(PIPELINE), folder / f"{PIPELINE}.onnx")
    with ExitStack() as stack:
        homes = [stack.enter_context(agents(scenario, folder, tree=tree)) for tree in trees]
        stack.enter_context(on_quietest_core(scenario))
        objective = ("--objective", "throughput", "--strategy", "pipeline-exact")
        report(f"{PIPELINE}: planning and loading")
        text = _serve(homes, model, objective, ("--time-limit", "10"))
        at_once = requests_in_flight(plan_from_json(text, GraphPlan).body.segments)
        for home in homes:
            wait_until("serving", partial(_is_ready, home), _READY_SECONDS)
        yield partial(_load, homes[0], at_once), partial(_load, homes[1], at_once)


def _serve(homes: Sequence[Testbed], model: Path, options: Sequence[str], plan_options: Sequence[str] = ()) -> str:
    """Start coordinators that serve the same plan, made by the first home. Returns the plan file of that one."""
    devices = agent_names(homes[0])
    addresses = ",".join(map(homes[0].address, devices))
    text = homes[0].plan(str(model), *options, *plan_options, "--devices", addresses)
    for home in homes:
        own = text
        for device in devices:
            own = own.replace(_device_id(homes[0], device), _device_id(home, device))
        path = home.folder / "served-plan.json"
        path.write_text(own)
        home.start_coordinator(str(model), *options, "--plan", str(path), "--min-devices", str(len(devices)))
    return text


def _device_id(home: Testbed, name: str) -> str:
    return str(json.loads((home.folder / name / "state" / "identity.json").read_text())["device_id"])


def _is_ready(home: Testbed) -> bool:
    try:
        home.hearth("bench-model", "--seconds", "0.5", "--json")
    except InternalError:
        return False
    return True


def _load(home: Testbed, at_once: int) -> Round:
    options = ("--concurrency", str(at_once), "--seconds", str(_LOAD_SECONDS), "--json")
    found = json.loads(home.hearth("bench-model", *options))
    if failed := found["alone"]["errors"] or found["load"]["errors"]:
        raise InternalError(where=f"the load of {PIPELINE}", reason=str(failed))
    return Round({"latency": found["alone"]["p50_seconds"], "answer": 1 / found["load"]["per_second"]})
