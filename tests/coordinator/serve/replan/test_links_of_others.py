"""Two deployments: the second one is planned for the links that the first one leaves, and neither follows the other around."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import ready_device
from support.planning import plan_for
from support.plans import BERT_LARGE, LLAMA_1B, cluster, device_profile

from coordinator.devices.other_models import TakenByOthers, links_left
from coordinator.devices.registry import Device
from coordinator.devices.shared_media import Pair
from coordinator.plan.simulator import ResourceKind
from coordinator.plan.transformer.cost.layout import PlanLayout
from coordinator.plan.transformer.cost.predict import predict, request_seconds
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest, build_plan, on_subset
from coordinator.plan.transformer.strategies import strategy_of_body
from coordinator.serve.replan.drift import (
    BASELINE_STEPS,
    SUSTAINED_STEPS,
    DriftMonitor,
    ReplanTrigger,
    is_clearly_faster,
)
from coordinator.serve.resources import Resources
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from hearth.wire.messages import AgentState, WorkerStatus

MBIT = 300.0
CHAT, SENTENCES = "chat", "sentences"


def chat_cluster() -> ClusterProfile:
    return cluster([device_profile(index, 1.0, LLAMA_1B, 256) for index in range(3)], MBIT)


def chat_request(devices: ClusterProfile) -> PlanRequest:
    return PlanRequest(LLAMA_1B, devices, 256, strategy="hmp", generation=GenerationRequest(512, sequences=1))


def sentence_cluster(num_devices: int) -> ClusterProfile:
    return cluster([device_profile(index, 1.0) for index in range(num_devices)], MBIT)


def sentence_request(devices: ClusterProfile) -> PlanRequest:
    return PlanRequest(BERT_LARGE, devices, 284)


def traffic_of(plan: TransformerPlan, devices: ClusterProfile) -> dict[Pair, float]:
    """Bytes/s over each link while one step follows the other, as the simulator has them."""
    ids = [device.device_id for device in plan.devices]
    tasks = strategy_of_body(plan.body).tasks(PlanLayout(plan.model, plan.body, devices.subset(tuple(ids)), plan.wire))
    traffic: dict[Pair, float] = defaultdict(float)
    for task in tasks:
        ends = {resource.kind: ids[resource.rank] for resource in task.resources}
        if ResourceKind.SEND in ends:
            pair = ends[ResourceKind.SEND], ends[ResourceKind.RECEIVE]
            traffic[pair] += task.num_bytes / plan.predicted.latency_seconds
    return traffic


class Workers:
    """The workers of both deployments as heartbeats report them; `run` lets minutes pass with this traffic and load."""

    def __init__(self, num_devices: int) -> None:
        self.resources = Resources()
        self._ids = [f"id{index}" for index in range(num_devices)]
        self._seconds = 0.0
        self._sent: dict[tuple[str, Pair], float] = defaultdict(float)
        self._busy: dict[tuple[str, str], float] = defaultdict(float)

    def run(
        self, traffic: Mapping[str, Mapping[Pair, float]], load: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """`traffic` in bytes/s, by deployment and link; `load`: shares of the processor time, by deployment and device."""
        for _ in range(60):
            self._seconds += 5.0
            for name, rates in traffic.items():
                for pair, rate in rates.items():
                    self._sent[name, pair] += 5.0 * rate
            for name, shares in (load or {}).items():
                for device_id, share in zip(self._ids, shares, strict=False):
                    self._busy[name, device_id] += 5.0 * share
            self.resources.sample([self._device(each, traffic) for each in self._ids], self._seconds)

    def _device(self, device_id: str, traffic: Mapping[str, Mapping[Pair, float]]) -> Device:
        workers = tuple(
            WorkerStatus(
                deployment=name,
                state="ready",
                epoch=1,
                busy_seconds=self._busy[name, device_id],
                sent_bytes={pair[1]: int(self._sent[name, pair]) for pair in rates if pair[0] == device_id},
            )
            for name, rates in traffic.items()
        )
        return replace(ready_device(device_id), state=AgentState(boot_id="b", workers=workers))

    def left(self, name: str, devices: ClusterProfile) -> ClusterProfile:
        """The cluster for a plan of this deployment, as `block_cluster` makes it of a profile."""
        taken: TakenByOthers = self.resources.by_others(name)
        links = links_left(taken.traffic(), {(link.source, link.target): link for link in devices.links}, devices.media)
        slower = tuple(
            each.model_copy(update={"blocks": each.blocks.scaled(taken(ready_device(each.device_id)).slowdown)})
            for each in devices.devices
        )
        return devices.model_copy(update={"links": tuple(links.values()), "devices": slower})


def ids_of(plan: TransformerPlan) -> list[str]:
    return [device.device_id for device in plan.devices]


def test_second_model_takes_one_device_while_the_links_are_full_and_three_once_they_are_free() -> None:
    devices, workers = sentence_cluster(3), Workers(3)
    alone = plan_for(sentence_request(workers.left(SENTENCES, devices)))
    assert len(ids_of(alone)) == 3  # without the other model

    chat = plan_for(chat_request(workers.left(CHAT, chat_cluster())))
    assert len(ids_of(chat)) == 3
    traffic = traffic_of(chat, chat_cluster())
    # The ring of prompts takes most of each link: more than 80 % of the time of its sending side.
    assert all(sum(traffic[pair] for pair in traffic if pair[0] == each) * 8e-6 > 0.8 * MBIT for each in ids_of(chat))
    workers.run({CHAT: traffic})

    left = workers.left(SENTENCES, devices)
    shared = plan_for(sentence_request(left))
    assert len(ids_of(shared)) == 1
    assert (
        shared.predicted.latency_seconds
        < build_plan(
            on_subset(sentence_request(left), tuple(ids_of(alone))), alone.body, alone.planner
        ).predicted.latency_seconds
    )
    # The chat model itself is priced with all of the links: its own traffic does not count against it.
    assert workers.left(CHAT, chat_cluster()) == chat_cluster()

    workers.run({CHAT: {}})  # nobody chats
    assert plan_for(sentence_request(workers.left(SENTENCES, devices))).body == alone.body


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_predicted_time_is_the_simulators_price_on_the_links_that_are_left(share: float) -> None:
    devices, workers = sentence_cluster(3), Workers(3)
    workers.run({CHAT: dict.fromkeys((("id0", "id1"), ("id1", "id2"), ("id2", "id0")), share * MBIT * 1e6 / 8)})
    plan = plan_for(sentence_request(workers.left(SENTENCES, devices)))
    assert plan.num_ranks > 1
    by_hand = cluster(devices.devices, (1 - share) * MBIT).subset(tuple(ids_of(plan)))
    price, _ = predict(PlanLayout(plan.model, plan.body, by_hand, plan.wire))
    assert plan.predicted.latency_seconds == pytest.approx(price.latency_seconds, rel=1e-4)
    full, _ = predict(PlanLayout(plan.model, plan.body, devices.subset(tuple(ids_of(plan))), plan.wire))
    assert plan.predicted.latency_seconds > 1.1 * full.latency_seconds


def test_second_model_goes_to_devices_whose_links_are_free() -> None:
    devices, workers = sentence_cluster(5), Workers(5)
    chat = plan_for(chat_request(chat_cluster()))
    load = [device.compute_seconds / chat.predicted.latency_seconds for device in chat.devices]
    workers.run({CHAT: traffic_of(chat, chat_cluster())}, {CHAT: load})
    assert sorted(ids_of(plan_for(sentence_request(workers.left(SENTENCES, devices))))) == ["id3", "id4"]


# ---- no plan follows another one around -----------------------------------------------------------------------------


def revised(name: str, plan: TransformerPlan, devices: ClusterProfile, workers: Workers) -> TransformerPlan:
    """The plan that `Replanner` would change to: the present one, unless another is clearly faster at the same prices."""
    request = (chat_request if name == CHAT else sentence_request)(workers.left(name, devices))
    if name == CHAT:
        request = replace(request, strategy="auto")
    new = plan_for(request)
    old = build_plan(on_subset(request, tuple(ids_of(plan))), plan.body, plan.planner)
    return new if is_clearly_faster(request_seconds(new), request_seconds(old)) else plan


def test_two_models_that_plan_again_by_turns_come_to_rest() -> None:
    """Each turn is an occasion to change the plan, and drift gives far fewer; each sees what the other really sends."""
    clusters = {CHAT: chat_cluster(), SENTENCES: sentence_cluster(3)}
    workers = Workers(3)
    plans = {CHAT: plan_for(chat_request(clusters[CHAT])), SENTENCES: plan_for(sentence_request(clusters[SENTENCES]))}
    changes = []
    for turn in range(12):
        workers.run({name: traffic_of(plan, clusters[name]) for name, plan in plans.items()})
        name = (SENTENCES, CHAT)[turn % 2]
        plan = revised(name, plans[name], clusters[name], workers)
        changes += [turn] if plan is not plans[name] else []
        plans[name] = plan
    assert changes  # both began as if they were alone
    assert len(changes) <= 2
    assert changes[-1] < 4


@settings(max_examples=15)
@given(st.floats(0.1, 0.9), st.lists(st.floats(-0.2, 0.2), min_size=8, max_size=8))
@pytest.mark.thorough
def test_drifting_traffic_of_a_neighbour_changes_a_plan_at_most_once(share: float, drift: list[float]) -> None:
    """Traffic that goes up and down by a fifth, around any mean, makes no plan change to and fro.

    Beside a nearly full link, that changes the rate which is left by a factor of two and more. But only the plan's own
    requests are an occasion to plan again, once they take longer; a plan that has left a link does not come back for its rate.
    """
    devices, workers = sentence_cluster(3), Workers(3)

    def let_chat_send(fraction: float) -> None:
        rate = fraction * MBIT * 1e6 / 8
        workers.run({CHAT: dict.fromkeys((("id0", "id1"), ("id1", "id2"), ("id2", "id0")), rate)})

    let_chat_send(share)
    plan = plan_for(sentence_request(workers.left(SENTENCES, devices)))
    monitor, trigger, changes = DriftMonitor(plan), ReplanTrigger(), 0
    trigger.record_plan(["id0", "id1", "id2"], 0.0)
    for number, each in enumerate([0.0, *drift]):
        let_chat_send(share * (1 + each))
        request = on_subset(sentence_request(workers.left(SENTENCES, devices)), tuple(ids_of(plan)))
        now = build_plan(request, plan.body, plan.planner)
        for _ in range(2 * (BASELINE_STEPS + SUSTAINED_STEPS)):
            monitor.observe(1.0, [device.compute_seconds for device in now.devices], now.predicted.latency_seconds)
        if trigger.reasons_to_replan(["id0", "id1", "id2"], monitor.drift, 300.0 * (number + 1)) is not None:
            new = revised(SENTENCES, plan, devices, workers)
            if new is not plan:
                plan, monitor, changes = new, DriftMonitor(new), changes + 1
            monitor.reset_baseline()
    assert changes <= 1


def test_plan_leaves_links_that_a_neighbour_fills_and_stays_away_while_its_requests_take_as_long_as_before() -> None:
    devices, workers = sentence_cluster(3), Workers(3)
    plan = plan_for(sentence_request(workers.left(SENTENCES, devices)))
    workers.run({CHAT: traffic_of(plan_for(chat_request(chat_cluster())), chat_cluster())})
    alone = revised(SENTENCES, plan, devices, workers)
    assert (plan.num_ranks, alone.num_ranks) == (3, 1)
    monitor = DriftMonitor(alone)
    for _ in range(50):  # whatever the neighbour sends, since this plan sends nothing
        monitor.observe(1.0, [alone.devices[0].compute_seconds], alone.predicted.latency_seconds)
    trigger = ReplanTrigger()
    trigger.record_plan(["id0", "id1", "id2"], 0.0)
    assert trigger.reasons_to_replan(["id0", "id1", "id2"], monitor.drift, 1e6) is None
