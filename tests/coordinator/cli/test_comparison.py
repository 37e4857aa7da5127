"""Explanations of a plan, planning from a saved profile, and plans measured and compared with their predictions."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import write_model
from support.fleets import TransformerFleet
from support.graphs import cluster_of, save_bfloat16_model, save_two_branch_model, two_branches
from support.home import LOOPBACK, TestHome
from support.models import save_random_model, small_bert
from support.planning import in_process_planning, plan_for
from support.plans import BERT_LARGE, cluster, device_profile, with_rates
from support.profiles import MeasuredProfiles
from support.waiting import wait_for
from typer.testing import CliRunner, Result

from coordinator.cli.app import app
from coordinator.cli.comparison import PlanRunner, PlanTimes, print_comparison, verdict
from coordinator.cli.plans.graph import GraphPlanning, PlannedGraph
from coordinator.cli.plans.live import LiveDevices
from coordinator.cli.plans.transformer import TransformerPlanning
from coordinator.deploy import deployment
from coordinator.deploy.graph import Arrays
from coordinator.devices.profiling import Profiler
from coordinator.models.checkpoint.families import read_spec
from coordinator.plan.graph.auto import plan_graph
from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.methods import GRAPH_METHODS
from coordinator.plan.transformer.choose import plan_transformer
from coordinator.plan.transformer.explain import best_of_each_strategy, bottleneck, candidate_as_json, why_lost, why_won
from coordinator.plan.transformer.request import PlanRequest
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.state import GraphGoal, TransformerGoal
from hearth.errors import StepFailed
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from hearth.plan.transformer import GenerationLimits
from hearth.wire import messages as wire
from hearth.wire.rpc import Reply

SMALL = BERT_LARGE.model_copy(update={"num_layers": 2, "name": "small"})
NAMES = ("kitchen", "attic", "living-room")
WAIT_LIMIT_SECONDS = 120.0  # with a command, on a busy machine; only a failure waits this long


def home_of(speeds: Sequence[float], mbit: float, budgets: Sequence[int] = (8 << 30,) * 3) -> ClusterProfile:
    devices = [
        device_profile(index, speed, SMALL, budget_bytes=budget).model_copy(update={"name": NAMES[index]})
        for index, (speed, budget) in enumerate(zip(speeds, budgets, strict=False))
    ]
    return cluster(devices, mbit)


def request(home: ClusterProfile, strategy: Any = "auto", spec: ModelSpec = SMALL) -> PlanRequest:
    return PlanRequest(spec, home, 284, strategy=strategy)


# ---- explanations ---------------------------------------------------------------------------------------------------


def same_kind(a: TransformerPlan, b: TransformerPlan) -> bool:
    return (a.body.strategy, bool(a.body.modes)) == (b.body.strategy, bool(b.body.modes))


def test_every_strategy_is_priced_on_every_number_of_devices() -> None:
    asked = request(home_of((1, 2, 3), 1000))
    planned = plan_transformer(asked)
    priced = planned.candidates
    assert priced[0] is planned.chosen
    assert len({each.label for each in priced}) == len(priced)
    assert [each.seconds for each in priced[1:]] == sorted(each.seconds for each in priced[1:])
    assert {each.strategy for each in priced} == {"local", "hmp", "sp", "megatron-tp", "pipeline"}
    assert {each.devices for each in priced if each.strategy == "local"} == {(name,) for name in NAMES}
    best = best_of_each_strategy(planned)
    assert best[0] is planned.plan
    assert len({plan.body.strategy for plan in best}) == 5
    assert 5 <= len(best) <= 6  # one more if replicating is worthwhile
    for plan in best[1:]:
        same = [each.seconds for each in priced[1:] if each.plan and same_kind(each.plan, plan)]
        assert plan.predicted.latency_seconds == min(same)


def test_slow_link_and_slow_device_are_named() -> None:
    asked = request(home_of((1, 1, 1), 5))
    slow = with_rates(asked.cluster, lambda link: link.bytes_per_second / (2 if link.source == "id1" else 1))
    sharing = plan_for(request(slow, "hmp"))
    bound = bottleneck(sharing, slow)
    assert bound.sentence.startswith("the link attic → ")
    alone = plan_for(request(slow, "local"))
    assert bottleneck(alone, slow).sentence == f"the compute of {alone.devices[0].name}"
    assert bottleneck(alone, slow).link == ""


def test_reasons_have_sentences_and_json_fields() -> None:
    asked = request(home_of((3, 1), 20, (8 << 30, 320 << 20)))
    planned = plan_transformer(asked)
    assert planned.chosen.label == "local on kitchen"
    reasons = {each.label: why_lost(each, asked.cluster) for each in planned.others}
    assert reasons["local on attic"].startswith("does not fit: ")
    assert re.fullmatch(r"slower by .*x, bound by the link kitchen → attic", reasons["hmp on all 2 devices"])
    won = why_won(planned, asked.cluster, "auto")
    assert "bound by the compute of kitchen" in won
    assert "The fastest on several devices, hmp on kitchen, attic, would take" in won
    for each in planned.candidates:
        fields = candidate_as_json(each, asked.cluster)
        assert (fields["why_not"] is None) == (each is planned.chosen)
        assert (fields["predicted_seconds"] is None) == (fields["missing_bytes"] > 0)


def test_explanation_lists_exactly_the_plans_alternatives() -> None:
    for strategy in ("auto", "hmp", "local"):
        planned = plan_transformer(request(home_of((1, 2, 3), 1000, (8 << 30, 320 << 20, 8 << 30)), strategy))
        priced = [(each.label, each.seconds if each.plan else None, each.reason) for each in planned.others]
        kept = [(each.strategy, each.predicted_seconds, each.reason) for each in planned.plan.alternatives]
        assert priced == kept


def test_requested_strategy_is_not_described_as_the_fastest() -> None:
    asked = request(home_of((3, 1), 20), "hmp")
    planned = plan_transformer(asked)
    assert "hmp was asked for" in why_won(planned, asked.cluster, "hmp")
    assert planned.others[0].seconds < planned.chosen.seconds
    assert "faster, but 'hmp' was asked for" in why_lost(planned.others[0], asked.cluster)


# ---- offline --------------------------------------------------------------------------------------------------------


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `hearth plan` on a small model, without a key or a network."""
    model_dir = write_model(tmp_path / "model")
    spec = read_spec(model_dir)
    devices = [device_profile(index, index + 1.0, spec, 16) for index in range(3)]
    profile = cluster([d.model_copy(update={"name": NAMES[i]}) for i, d in enumerate(devices)], 1000)
    (tmp_path / "profile.json").write_text(profile.model_dump_json())
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("HEARTH_KEY", raising=False)

    def run(*arguments: str, profile: str = "profile.json") -> Result:
        command = ["plan", str(model_dir), "--load-profile", str(tmp_path / profile), *arguments]
        return CliRunner().invoke(app, command)

    run.folder = tmp_path  # type: ignore[attr-defined]
    return run


