"""What workers say that they send to each other, in a home of real processes, against the bytes of the plan's tasks."""

from __future__ import annotations

from collections import defaultdict
from itertools import permutations
from pathlib import Path

import pytest
from support.home import home_of
from support.models import save_random_model, small_bert
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from coordinator.devices.shared_media import Pair
from coordinator.plan.simulator import ResourceKind
from coordinator.plan.transformer.cost.layout import PlanLayout
from coordinator.plan.transformer.strategies import strategy_of_body
from coordinator.serve.replan.drift import BASELINE_STEPS, SUSTAINED_STEPS
from hearth.client.sync import Home
from hearth.plan.plan import TransformerPlan, is_transformer_plan
from hearth.plan.profile import BlockProfile, ClusterProfile, DeviceProfile, LatencyCurve, Link

pytestmark = pytest.mark.processes

NUM_REQUESTS = BASELINE_STEPS + SUSTAINED_STEPS  # one more, and drift on a busy machine might change the plan
SEQ_LEN = 64
_WARM_UP_TOKENS = 8  # of the one step before the requests


def planned_bytes(plan: TransformerPlan) -> dict[Pair, int]:
    """The bytes of tiles that a request of `SEQ_LEN` rows moves over each link, by the simulator's tasks."""
    curve = LatencyCurve(sizes=(1,), seconds=(1e-3,))  # times do not matter here
    names = ("qkv", "core", "out", "up", "down", "connective", "embedding", "mlp_rows")
    blocks = BlockProfile(seq_len=SEQ_LEN, **dict.fromkeys(names, curve))
    ids = [device.device_id for device in plan.devices]
    cluster = ClusterProfile(
        devices=tuple(DeviceProfile(device_id=each, name=each, budget_bytes=1 << 30, blocks=blocks) for each in ids),
        links=tuple(
            Link(source=a, target=b, bytes_per_second=1e9, round_trip_seconds=1e-4) for a, b in permutations(ids, 2)
        ),
    )
    tasks = strategy_of_body(plan.body).tasks(PlanLayout(plan.model, plan.body, cluster, plan.wire))
    planned: dict[Pair, int] = defaultdict(int)
    for task in tasks:
        ends = {resource.kind: ids[resource.rank] for resource in task.resources}
        if ResourceKind.SEND in ends:
            planned[ends[ResourceKind.SEND], ends[ResourceKind.RECEIVE]] += task.num_bytes
    return planned


def sent_bytes(home: Home) -> dict[Pair, int]:
    """The coordinator's latest counts."""
    return {
        (device.device_id, target): num_bytes
        for device in home.devices().devices
        for worker in device.workers
        for target, num_bytes in worker.sent_bytes.items()
    }


def test_workers_count_the_bytes_that_the_plan_moves(profiles: MeasuredProfiles, tmp_path: Path) -> None:
    model = save_random_model(tmp_path / "model", small_bert())
    options = ("--strategy", "hmp", "--seq-len", str(SEQ_LEN), "--lz4", "off")
    with home_of("abc", tmp_path / "home", model, profiles, *options) as started, started.ready() as home:
        plan = home.status().plan
        assert plan is not None
        assert is_transformer_plan(plan)
        assert plan.num_ranks == 3
        planned = planned_bytes(plan)
        ring = {pair: num_bytes for pair, num_bytes in planned.items() if num_bytes > max(planned.values()) / 2}
        assert len(ring) == 3
        # Spread over the vocabulary, as plans take them: each rank sends the rows of embeddings that it holds.
        tokens = [1 + 29 * number % SEQ_LEN * (plan.model.vocab_size - 2) // SEQ_LEN for number in range(SEQ_LEN)]
        for _ in range(NUM_REQUESTS):
            home.hidden_states(tokens, 120.0)

        def counted() -> dict[Pair, int] | None:
            """The counts, once heartbeats have told those of the last request."""
            counts = sent_bytes(home)
            told = all(counts.get(pair, 0) >= 0.97 * NUM_REQUESTS * num_bytes for pair, num_bytes in ring.items())
            return counts if told else None

        counts = wait_for("the counts of all requests", counted)
        assert {pair for pair, num_bytes in counts.items() if num_bytes} == planned.keys()
        warm_up = _WARM_UP_TOKENS / SEQ_LEN  # of a request
        for pair, num_bytes in ring.items():
            assert counts[pair] <= 1.05 * (NUM_REQUESTS + warm_up) * num_bytes

        def shown() -> bool:
            home.hidden_states(tokens, 120.0)
            return home.models()[0].sent_bytes_per_second > 0

        wait_for("the traffic of the model", shown)  # the coordinator looks at the counts every 5 s
