"""A home of three devices that run an encoder: bytes that workers count, a killed worker, a standby, a revoked device."""

from __future__ import annotations

import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import permutations

import numpy as np
import pytest
from support.clients import Clients
from support.home import LOOPBACK, TestHome, plan_devices, plan_of
from support.models import save_random_model, small_bert
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from coordinator.devices.shared_media import Pair
from coordinator.plan.simulator import ResourceKind
from coordinator.plan.transformer.cost.layout import PlanLayout
from coordinator.plan.transformer.strategies import strategy_of_body
from coordinator.serve.replan.drift import BASELINE_STEPS, SUSTAINED_STEPS
from hearth.client.sync import Home, connect
from hearth.errors import HearthError
from hearth.plan.plan import TransformerPlan, is_transformer_plan
from hearth.plan.profile import BlockProfile, ClusterProfile, DeviceProfile, LatencyCurve, Link
from hearth.platform.security import HomeKey, agent_trust, load_credential, new_device_key, save_credential

pytestmark = pytest.mark.processes

NUM_REQUESTS = BASELINE_STEPS + SUSTAINED_STEPS  # one more, and drift on a busy machine might change the plan
SEQ_LEN = 64
TOKENS = list(range(5, 45))
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


@pytest.fixture(scope="module")
def encoder_home(profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    """Three agents, of which b has a key of its own and must be added."""
    model = save_random_model(tmp_path_factory.mktemp("model"), small_bert(num_hidden_layers=4))
    with TestHome(tmp_path_factory.mktemp("home"), model, profiles) as home:
        credential = load_credential(home.key)
        assert isinstance(credential, HomeKey)
        device = new_device_key(credential, "b")
        save_credential(home.folder / "b.key", device)
        home.start_agent("a")
        home.start_agent("b", "--key-path", str(home.folder / "b.key"))
        home.start_agent("c")
        options = ("--strategy", "hmp", "--seq-len", str(SEQ_LEN), "--lz4", "off", "--min-devices", "3", "--pin")
        home.start_coordinator(*options, "--as", "small", "--devices", f"{LOOPBACK}:{home.port('b')}")
        with home.connect() as client:
            client.add_device("b", agent_trust(device).own.public)
        home.ready().close()
        yield home


def test_workers_count_the_bytes_that_the_plan_moves(encoder_home: TestHome) -> None:
    with encoder_home.ready() as home:
        plan = plan_of(home)
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


def test_survivors_of_a_killed_worker_keep_their_processes(encoder_home: TestHome) -> None:
    with encoder_home.ready() as home:
        before = home.hidden_states(TOKENS)
        wait_for("plans made ahead", lambda: home.status().redundancy.startswith("yes, any one device"), 120)
        wait_for("chunks read ahead", lambda: "B on disk, " in home.status().redundancy, 30)
        pids = {name: encoder_home.worker_pid(name) for name in "abc"}
        victim = pids["b"]
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        again = home.hidden_states(TOKENS, timeout_seconds=60.0)  # waits for the next plan
        pause = time.monotonic() - killed
        np.testing.assert_allclose(again, before, rtol=1e-4, atol=1e-4)
        assert {*plan_devices(home)} == {"a", "b", "c"}  # the dead worker starts again
        assert {name: encoder_home.worker_pid(name) for name in "ac"} == {name: pids[name] for name in "ac"}
        history = [(round(each.seconds_ago, 2), each.phase) for each in home.status().history]
        print(f"pause {pause:.2f} s: {history}")


def test_standby_takes_over_the_running_workers(encoder_home: TestHome) -> None:
    home = encoder_home
    with home.ready() as client:
        expected = client.hidden_states(TOKENS)
    leader = f"{LOOPBACK}:{home.port('coordinator')}"
    home.start_coordinator("--standby", "--leader", leader, model=False, name="standby")
    wait_for("the copy of the state", lambda: "the standby of coordinator\n" in home.log("standby"), 30.0)
    assert "this is the standby of coordinator" in home.run("status", name="standby", check=True).stdout
    workers = [home.worker_pid(name) for name in "abc"]
    standby = f"{LOOPBACK}:{home.port('standby')}"

    def ask(client: Home) -> None:
        assert np.allclose(client.hidden_states(TOKENS, timeout_seconds=10.0), expected, atol=1e-5)

    with Clients(home, [ask], lambda: connect(f"{leader},{standby}", key=home.key)) as clients:
        clients.wait_for_answers(30.0)
        killed, killed_at = time.monotonic(), time.time()
        home.kill("coordinator")
        clients.wait_for_answers(60.0)
    with connect(standby, key=home.key) as client:
        (served,) = client.models()
        assert (served.deployment, served.pinned) == ("small", True)
        events = client.events(follow=False)
        ended = [each.unix_seconds for each in events if each.event.kind == "request_ended"]
    assert min(ended) < killed_at  # of requests that the leader answered
    # On a busy machine a device may learn of it only when its lease expires.
    assert any("coordinator has ended: its connection is closed" in home.log(name) for name in "abc")
    print(f"pause: {min(ended for began, ended in clients.calls[0] if began > killed) - killed:.2f} s")
    assert [home.worker_pid(name) for name in "abc"] == workers
    home.start_coordinator("--leader", standby, model=False)
    wait_for("the old leader to stand by", lambda: "the standby of standby" in home.log("coordinator"), 30.0)
    os.kill(home.pid("standby"), signal.SIGTERM)  # a planned stop hands over
    wait_for("the old leader to take over", lambda: "took over from standby" in home.log("coordinator"), 30.0)
    assert home.wait("standby") == 0
    with home.connect() as client:
        client.wait_ready(30.0)
        assert np.allclose(client.hidden_states(TOKENS), expected, atol=1e-5)
    assert [home.worker_pid(name) for name in "abc"] == workers


def test_device_with_its_own_key_serves_until_it_is_revoked(encoder_home: TestHome) -> None:
    """Must be the last test of this home."""
    with encoder_home.ready() as client:
        assert {*plan_devices(client)} == {"a", "b", "c"}
        before = client.hidden_states([1, 2, 3])
        client.revoke_device("b")
        after = client.hidden_states([1, 2, 3], timeout_seconds=60)
        assert abs(before - after).max() < 1e-5
        assert wait_for("a plan without it", lambda: {*plan_devices(client)} == {"a", "c"}, 60)
        (revoked,) = [each for each in client.devices().devices if each.name == "b"]
        assert (revoked.state, revoked.reason) == ("refused", "its key was revoked")
        client.revoke_device("b")  # a repetition has no effect
        with pytest.raises(HearthError, match="no key of the device 'c'"):
            client.revoke_device("c")