def test_saved_profile_gives_the_same_plan_offline(offline: Any) -> None:
    first = offline("--json", "--save-profile", str(offline.folder / "again.json"))
    assert first.exit_code == 0, first.output
    again = offline("--json", profile="again.json")
    assert again.output == first.output
    assert {device["name"] for device in json.loads(first.output)["devices"]} <= set(NAMES)
    ClusterProfile.model_validate_json((offline.folder / "again.json").read_text())


def test_plan_says_what_the_loss_of_a_device_costs(offline: Any) -> None:
    text = " ".join(offline("--strategy", "hmp").output.split())
    assert "loss of a device: yes, any one device; predicted pause about 0.9 s: 0.6 s to notice it" in text
    assert re.search(
        r"weights that others store for a loss: .* for kitchen.*; [\d.]+ [KM]iB on all disks together", text
    )
    text = " ".join(offline("--exclude", "attic", "--exclude", "living-room").output.split())
    assert "loss of a device: cannot lose kitchen (there is no other device)" in text
    limits = [argument for name in NAMES for argument in ("--limit", f"{name}=60%")]
    assert "loss of a device: " in offline(*limits).output


def test_explanation_fits_80_columns(offline: Any) -> None:
    for arguments in ([], ["--explain"]):
        result = offline(*arguments)
        assert result.exit_code == 0, result.output
        assert max(map(len, result.output.splitlines())) <= 80
        assert "…" not in result.output
    assert " per step" in result.output
    assert "busiest device" in result.output
    assert result.output.count("chosen") == 1
    priced = json.loads(offline("--explain", "--json").output)["priced"]
    assert priced[0]["why_not"] is None
    assert all(each["why_not"] for each in priced[1:])


