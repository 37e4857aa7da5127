"""Kind `scenarios`: whether `auto` is as fast as the best single device in every scenario of the testbed, and as predicted.

Each scenario is a home of real agents. `hearth plan` profiles its devices, measures its links and finds its shared media;
planners get that profile as it is. Three workloads: the prefill of an encoder, a decoder's request, and an ONNX graph.
Transformers run in the worker's engine, all plans loaded side by side; the graph is served by the real coordinator.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, TypeAdapter

from coordinator.devices.profile_file import read_transformer_profile
from coordinator.plan.methods import LOCAL
from coordinator.plan.transformer.choose import plan_transformer
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest, on_subset
from hearth.errors import BadSetting
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from tools.bench.drive import EngineRunners, StoredModel, made_up_prompt
from tools.bench.experiment import Context, Experiment, Named
from tools.bench.graph_home import GraphHome
from tools.bench.homes import Model, agent_names, decoder_directory, on_quietest_core
from tools.bench.load import load_between, snapshot
from tools.bench.measure import Models, emulated, without_memory_limits
from tools.bench.plans import describe
from tools.bench.results import Summary
from tools.bench.scenario_findings import AUTO, ScenarioRow, summarise_scenarios
from tools.bench.shapes import find_shape
from tools.bench.stats import rotated
from tools.graph_models import NETWORKS, build, export
from tools.testbed import Scenario, Testbed, load_scenario
from tools.testbed.cluster import check_possible
from tools.testbed.scenario import SCENARIOS

Workload = Literal["prefill", "decoder", "graph"]
# Packets that are lost for good make TCP wait for fractions of a second: that scenario is for correctness only.
_NOT_TIMED = ("wifi-lossy",)
_WITHOUT_LIMIT = 1e9  # bytes/s of a link, as far as codecs are concerned, which choose no lz4 then
# A Llama of 61 million weights.
_LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
    "num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 8000, "max_position_embeddings": 2048,
    "eos_token_id": None,
}  # fmt: skip


class _Measured(NamedTuple):
    """Seconds of one step or request; `prompt` of them are a decoder's until the first token."""

    seconds: float
    prompt: float = 0.0


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def timed_scenarios() -> tuple[str, ...]:
    """The testbed's scenarios, without those for correctness only."""
    return tuple(name for name in sorted(path.stem for path in SCENARIOS.glob("*.toml")) if name not in _NOT_TIMED)


class Scenarios(Experiment):
    """`auto` and the best single device, interleaved, in each scenario and for each workload."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(ScenarioRow)
    # All take hours: an interrupted run goes on with --resume, and --set scenario=wifi-5 --set workload=decoder runs a part.
    PAGE = "scenarios"
    NAMED: ClassVar[Named] = {
        "scenarios": {"title": "auto and the best single device, in every scenario of the testbed but wifi-lossy"}
    }

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
    network: str = "two_branch"  # of `tools.graph_models`
    branch_width: int = Field(256, ge=8, le=1024)  # channels of each branch
    requests: int = Field(5, ge=1)  # to the graph in each round
    time_limit: float = Field(10.0, gt=0)  # seconds of each search for a placement

    def measure(self, context: Context) -> Iterator[ScenarioRow]:
        scenarios = [load_scenario(name) for name in self.scenario or timed_scenarios()]
        for scenario in scenarios:
            check_possible(without_memory_limits(scenario))
        find_shape(self.encoder)
        if self.network not in NETWORKS:
            raise BadSetting(setting="network", reason=f"{self.network!r} is none of {', '.join(sorted(NETWORKS))}")
        yield from context.known
        known = {(row.scenario, row.workload) for row in context.known}
        models = Models(context.folder)
        made: dict[Workload, StoredModel] = {}
        for scenario in scenarios:
            wanted = [workload for workload in self.workload if (scenario.name, workload) not in known]
            if not wanted:
                continue
            with _home(scenario, context) as testbed:
                for workload in wanted:
                    report = _prefixed(context.report, f"{scenario.name}, {workload}: ")
                    if workload == "graph":
                        yield from self._graph(testbed, context.folder, report)
                        continue
                    if workload not in made:
                        report("making the model")
                        made[workload] = self._model(workload, models, context.folder)
                    yield from self._transformer(workload, testbed, made[workload], report)

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
        with EngineRunners(testbed, agent_names(testbed)) as engine:
            distinct = distinct_plans(plans)
            for name in dict.fromkeys(distinct.values()):
                report(f"loading {name}")
                engine.load(name, plans[name], model, plans[name].num_ranks > 1, _WITHOUT_LIMIT, profile=cluster)
            before = snapshot()
            measured = self._rounds(workload, engine, list(dict.fromkeys(distinct.values())), model, report)
            distrust = load_between([(before, snapshot())]).distrust
        for name, plan in plans.items():
            yield ScenarioRow(
                scenario=testbed.scenario.name, workload=workload, strategy=name, plan=describe(plan),
                media=tuple(_names(cluster, medium.device_ids) for medium in cluster.media),
                actual_media=tuple(", ".join(sorted(testbed.scenario.stations(each.name))) for each in testbed.scenario.media),
                predicted_seconds=self._predicted(plan), seconds=tuple(each.seconds for each in measured[distinct[name]]),
                predicted_prompt_seconds=plan.predicted.prompt_seconds,
                prompt_seconds=tuple(each.prompt for each in measured[distinct[name]] if each.prompt),
                same_plan_as=distinct[name] if distinct[name] != name else None, distrust=distrust,
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

    def _rounds(
        self,
        workload: Workload,
        engine: EngineRunners,
        names: Sequence[str],
        model: StoredModel,
        report: Callable[[str], None],
    ) -> dict[str, list[_Measured]]:
        """What each plan took, by round, after a warm-up round."""
        prompt = made_up_prompt(model.spec.vocab_size, self.prompt_tokens)

        def run(name: str) -> _Measured:
            if workload == "prefill":
                return _Measured(engine.run(name, self.seq_len).seconds)
            answer = engine.generate(name, prompt, self.new_tokens)
            return _Measured(answer["prefill"] + answer["decode"], answer["prefill"])

        found: dict[str, list[_Measured]] = {name: [] for name in names}
        report("warming up")
        for name in names:
            run(name)
        for index in range(self.rounds):
            report(f"round {index + 1} of {self.rounds}")
            for name in rotated(names, index):
                found[name].append(run(name))
        return found

    # ---- the graph ------------------------------------------------------------------------------------------------

    def _graph(self, testbed: Testbed, folder: Path, report: Callable[[str], None]) -> Iterator[ScenarioRow]:
        model = folder / f"{self.network}.onnx"
        if not model.exists():
            report("making the network")
            export(build(self.network, branch_width=self.branch_width), model)
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
                    errors=tuple(error for each in served.rounds for error in each.errors),
                )  # fmt: skip

    def summary(self, rows: Sequence[ScenarioRow]) -> Summary:
        return summarise_scenarios(rows)


@contextmanager
def _home(scenario: Scenario, context: Context) -> Iterator[Testbed]:
    """The scenario with an agent on every device except the coordinator's, if it has one to itself."""
    context.report(f"{scenario.name}: putting up {len(scenario.devices)} devices")
    folder = Path(tempfile.mkdtemp(prefix="testbed-", dir=context.folder))
    try:
        with emulated(scenario, folder, real_mbit=False) as testbed:
            for name in agent_names(testbed):
                testbed.start_agent(name)
            yield testbed
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # agents' stores


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
