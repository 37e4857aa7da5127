"""Measures settings on one emulated cluster: profile, links, plans, interleaved rounds, checks."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

from hearth.errors import BadSetting, ModelDoesNotFit
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from hearth.platform.units import format_bytes
from tools.bench.bound import bound_seconds
from tools.bench.drive import EngineRunners, GlooRunners, Profiles, Report, Sample, StoredModel, Traces
from tools.bench.load import BackgroundLoad, interleaved
from tools.bench.plans import (
    GLOO,
    REFERENCE,
    Entry,
    Name,
    Row,
    baseline_of,
    describe,
    plan_for,
    predicted_again,
    reference_plan,
)
from tools.bench.shapes import Shape, save_random_model
from tools.bench.stats import paired_ratio
from tools.testbed import Scenario, Testbed

MIN_ROUNDS = 5  # least number of measured rounds of a setting
PAPER_MBIT = 125 / 190  # the paper's Mbit/s per Mbit/s of our scenarios, at the same ratio of compute to traffic
_MOST_ROUNDS = 2  # most rounds in all, as a multiple of the requested number, if some are disturbed
_RESERVE_BYTES = 1 << 30  # memory to leave free on this machine
_ABOVE_BOUND = (
    "its bound is above its time: a device that waits for tiles saves some of its CPU quota and computes faster afterwards, "
    "which it does not where computations run alone"
)
# Largest relative difference of the output sums from those of `local`: rounding, and losses of the wire format.
_TOLERANCE = {"exact": 1e-4, "fp16": 1e-2, "bf16": 5e-2, "int8": 0.15}


@dataclass(frozen=True)
class Setting:
    """What all rows of one table share. Without a rate, links have the scenario's rates, scaled."""

    scenario: Scenario
    shape: Shape
    num_layers: int
    seq_len: int
    num_devices: int
    mbit: float | None  # real link rate
    paper_mbit: float | None  # instead, a rate of the paper
    entries: tuple[Entry, ...]
    baseline: Name | Literal["lz4 off"]
    rounds: int


@dataclass
class _Steps:
    """A loaded plan and its measured steps."""

    key: str  # id of the plan in the runners
    plan: TransformerPlan | None  # None for gloo
    seq_len: int
    entry: Entry  # the first that has this plan
    samples: list[Sample] = field(default_factory=list)
    computed: list[Traces] = field(default_factory=list)  # of its computations alone, by round; with several devices
    traced: Sample = field(init=False)  # one more step, which is not timed

    @cached_property
    def computations(self) -> str | None:
        """Equal for steps whose devices compute the same, and differ only in what they send; None for those on one device."""
        if self.plan is None or self.plan.num_ranks == 1:
            return None
        body = self.plan.body.model_copy(update={"overlap": True, "exact_links": ()})
        return json.dumps([body.model_dump_json(), *(device.device_id for device in self.plan.devices)])


@dataclass
class _Prepared:
    """One setting, ready to run."""

    setting: Setting
    model: StoredModel
    cluster: ClusterProfile
    rescaled: ClusterProfile
    notes: dict[Entry, list[str]]
    steps: dict[Entry, _Steps] = field(default_factory=dict)  # of the entries that can run; equal steps are shared
    expected: list[float] = field(default_factory=list)  # sums of the reference's output
    keys: list[str] = field(default_factory=list)  # ids of all loaded plans

    @property
    def distinct(self) -> list[_Steps]:
        return list({steps.key: steps for steps in self.steps.values()}.values())


class _CannotRun(Exception):
    """The reason why an entry cannot run in a setting."""


class Models:
    """Creates random checkpoints and their chunks, each only once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, StoredModel] = {}

    def get(self, shape: Shape, num_layers: int, seq_len: int) -> StoredModel:
        config = shape.shortened(num_layers, seq_len)
        key = json.dumps(config, sort_keys=True)  # equal for configurations with equal checkpoints
        if key not in self._made:
            at = self._folder / f"{len(self._made)}" / shape.name
            at.mkdir(parents=True)
            self._made[key] = StoredModel(save_random_model(at, config), at.parent / "store")
        return self._made[key]


def emulated(scenario: Scenario, folder: Path, real_mbit: bool, tree: Path | None = None) -> Testbed:
    """A testbed to be entered.

    The kernel's memory limits are off, because devices hold many plans at once; only planners respect them.
    """
    scale_links = scenario.scale_links and not real_mbit
    unlimited = without_memory_limits(scenario).model_copy(update={"scale_links": scale_links})
    return Testbed(unlimited, folder, tree=tree)


def without_memory_limits(scenario: Scenario) -> Scenario:
    """A copy whose devices have all of this machine's memory."""
    devices = tuple(device.model_copy(update={"memory_bytes": None}) for device in scenario.devices)
    return scenario.model_copy(update={"devices": devices})