def test_limits_and_exclusions_apply_offline(offline: Any) -> None:
    result = offline("--json", "--exclude", "living-room", "--limit", "kitchen=1MiB")
    assert [device["name"] for device in json.loads(result.output)["devices"]] == ["attic"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--limit", "cellar=1GiB"), "no device here is called cellar; there are: attic, kitchen, living-room"),
        (("--exclude", "cellar"), "no device here is called cellar"),
        (("--exclude", "attic", "--exclude", "kitchen", "--exclude", "living-room"), "no device is left"),
        (("--limit", "kitchen"), "NAME=1.5GiB"),
        (("--compare",), "cannot be combined with --compare"),
        (("--rounds", "3"), "it needs --compare"),
    ],
)
def test_invalid_option_is_reported_in_one_line(arguments: tuple[str, ...], message: str, offline: Any) -> None:
    result = offline(*arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def _unlinked(text: str) -> str:
    return json.dumps({**json.loads(text), "links": []})


def _twice(text: str) -> str:
    value = json.loads(text)
    return json.dumps({**value, "devices": [value["devices"][0]] * 2})


def _of_another_model(text: str) -> str:
    return json.dumps({**json.loads(text), "model": BERT_LARGE.model_dump()})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-20], "is not JSON ("),
        (lambda text: "{}", "is not a valid profile (devices: Field required)"),
        (_unlinked, "lacks the link from id0 to id1"),
        (_twice, "names a device twice"),
        (_of_another_model, "was measured for bert-large"),
        (None, "cannot be read"),
    ],
)
def test_invalid_profile_is_reported_in_one_line(damage: Any, message: str, offline: Any) -> None:
    if damage is not None:
        (offline.folder / "bad.json").write_text(damage((offline.folder / "profile.json").read_text()))
    result = offline(profile="bad.json")
    assert result.exit_code == 1
    assert message in result.output
    assert len(result.output.splitlines()) == 1


# ---- measurements ---------------------------------------------------------------------------------------------------


def plan_of(strategy: Any, seconds: float) -> TransformerPlan:
    plan = plan_for(request(home_of((1, 1), 1000), strategy))
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"latency_seconds": seconds})})


def test_prediction_error_is_relative_to_the_median() -> None:
    result = PlanTimes(plan_of("hmp", 1.2), (0.9, 1.0, 5.0))
    assert (result.median_seconds, result.min_seconds) == (1.0, 0.9)
    assert result.error_percent == pytest.approx(20)
    slower = PlanTimes(plan_of("local", 1.0), (2.0,))
    assert slower.error_percent == pytest.approx(-50)
    failed = PlanTimes(plan_of("sp", 1.0), (), "it ran out of memory")
    assert failed.as_json()["failure"] == "it ran out of memory"
    assert verdict([result, slower, failed]).startswith("The chosen plan was the fastest")
    assert "was faster than the chosen plan: 1.00 s" in verdict([slower, result])
    assert verdict([failed, result]).startswith("The chosen plan failed")
    assert verdict([result, failed]).startswith("There was no other plan")


