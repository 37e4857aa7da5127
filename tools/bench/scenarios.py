"""Kind `scenarios`: whether `auto` is as fast as the best single device in every scenario of the testbed, and as predicted.

Each scenario is a home of real agents. `hearth plan` profiles its devices, measures its links and finds its shared media;
planners get that profile as it is. Three workloads: the prefill of an encoder, a decoder's request, and an ONNX graph.
Transformers run in the worker's engine, all plans loaded side by side; the graph is served by the real coordinator.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from coordinator.devices.profile_file import read_transformer_profile
from coordinator.plan.methods import LOCAL
from coordinator.plan.transformer.choose import plan_transformer
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest, on_subset
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from hearth.platform.units import format_seconds
from tools.bench.drive import EngineRunners, StoredModel, made_up_prompt
from tools.bench.experiment import Context, Experiment
from tools.bench.graphs import GraphHome
from tools.bench.homes import Model, agent_names, agents, decoder_directory, on_quietest_core
from tools.bench.load import interleaved, load_between, snapshot
from tools.bench.measure import Models, without_memory_limits
from tools.bench.plans import describe
from tools.bench.results import COUNT, PERCENT, Finding, Record, Summary, Table, at_most, summarise, without_target
from tools.bench.shapes import find_shape, llama
from tools.bench.stats import Ratio, paired_ratio
from tools.graph_models import build, export
from tools.testbed import Testbed, load_scenario
from tools.testbed.cluster import check_possible
from tools.testbed.scenario import SCENARIOS

AUTO = "auto"
TARGET_ERROR = 0.20  # median of the relative errors of predictions, in each scenario
TARGET_RATIO = 1.05  # `auto` / the best single device, median of paired rounds
CLAIM_ROUNDS = 15  # rounds that a claim needs


class ScenarioRow(Record):
    """One plan of a workload in a scenario. `same_plan_as`: the strategy whose plan is the same, measured once for both."""

    scenario: str
    workload: str
    strategy: str
    plan: str  # in a few words
    media: tuple[str, ...] = ()  # devices of each medium in the profile; of graphs: not recorded
    actual_media: tuple[str, ...] | None = None  # those of the scenario; of graphs: not recorded
    predicted_seconds: float = Field(gt=0)
    seconds: tuple[float, ...] = Field(min_length=1)  # by round
    same_plan_as: str | None = None
    distrust: str = ""  # why the times cannot be trusted: other programs ran during the rounds

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)

    @property
    def prediction_error(self) -> float:
        """predicted / median - 1."""
        return self.predicted_seconds / self.median_seconds - 1

    @property
    def at(self) -> str:
        return f"{self.scenario}, {self.workload}"


def _best_single_device(row: ScenarioRow, rows: Iterable[ScenarioRow]) -> ScenarioRow | None:
    """The row to compare with. None: the same plan, or no single device was measured."""
    local = next((each for each in rows if each.at == row.at and each.strategy == LOCAL), None)
    return None if row is local or row.same_plan_as == LOCAL else local


def ratio_to_local(row: ScenarioRow, rows: Iterable[ScenarioRow]) -> Ratio | None:
    """Time over that of the best single device in the same rounds. None: the same plan, or no single device was measured."""
    local = _best_single_device(row, rows)
    return paired_ratio(row.seconds, local.seconds) if local else None


def rescaled_error(row: ScenarioRow, rows: Iterable[ScenarioRow]) -> float | None:
    """Relative error of the prediction, rescaled by the steps of the best single device in the same rounds.

    It leaves out what made all devices slower or faster alike since they were profiled. None: in the same cases as
    `ratio_to_local`.
    """
    local = _best_single_device(row, rows)
    if local is None:
        return None
    return row.predicted_seconds / local.predicted_seconds / paired_ratio(row.seconds, local.seconds).median - 1


def summarise_scenarios(rows: Sequence[ScenarioRow]) -> Summary:
    """Findings by scenario, and the table of all rows."""
    findings: list[Finding] = []
    for scenario in dict.fromkeys(row.scenario for row in rows):
        group = [row for row in rows if row.scenario == scenario]
        measured = [row for row in group if row.same_plan_as is None]
        errors = [abs(row.prediction_error) for row in measured]
        worst = max(measured, key=lambda row: abs(row.prediction_error))
        detail = f"{len(errors)} plans; worst {worst.prediction_error:+.0%}: {worst.workload}, {worst.strategy}"
        figure = f"{scenario}: error of predictions, median"
        findings.append(at_most(figure, statistics.median(errors), TARGET_ERROR, PERCENT, detail))
        rescaled = [abs(error) for row in measured if (error := rescaled_error(row, rows)) is not None]
        if rescaled:
            figure = f"{scenario}: the same, rescaled by the best single device"
            findings.append(
                without_target(figure, statistics.median(rescaled), PERCENT, f"{len(rescaled)} other plans")
            )
        findings += [_of_auto(row, rows) for row in group if row.strategy == AUTO]
        wrong = {f"{row.workload}: {each}" for row in group for each in {*row.media} ^ {*(row.actual_media or ())}}
        figure = f"{scenario}: media missed or invented"
        findings.append(at_most(figure, len(wrong), 0, COUNT, "; ".join(sorted(wrong))))
    least = min((len(row.seconds) for row in rows), default=0)
    title = f"{least} rounds" + ("" if least >= CLAIM_ROUNDS else f"; a claim needs {CLAIM_ROUNDS}")
    return summarise(title, findings, _table(rows))


def _of_auto(row: ScenarioRow, rows: Sequence[ScenarioRow]) -> Finding:
    figure = f"{row.at}: time of auto, over that of the best single device"
    if row.same_plan_as == LOCAL:
        return without_target(figure, 1.0, "{:.2f}".format, "the same plan, measured once")
    ratio = ratio_to_local(row, rows)
    assert ratio is not None, f"{row.at}: no single device was measured"
    return at_most(figure, ratio.median, TARGET_RATIO, "{:.2f}".format, f"{ratio.interval}, {row.plan}")


def _table(rows: Sequence[ScenarioRow]) -> Table:
    def over(row: ScenarioRow) -> object:
        ratio = ratio_to_local(row, rows)
        return ratio if ratio is not None else "same plan" if row.same_plan_as else "-"

    def rescaled(row: ScenarioRow) -> str:
        error = rescaled_error(row, rows)
        return "-" if error is None else f"{error:+.0%}"

    media = dict.fromkeys(f"{row.scenario}: one medium for {each}" for row in rows for each in row.media)
    distrusted = dict.fromkeys(f"{row.at}: untrusted, {row.distrust}" for row in rows if row.distrust)
    columns: Mapping[str, Callable[[ScenarioRow], object]] = {
        "scenario, workload": lambda row: f"{row.at} (untrusted)" if row.distrust else row.at,
        "strategy": lambda row: row.strategy,
        "plan": lambda row: row.plan,
        "predicted": lambda row: format_seconds(row.predicted_seconds),
        "measured": lambda row: format_seconds(row.median_seconds),
        "error": lambda row: f"{row.prediction_error:+.0%}",
        "rescaled": rescaled,
        "over one device": over,
    }
    return Table.of_columns("seconds of one step or request", columns, rows, [*media, *distrusted])


Workload = Literal["prefill", "decoder", "graph"]
# Packets that are lost for good make TCP wait for fractions of a second: that scenario is for correctness only.
_NOT_TIMED = ("wifi-lossy",)
_WITHOUT_LIMIT = 1e9  # bytes/s of a link, as far as codecs are concerned, which choose no lz4 then
# A Llama of 61 million weights.
_LLAMA = llama(hidden=1024, ffn=2816, heads=16, kv_heads=4, layers=4, vocabulary=8000, positions=2048)


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def timed_scenarios() -> tuple[str, ...]:
    """The testbed's scenarios, without those for correctness only."""
    return tuple(name for name in sorted(path.stem for path in SCENARIOS.glob("*.toml")) if name not in _NOT_TIMED)