class Bench:
    """A testbed with runners that are reused for many settings, until `stack` is left."""

    _gloo: GlooRunners  # if the baseline is wanted

    def __init__(
        self, stack: ExitStack, scenario: Scenario, folder: Path, models: Models, report: Report, *, real_mbit: bool,
        gloo: bool, repeat_disturbed: bool,
    ) -> None:  # fmt: skip
        """`real_mbit`: every setting gives its own rate. `gloo`: also start the gloo baseline."""
        self.scenario, self._models, self._report = scenario, models, report
        self._real_mbit, self._wants_gloo, self._repeat_disturbed = real_mbit, gloo, repeat_disturbed
        names = [device.name for device in scenario.devices]
        report(f"{scenario.name}: putting up {len(names)} devices")
        folder = Path(tempfile.mkdtemp(prefix="testbed-", dir=folder))
        self._testbed = stack.enter_context(emulated(scenario, folder, real_mbit))
        self._engine = stack.enter_context(EngineRunners(self._testbed, names, all_busy=True))
        self._profiles = Profiles(scenario, self._testbed, self._engine, report, repeat_disturbed)
        if gloo:
            self._gloo = stack.enter_context(GlooRunners(self._testbed, names))

    def measure(self, *settings: Setting) -> list[Row]:
        """Measure all entries of the settings (with equal `rounds`), interleaved; rows in the order given. Raises BadSetting.

        Several settings at once must not use gloo, which holds one model on one group of devices at a time.
        """
        prepared = [self._prepare(setting, f"{index}-") for index, setting in enumerate(settings)]
        load = self._rounds([steps for one in prepared for steps in one.distinct], settings[0].rounds)
        # Skipped after an exception: runners may still be busy then, and end with the testbed.
        for one in prepared:
            for key in one.keys:
                self._engine.unload(key)
            if any(steps.plan is None for steps in one.distinct):
                self._gloo.unload()
        return [self._row(entry, one, load) for one in prepared for entry in one.setting.entries]

    def _prepare(self, setting: Setting, prefix: str) -> _Prepared:
        """Load all plans of a setting and run the reference."""
        if setting.paper_mbit is not None:  # the real rate on this machine that corresponds to it
            setting = replace(setting, mbit=setting.paper_mbit / PAPER_MBIT * self._testbed.link_scale)
        self._report(f"{self.scenario.name}: weights of {setting.shape.name}")
        model = self._models.get(setting.shape, setting.num_layers, setting.seq_len)
        names = [device.name for device in self.scenario.devices[: setting.num_devices]]
        self._testbed.set_mbit(setting.mbit)
        cluster = self._profiles.profiled(model, names, setting.seq_len, setting.mbit)
        rescaled = self._profiles.rescaled(cluster, model, setting.seq_len)
        notes = {entry: self._notes(entry, setting, model.spec) for entry in setting.entries}
        prepared = _Prepared(setting, model, cluster, rescaled, notes)
        plans: dict[Entry, TransformerPlan | None] = {}
        for entry in setting.entries:
            try:
                plans[entry] = self._plan(entry, prepared)
            except _CannotRun as reason:
                notes[entry].insert(0, str(reason))
        reference = reference_plan(model.spec, cluster, setting.seq_len)
        self._check_memory([plan for plan in (*plans.values(), reference) if plan is not None], model)
        alone = f"{prefix}{REFERENCE.key}-reference"
        self._load(alone, reference, REFERENCE, prepared)
        prepared.expected = self._engine.run(alone, setting.seq_len).sums
        for entry, plan in plans.items():
            steps = _Steps(prefix + entry.key, plan, setting.seq_len, entry)
            twin = next((other for other in prepared.distinct if _same_steps(steps, other)), None)
            prepared.steps[entry] = twin or steps
            if twin is not None:
                notes[entry].append(f"its plan is that of {twin.entry.strategy} {twin.entry.wire}: measured once")
            elif plan is not None:
                self._load(steps.key, plan, entry, prepared)
            else:
                self._gloo.join(names)
                self._gloo.load(model, entry.is_packed)
        return prepared

    # ---- before the rounds ----------------------------------------------------------------------------------------

    def _rate(self, name: str, mbit: float | None) -> float:
        """Rate of a device's link in bytes per second."""
        return self._testbed.mbit(name, mbit) * 1e6 / 8

    @staticmethod
    def _notes(entry: Entry, setting: Setting, spec: ModelSpec) -> list[str]:
        found = []
        if setting.shape.num_layers > spec.num_layers:
            found.append(f"{spec.num_layers} of its {setting.shape.num_layers} layers")
        if entry.strategy in GLOO:
            found.append("sent bytes are the interfaces', with headers")
        return found

    def _plan(self, entry: Entry, prepared: _Prepared) -> TransformerPlan | None:
        """The plan of an entry; None for gloo. Raises _CannotRun with the reason."""
        setting, spec = prepared.setting, prepared.model.spec
        if setting.num_devices == 1 and entry.strategy not in ("local", "auto"):
            raise _CannotRun("needs two devices")
        if entry.strategy in GLOO:
            if setting.num_devices > spec.num_heads:
                raise _CannotRun(f"{spec.num_heads} heads are too few")
            if spec.rotary is not None or spec.gated:
                raise _CannotRun(f"{entry.strategy} runs BERT, GPT-2 and OPT only")
            return None
        try:
            return plan_for(entry, spec, prepared.cluster, setting.seq_len)
        except ModelDoesNotFit as error:
            raise _CannotRun(f"out of memory: {format_bytes(error.missing_bytes)} are missing") from None

    def _check_memory(self, plans: Sequence[TransformerPlan], model: StoredModel) -> None:
        """Raise BadSetting if all plans do not fit in memory together. Plans with equal shares share their weights."""
        shares: dict[tuple[int, str], int] = {}
        for plan in plans:
            share = plan.body.model_copy(update={"overlap": True, "exact_links": ()}).model_dump_json()
            for rank, device in enumerate(plan.devices):
                shares[rank, share] = device.memory.weights + device.memory.embeddings
        checkpoint = 2 * sum(ref.num_bytes for ref in model.refs) if self._wants_gloo else 0  # plain and packed
        wanted = sum(shares.values()) + checkpoint + _RESERVE_BYTES
        there = psutil.virtual_memory().available
        if wanted > there:
            raise BadSetting(
                setting="layers",
                reason=f"the plans of {model.spec.name} need {format_bytes(wanted)} together, {format_bytes(there)} are "
                "free: run fewer layers or fewer strategies at once",
            )

    def _load(self, key: str, plan: TransformerPlan, entry: Entry, prepared: _Prepared) -> None:
        self._report(f"{self.scenario.name}: loading {key}")
        slowest = min((self._rate(device.name, prepared.setting.mbit) for device in plan.devices), default=1e9)
        self._engine.load(key, plan, prepared.model, slowest, encrypt=entry.encrypt, profile=prepared.cluster)
        prepared.keys.append(key)

    # ---- the rounds -----------------------------------------------------------------------------------------------

    def _rounds(self, steps: Sequence[_Steps], rounds: int) -> BackgroundLoad:
        """Measure the steps in rounds, then run a traced step of each, which is not timed.

        In each round, each plan's computations run once more without communication, for its bound.
        """
        runs: dict[str, Callable[[], Any]] = {}
        for each in steps:
            runs[each.key] = partial(self._step, each)
            if each.computations is not None:
                runs.setdefault(each.computations, partial(self._engine.compute, each.key, each.seq_len))
        most_rounds = rounds * (_MOST_ROUNDS if self._repeat_disturbed else 1)
        found, load = interleaved(runs, rounds, lambda line: self._report(f"{self.scenario.name}: {line}"), most_rounds)
        for each in steps:
            each.samples += found[each.key]
            each.computed += found.get(each.computations or "", [])
            each.traced = each.samples[-1] if each.plan is None else self._engine.run(each.key, each.seq_len, True)
        return load

    def _step(self, run: _Steps) -> Sample:
        if run.plan is None:
            return self._gloo.run(run.seq_len, run.entry.wire, run.entry.is_packed)
        return self._engine.run(run.key, run.seq_len)

    # ---- after the rounds -----------------------------------------------------------------------------------------

    def _row(self, entry: Entry, prepared: _Prepared, load: BackgroundLoad) -> Row:
        setting, spec = prepared.setting, prepared.model.spec
        rates = {self._rate(device.name, setting.mbit) for device in self.scenario.devices[: setting.num_devices]}
        mbit = rates.pop() * 8 / 1e6 if len(rates) == 1 else None
        row = Row(
            scenario=self.scenario.name, devices=setting.num_devices, model=setting.shape.name, layers=spec.num_layers,
            hidden_size=spec.hidden_size, seq_len=setting.seq_len, mbit=mbit, **asdict(entry),
            paper_mbit=None if mbit is None or self._real_mbit else mbit * PAPER_MBIT / self._testbed.link_scale,
            notes=tuple(prepared.notes[entry]),
        )  # fmt: skip
        if entry not in prepared.steps:
            return row
        return Row.model_validate({**row.model_dump(), **self._figures(entry, prepared, load)})

    def _figures(self, entry: Entry, prepared: _Prepared, load: BackgroundLoad) -> dict[str, object]:
        """What was measured of an entry, with the notes on it."""
        run = prepared.steps[entry]
        plan, seconds, traced = run.plan, [sample.seconds for sample in run.samples], run.traced
        values: dict[str, object] = {"seconds": seconds, "sent_bytes": traced.sent_bytes}
        notes = list(prepared.notes[entry])
        if plan is not None:
            values["plan"] = describe(plan)
            if run.computed:
                rates = [self._rate(device.name, prepared.setting.mbit) for device in plan.devices]
                bounds = [bound_seconds(computed, traced.traces, rates) for computed in run.computed]
                share = paired_ratio(bounds, seconds)
                values |= {"bound_seconds": statistics.median(bounds), "bound_share": share}
                if share.median > 1:
                    notes.append(_ABOVE_BOUND)
            if entry.encrypt or plan.num_ranks == 1:
                again = (entry, plan, prepared.model.spec, prepared.rescaled, prepared.setting.seq_len)
                values |= {
                    "predicted_seconds": plan.predicted.latency_seconds, "rescaled_seconds": predicted_again(*again),
                }  # fmt: skip
            else:
                notes.append("not predicted: the planner prices encrypted links")
            if entry.strategy == "auto":
                notes.append(f"auto took {describe(plan)}")
        baseline = baseline_of(entry, list(prepared.steps), prepared.setting.baseline)
        if baseline is not None:
            base = [sample.seconds for sample in prepared.steps[baseline].samples]
            values |= {"baseline": baseline.label, "speedup": paired_ratio(base, seconds)}
        error = max(relative_error(sample.sums, prepared.expected) for sample in (*run.samples, traced))
        if not error <= _TOLERANCE[entry.wire]:  # NaN too
            notes.append(f"its output is off by {error:.2g} of local's")
            values["wrong"] = True
        if load.disturbed_rounds:
            notes.append(f"{load.disturbed_rounds} rounds more, which were disturbed, do not count")
        if load.distrust:
            notes.append(f"untrusted: {load.distrust}")
            values["trusted"] = False
        return {**values, "notes": tuple(notes)}


def _same_steps(one: _Steps, other: _Steps) -> bool:
    """Whether steps of both are equal, so that a difference of their times would be noise."""
    if one.plan is None or other.plan is None or one.plan.body != other.plan.body:
        return False
    if [device.device_id for device in one.plan.devices] != [device.device_id for device in other.plan.devices]:
        return False
    return one.plan.num_ranks == 1 or (one.plan.wire, one.entry.encrypt) == (other.plan.wire, other.entry.encrypt)


def relative_error(sums: Sequence[float], expected: Sequence[float]) -> float:
    """Relative error of the whole vector in the Euclidean norm; infinite if the lengths differ."""
    if len(sums) != len(expected):
        return float("inf")
    return float(np.linalg.norm(np.subtract(sums, expected)) / np.linalg.norm(expected))