def test_decoder_is_compared_by_the_predicted_request_time(capsys: pytest.CaptureFixture[str]) -> None:
    """The predicted and the measured time in the table are for the same request, which the title names."""
    prefill_seconds, decode_seconds = 0.5, 0.25
    plan = plan_of("hmp", prefill_seconds)
    limits = GenerationLimits(kv_tokens=512, max_sequences=1, prefill_rows=284, prompt_tokens=142, new_tokens=8)
    decoder = plan.model_copy(
        update={
            "body": plan.body.model_copy(update={"generation": limits}),
            "predicted": plan.predicted.model_copy(update={"decode_seconds": decode_seconds}),
        }
    )
    result = PlanTimes(decoder, (2.0, 2.5, 3.0))
    assert result.predicted_seconds == prefill_seconds * 142 / 284 + 8 * decode_seconds == 2.25
    print_comparison([result], 3, as_json=False)
    shown = capsys.readouterr().out
    assert shown.startswith("small: a request of 142 prompt tokens and 8 generated tokens, 3 runs each")
    assert re.search(r"hmp.+2\.25 s.+2\.50 s.+2\.00 s.+-10 %", shown), shown
    print_comparison([PlanTimes(plan, (0.5,))], 1, as_json=False)
    assert capsys.readouterr().out.startswith("small: a step of 284 rows, 1 run each")


class ComparedFleet(TransformerFleet):
    """The devices id0 and id1, on which the strategy `broken` fails at its first step. A device has one worker at a time."""

    def __init__(self, broken: str = "") -> None:
        super().__init__(("id0", "id1"))
        self.broken_strategy = broken
        self.last_epoch = 7
        self.steps: list[int] = []
        self.epochs: set[int] = set()

    async def call(self, device_id: str, message: wire.Message, *arguments: Any, **options: Any) -> Reply:
        if isinstance(message, wire.Load):
            assert device_id not in self.loads
            self.epochs.add(message.plan.epoch)
        reply = await super().call(device_id, message, *arguments, **options)
        if isinstance(message, wire.Unload):
            self.loads.pop(device_id, None)
        return reply

    def run(self, device_id: str, message: wire.Run, arrays: dict[str, np.ndarray[Any, Any]]) -> Reply:
        if self.loads[device_id].plan.body.strategy == self.broken_strategy:
            raise StepFailed(device=device_id, reason="it is broken")
        self.steps.append(len(arrays["token_ids"]))
        return super().run(device_id, message, arrays)


def run_fake(fleet: ComparedFleet, folder: Path, lines: list[str], stop_after: int | None = None) -> list[PlanTimes]:
    model_dir = write_model(folder / "model")
    spec = read_spec(model_dir)
    home = cluster([device_profile(index, 1.0, spec, 16) for index in range(2)], 1000)
    plans = best_of_each_strategy(plan_transformer(PlanRequest(spec, home, 16)))
    links = {(link.source, link.target): link for link in home.links}

    planning = TransformerPlanning(TransformerGoal(model_dir=str(model_dir), seq_len=16))
    comparer = PlanRunner(CoordinatorSettings(state_dir=folder / "state"), lines.append)
    profiler = Profiler(fleet, folder / "profiles")  # type: ignore[arg-type]
    profiler.links.update(links)
    live = LiveDevices(fleet, profiler, [])  # type: ignore[arg-type]

    async def main() -> list[PlanTimes]:
        work = asyncio.ensure_future(comparer.time_plans(planning, plans, live, 3))
        while stop_after is not None and len(fleet.steps) < stop_after and not work.done():
            await asyncio.sleep(0)
        if stop_after is not None:
            work.cancel()
        return await work

    return asyncio.run(main())


def test_plans_run_one_after_another_despite_failures(tmp_path: Path) -> None:
    fleet, lines = ComparedFleet(broken="sp"), list[str]()
    results = run_fake(fleet, tmp_path, lines)
    assert {result.plan.body.strategy for result in results} == {"local", "hmp", "sp", "megatron-tp", "pipeline"}
    for result in results:
        broken = result.plan.body.strategy == "sp"
        seconds = result.plan.predicted.latency_seconds  # which the fleet takes
        assert result.step_seconds == pytest.approx(() if broken else (seconds,) * 3)
        assert ("it is broken" in result.failure) == broken
    assert fleet.epochs == set(range(8, 8 + len(results)))
    assert set(fleet.steps) == {16}
    assert not fleet.loads
    assert sum("failed" in line for line in lines) == 1