class Scenarios(Experiment[ScenarioRow]):
    """`auto` and the best single device, interleaved, in each scenario and for each workload."""

    # Names, or TOML files; empty: all that are timed.
    scenario: Annotated[tuple[str, ...], BeforeValidator(_several)] = ()
    workload: Annotated[tuple[Workload, ...], BeforeValidator(_several), Field(min_length=1)] = (
        "prefill", "decoder", "graph",
    )  # fmt: skip
    also: tuple[Literal["hmp", "sp", "pipeline"], ...] = ("hmp",)  # other plans of transformers, for their predictions
    rounds: int = Field(15, ge=3)
    encoder: str = "bert-base"  # a shape, or a config.json
    layers: int = Field(4, ge=1)  # of the encoder; fewer than it has
    seq_len: int = Field(284, ge=1)  # tokens of the prefill
    decoder: Model = _LLAMA
    prompt_tokens: int = Field(64, ge=1)
    new_tokens: int = Field(24, ge=2)
    branch_width: int = Field(256, ge=8, le=1024)  # channels of each branch of the graph
    requests: int = Field(5, ge=1)  # to the graph in each round
    time_limit: float = Field(10.0, gt=0)  # seconds of each search for a placement

    def measure(self, context: Context) -> Iterator[ScenarioRow]:
        scenarios = [load_scenario(name) for name in self.scenario or timed_scenarios()]
        for scenario in scenarios:
            check_possible(without_memory_limits(scenario))
        find_shape(self.encoder)
        yield from context.known
        known = {(row.scenario, row.workload) for row in context.known}
        models = Models(context.folder)
        made: dict[Workload, StoredModel] = {}
        for scenario in scenarios:
            wanted = [workload for workload in self.workload if (scenario.name, workload) not in known]
            if not wanted:
                continue
            context.report(f"{scenario.name}: putting up {len(scenario.devices)} devices")
            with agents(without_memory_limits(scenario), context.folder) as testbed:
                for workload in wanted:
                    report = _prefixed(context.report, f"{scenario.name}, {workload}: ")
                    if workload == "graph":
                        yield from self._graph(testbed, context.folder, report)
                        continue
                    if workload not in made:
                        report("making the model")
                        made[workload] = self._model(workload, models, context.folder)
                    yield from self._transformer(workload, testbed, made[workload], report)
            shutil.rmtree(testbed.folder, ignore_errors=True)  # agents' stores

    # ---- transformers ---------------------------------------------------------------------------------------------

    def _model(self, workload: Workload, models: Models, folder: Path) -> StoredModel:
        if workload == "prefill":
            return models.get(find_shape(self.encoder), self.layers, self.seq_len)
        return StoredModel(decoder_directory(self.decoder, folder, "bfloat16"), folder / "decoder-store", "int8")

    def _transformer(
        self, workload: Workload, testbed: Testbed, model: StoredModel, report: Callable[[str], None]
    ) -> Iterator[ScenarioRow]:
        report("profiling")
        cluster = home_profile(testbed, model, self._step_rows(workload))
        plans = {name: self._plan(workload, name, model, cluster) for name in (LOCAL, AUTO, *self.also)}
        prompt = made_up_prompt(model.spec.vocab_size, self.prompt_tokens)
        with EngineRunners(testbed, agent_names(testbed)) as engine:

            def run(name: str) -> float:
                """Seconds of one step or request."""
                if workload == "prefill":
                    return engine.run(name, self.seq_len).seconds
                answer = engine.generate(name, prompt, self.new_tokens)
                return float(answer["prefill"] + answer["decode"])

            distinct = distinct_plans(plans)
            for name in dict.fromkeys(distinct.values()):
                report(f"loading {name}")
                engine.load(name, plans[name], model, _WITHOUT_LIMIT, profile=cluster)
            runs = {name: partial(run, name) for name in distinct.values()}
            measured, load = interleaved(runs, self.rounds, report)
        for name, plan in plans.items():
            yield ScenarioRow(
                scenario=testbed.scenario.name, workload=workload, strategy=name, plan=describe(plan),
                media=tuple(_names(cluster, medium.device_ids) for medium in cluster.media),
                actual_media=tuple(", ".join(sorted(testbed.scenario.stations(each.name))) for each in testbed.scenario.media),
                predicted_seconds=self._predicted(plan), seconds=tuple(measured[distinct[name]]),
                same_plan_as=distinct[name] if distinct[name] != name else None, distrust=load.distrust,
            )  # fmt: skip

    def _step_rows(self, workload: Workload) -> int:
        return self.seq_len if workload == "prefill" else self.prompt_tokens

    def _plan(self, workload: Workload, strategy: str, model: StoredModel, cluster: ClusterProfile) -> TransformerPlan:
        """The plan of a strategy; of `local` the best one by its prediction, as `auto` compares them."""
        generation = None
        if workload == "decoder":
            context = self.prompt_tokens + self.new_tokens
            generation = GenerationRequest(context, 1, self.prompt_tokens, self.new_tokens)
        rows = self._step_rows(workload)
        request = PlanRequest(model.spec, cluster, rows, strategy=strategy, generation=generation)
        if strategy != LOCAL:
            return plan_transformer(request).plan
        alone = (plan_transformer(on_subset(request, (each.device_id,))).plan for each in cluster.devices)
        return min(alone, key=self._predicted)

    def _predicted(self, plan: TransformerPlan) -> float:
        """Seconds of a step, or of a whole request to a decoder, as `auto` compares them."""
        if plan.body.generation is None:
            return plan.predicted.latency_seconds
        return plan.predicted.prompt_seconds + (self.new_tokens - 1) * plan.predicted.decode_seconds

    # ---- the graph ------------------------------------------------------------------------------------------------

    def _graph(self, testbed: Testbed, folder: Path, report: Callable[[str], None]) -> Iterator[ScenarioRow]:
        model = folder / "two_branch.onnx"
        if not model.exists():
            report("making the network")
            export(build("two_branch", branch_width=self.branch_width), model)
        one_by_one = {"at_once": 1, "warm_up": 1, "count": self.requests}
        with on_quietest_core(testbed.scenario), GraphHome(testbed, model, "latency", report) as home:
            candidates = [home.make_plan(name, name, self.time_limit) for name in (LOCAL, AUTO)]
            same = candidates[0].key == candidates[1].key
            before = snapshot()
            rows = list(home.measure(candidates, lambda _: one_by_one, self.rounds))
            distrust = load_between([(before, snapshot())]).distrust
            for served in rows:
                yield ScenarioRow(
                    scenario=testbed.scenario.name, workload="graph", strategy=served.label,
                    plan=f"{served.segments} segments on {', '.join(served.devices)}",
                    predicted_seconds=served.predicted_seconds, seconds=served.seconds,
                    same_plan_as=LOCAL if same and served.label == AUTO else None, distrust=distrust,
                )  # fmt: skip

    def summary(self, rows: Sequence[ScenarioRow]) -> Summary:
        return summarise_scenarios(rows)


def home_profile(testbed: Testbed, model: StoredModel, num_rows: int) -> ClusterProfile:
    """The profile that `hearth plan` makes of the home's devices and links, with the media that it finds."""
    path = testbed.folder / "profile.json"
    testbed.plan(
        str(model.directory), "--strategy", LOCAL, "--seq-len", str(num_rows), "--weights", model.spec.weights,
        "--devices", ",".join(map(testbed.address, agent_names(testbed))), "--save-profile", str(path),
    )  # fmt: skip
    return read_transformer_profile(path, model.spec)


def distinct_plans(plans: Mapping[str, TransformerPlan]) -> dict[str, str]:
    """For each plan, the first one that runs the same steps on the same devices: only that is measured."""
    first: dict[tuple[object, ...], str] = {}
    found = {}
    for name, plan in plans.items():
        key = (plan.body.model_dump_json(), *(device.device_id for device in plan.devices))
        found[name] = first.setdefault(key, name)
    return found


def _names(cluster: ClusterProfile, device_ids: Sequence[str]) -> str:
    return ", ".join(sorted(device.name for device in cluster.devices if device.device_id in device_ids))


def _prefixed(report: Callable[[str], None], prefix: str) -> Callable[[str], None]:
    return lambda line: report(prefix + line)