@pytest.mark.parametrize("steps", [1, 5, 9])
def test_cancelled_comparison_leaves_no_worker(steps: int, tmp_path: Path) -> None:
    fleet = ComparedFleet()
    with pytest.raises(asyncio.CancelledError):
        run_fake(fleet, tmp_path, [], stop_after=steps)
    assert fleet.epochs
    assert not fleet.loads


class FakePipeline:
    """Counts the requests to a graph's deployment."""

    max_in_flight = 4

    def __init__(self, objective: str) -> None:
        spec = two_branches()
        request = GraphRequest(spec, cluster_of(spec, (1.0, 1.0), 1e9), strategy="local")
        plan = plan_graph(request, time.monotonic).chosen.plan
        self.plan = plan.model_copy(update={"body": plan.body.model_copy(update={"objective": objective})})
        self.asked = self.running = self.most = 0

    async def infer(self, inputs: Any) -> deployment.RunResult[Arrays]:
        self.asked += 1
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        return deployment.RunResult({}, float(self.asked), 0.0, ((0.0,),), ())


@pytest.mark.parametrize(("objective", "at_once", "asked"), [("latency", 1, 4), ("throughput", 4, 5 * 4)])
def test_graph_is_measured_alone_or_with_a_full_pipeline(
    objective: str, at_once: int, asked: int, tmp_path: Path
) -> None:
    model = save_two_branch_model(tmp_path / "model.onnx")
    fake = FakePipeline(objective)
    planning = GraphPlanning(GraphGoal(model_file=str(model)))
    seconds = asyncio.run(planning.measure_seconds(fake, 3))  # type: ignore[arg-type]
    assert (fake.most, fake.asked) == (at_once, asked)
    assert len(seconds) == 3
    assert all(each > 0 for each in seconds)
    if objective == "latency":
        assert seconds == (2.0, 3.0, 4.0)  # the first request is a warm-up


def assert_all_tried(names: Sequence[str], objective: str) -> None:
    """All methods of `auto`; `doppler` only if no method before it has proven its plan to be optimal."""
    methods = {each.name for each in GRAPH_METHODS.select("auto", objective)}
    assert methods - {"doppler"} <= set(names) <= methods


@pytest.mark.parametrize("strategy", ["auto", "heft"])
def test_graph_strategies_with_equal_plans_share_a_run(strategy: str) -> None:
    spec = two_branches(flops=1e6, out_bytes=10)
    asked = GraphRequest(spec, cluster_of(spec, (1e8, 1e8), 1e9), strategy=strategy, time_limit_seconds=2.0)
    planned = PlannedGraph(plan_graph(asked, time.monotonic), asked)
    with in_process_planning():
        plans = asyncio.run(planned.best_of_each_strategy())
    assert plans[0].body == planned.plan.body
    assert plans[0].planner.split(", ")[0] == planned.plan.planner
    tried = [name for plan in plans for name in plan.planner.split(", ")]
    assert len(set(tried)) == len(tried)
    assert_all_tried(tried, "latency")
    assert len({(plan.body, plan.devices) for plan in plans}) == len(plans) < len(tried)


@pytest.mark.parametrize("options", [(), ("--compare",)])
def test_graph_with_unsupported_input_is_rejected_early(options: tuple[str, ...], tmp_path: Path) -> None:
    model = save_bfloat16_model(tmp_path / "model.onnx")
    result = CliRunner().invoke(app, ["plan", str(model), *options, "--key", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert "its tensor x is of bfloat16, which numpy lacks" in " ".join(result.output.split())


@pytest.fixture(scope="module")
def running_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    """Two agents, and a graph that is measured on them once."""
    pytest.importorskip("onnxruntime", reason="onnxruntime has no wheel for this Python here")
    folder = tmp_path_factory.mktemp("home")
    model = save_two_branch_model(folder / "model.onnx", channels=16, size=32)
    with TestHome(folder, model) as home:
        for name in NAMES[:2]:
            home.start_agent(name)
        yield home


@pytest.mark.processes
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_real_agents_run_the_plans_of_a_graph(objective: str, running_home: TestHome) -> None:
    ports = ",".join(f"{LOOPBACK}:{running_home.port(name)}" for name in NAMES[:2])
    command = [
        str(Path(sys.executable).parent / "hearth"), "plan", str(running_home.model_dir), "--compare", "--rounds", "2",
        "--json", "--objective", objective, "--time-limit", "2", "--key", str(running_home.key), "--mdns-interfaces",
        LOOPBACK, "--devices", ports, "--wait", "0.5",
    ]  # fmt: skip
    environ = {**os.environ, "HEARTH_COORDINATOR_STATE_DIR": str(running_home.folder / "state")}
    done = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=WAIT_LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["objective"], found["rounds"]) == (objective, 2)
    assert_all_tried([name for plan in found["plans"] for name in plan["strategy"].split(", ")], objective)
    for plan in found["plans"]:
        assert plan["failure"] is None
        assert len(plan["step_seconds"]) == 2
        assert 0 < plan["min_seconds"] <= plan["median_seconds"]
        assert plan["predicted_seconds"] > 0


@pytest.mark.processes
@pytest.mark.thorough
def test_comparison_leases_real_agents_and_stops_their_workers(profiles: MeasuredProfiles, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    names = ("attic", "kitchen")
    model_dir = save_random_model(tmp_path / "model", small_bert())
    with TestHome(tmp_path, model_dir, profiles) as home:
        for name in names:
            home.start_agent(name)
        home.add_profiles(model_dir, "--seq-len", "32", name="state")
        command = [
            str(Path(sys.executable).parent / "hearth"), "plan", str(model_dir), "--compare", "--seq-len", "32",
            "--key", str(home.key), "--mdns-interfaces", LOOPBACK, "--wait", "0.5",
        ]  # fmt: skip
        ports = ",".join(f"{LOOPBACK}:{home.port(name)}" for name in names)
        environ = {**os.environ, "HEARTH_COORDINATOR_STATE_DIR": str(tmp_path / "state"), "COLUMNS": "80"}

        def compare(*options: str) -> subprocess.Popen[str]:
            arguments = [*command, "--devices", ports, *options]
            return subprocess.Popen(arguments, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

        with compare("--rounds", "1000") as first:
            try:
                pids = wait_for("its workers", lambda: [pid for name in names if (pid := home.worker_pid(name))])
                with compare() as second:
                    _, errors = second.communicate(timeout=WAIT_LIMIT_SECONDS)
                assert second.returncode == 1
                assert "already works for the coordinator" in errors
                assert any(home.worker_pid(name) in pids for name in names)  # and were not disturbed
            finally:
                first.send_signal(signal.SIGINT)
                _, errors = first.communicate(timeout=WAIT_LIMIT_SECONDS)
        assert first.returncode == 130, errors
        assert not any(home.worker_pid(name) for name in names)

        def third() -> tuple[str, str] | None:
            """If a busy agent missed the end of its lease, the lease expires; on a busy machine a lease may be lost."""
            with compare("--rounds", "2", "--json") as process:
                printed, errors = process.communicate(timeout=WAIT_LIMIT_SECONDS)
            assert process.returncode == 0 or "already works for the coordinator" in errors, errors
            return None if process.returncode != 0 or " was lost: " in printed else (printed, errors)

        printed, errors = wait_for("a comparison with the devices free again", third)
        plans = json.loads(printed)["plans"]
        assert {plan["strategy"] for plan in plans} == {"local", "hmp", "sp", "megatron-tp", "pipeline"}, errors
        for plan in plans:
            assert plan["failure"] is None
            assert len(plan["step_seconds"]) == 2
            assert 0 < plan["min_seconds"] <= plan["median_seconds"]
        assert not any(home.worker_pid(name) for name in names)
