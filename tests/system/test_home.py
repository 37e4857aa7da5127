"""A home of real processes on the loopback interface: serving, failures, upgrades, power cuts, keys."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.contexts import zmq_context
from support.gateway_faults import CALL_SECONDS, survive_gateway_faults
from support.home import LOOPBACK, TestHome, home_of, plan_of
from support.models import save_random_model, small_bert
from support.plans import BERT_LARGE
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from support.reference import hidden_states

from hearth import errors
from hearth.client.sync import Home, connect
from hearth.plan.transformer import Pipeline, TensorParallel
from hearth.platform.curve import new_keypair
from hearth.platform.security import (
    AppKey,
    Credential,
    HomeKey,
    admin_key,
    agent_access,
    coordinator_access,
    load_credential,
    new_home_key,
)
from hearth.platform.units import parse_bytes
from hearth.wire import messages as wire
from hearth.wire.rpc import RpcClient

pytestmark = pytest.mark.processes

TOKENS = list(range(5, 45))
# As commit 44e070d writes it, serving `small_bert` as a pipeline.
SERVING_EARLIER = Path(__file__).parent / "serving_earlier.json"


@pytest.fixture(scope="module")
def sp_pair(profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    """Two agents that both hold all weights; the first tests use them."""
    model = save_random_model(tmp_path_factory.mktemp("model"), small_bert())
    with home_of("ab", tmp_path_factory.mktemp("pair"), model, profiles, "--strategy", "sp") as home:
        home.ready().close()
        yield home


def test_chunks_needed_by_two_devices_leave_the_coordinator_once(sp_pair: TestHome) -> None:
    sizes = re.search(r"sent ([\d.]+ \w+) of weights; devices forwarded ([\d.]+ \w+)", sp_pair.log("coordinator"))
    assert sizes is not None
    pushed, passed = map(parse_bytes, sizes.groups())
    with sp_pair.ready() as home:
        plan = plan_of(home)
    assert isinstance(plan.body, TensorParallel)
    if plan.body.embedding == "replicated":  # both devices need all chunks
        assert passed == pushed
    else:  # all but the vocabulary, which is divided
        assert 0.1 * pushed < passed < pushed


def test_restarted_coordinator_takes_over_the_running_workers(sp_pair: TestHome) -> None:
    with sp_pair.ready() as home:
        before, epoch = home.hidden_states(TOKENS), plan_of(home).epoch
    workers = [sp_pair.worker_pid("a"), sp_pair.worker_pid("b")]
    sp_pair.kill("coordinator")
    sp_pair.start_coordinator(model=False)
    with sp_pair.ready() as home:
        assert np.array_equal(home.hidden_states(TOKENS), before)
        assert plan_of(home).epoch == epoch
        assert [move.phase for move in home.status().history] == ["adopting", "warming", "serving"]
    assert [sp_pair.worker_pid("a"), sp_pair.worker_pid("b")] == workers


def test_model_is_served_again_after_a_power_cut(sp_pair: TestHome) -> None:
    """Without the chunks whose writing the power cut interrupted, and with one that it damaged."""
    names = ["a", "b", "coordinator"]
    with sp_pair.connect() as home:
        before, epoch = home.hidden_states(TOKENS), plan_of(home).epoch
    chunks = _stored_chunks(sp_pair.folder)
    workers = [sp_pair.worker_pid("a"), sp_pair.worker_pid("b")]
    for name in names:
        sp_pair.kill(name)
    for pid in workers:
        assert pid is not None
        wait_for("the workers to die with their daemons", lambda pid=pid: not psutil.pid_exists(pid))
    damaged, *lost = sorted(chunks)[::10]
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for path in lost:
        path.unlink()
    random.shuffle(names)
    for name in names:
        if name == "coordinator":
            sp_pair.start_coordinator(model=False)
        else:
            sp_pair.start_agent(name)
    with sp_pair.ready() as home:
        assert np.array_equal(home.hidden_states(TOKENS), before)
        assert plan_of(home).epoch > epoch
    stored = _stored_chunks(sp_pair.folder)
    assert set(stored) == set(chunks)
    assert {path for path in stored if stored[path] != chunks[path]} == {damaged, *lost}  # no other was sent again
    assert damaged.read_bytes() == whole


def _stored_chunks(folder: Path) -> dict[Path, int]:
    """Every chunk in the agents' stores, and its modification time."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("*/store/??/*")}


@pytest.fixture(scope="module")
def pair(sp_pair: TestHome) -> TestHome:
    """The same agents, which serve with hmp from now on, for tests that leave them running."""
    sp_pair.start_coordinator("--min-devices", "2", "--strategy", "hmp")
    sp_pair.ready().close()
    return sp_pair


def test_hidden_states_equal_transformers_and_repeat(pair: TestHome) -> None:
    with pair.connect(found=True) as home:
        first, second = home.hidden_states(TOKENS), home.hidden_states(TOKENS)
    assert np.abs(first - hidden_states(pair.model_dir, [TOKENS])).max() < 1e-4
    assert np.array_equal(first, second)


def test_invalid_requests_get_typed_errors_and_serving_continues(pair: TestHome) -> None:
    with pair.connect() as home:
        with pytest.raises(errors.TextTooLong) as too_long:
            home.hidden_states([1] * 65)
        assert (too_long.value.num_tokens, too_long.value.max_tokens) == (65, 64)
        with pytest.raises(errors.BadRequest, match="between 0 and 2999"):
            home.hidden_states([3000])
        with pytest.raises(errors.BadRequest):
            home.hidden_states([])
        with pytest.raises(errors.BadRequest, match="texts"):
            home.embed([])
        with pytest.raises(errors.BadRequest, match="tokenizer"):
            home.embed(["this model has no tokenizer"])
        assert home.hidden_states(TOKENS).shape == (40, 96)


def test_status_and_devices_describe_the_deployment(pair: TestHome) -> None:
    with pair.ready() as home:
        wait_for("a heartbeat of both", lambda: all(map(_has_ready_worker, home.devices().devices)))
        status, devices = home.status(), home.devices()
    assert status.plan is not None
    assert status.plan.body.strategy == "hmp"
    assert {device.name for device in devices.devices} == {"a", "b"}
    assert all(map(_has_ready_worker, devices.devices))
    assert {(link.source, link.target) for link in devices.links} == {
        (a.device_id, b.device_id) for a in devices.devices for b in devices.devices if a != b
    }


def test_no_call_fails_when_the_gateway_dies_or_hangs(pair: TestHome) -> None:
    def ask(home: Home) -> object:
        return home.hidden_states(TOKENS, timeout_seconds=CALL_SECONDS)

    # The coordinator may change the shares when clients of this test slow a device down, and so the order of additions.
    survive_gateway_faults(pair, ask, lambda a, b: np.allclose(a, b, rtol=0.0, atol=1e-5))


def test_second_coordinator_finds_agents_busy(pair: TestHome) -> None:
    pair.start_coordinator(name="second")
    wait_for("the second coordinator's complaint", lambda: "already works for" in _devices_of_second(pair))
    os.kill(pair.pid("second"), signal.SIGTERM)
    pair.wait("second")
    with pair.connect() as home:
        assert home.hidden_states(TOKENS).shape == (40, 96)


def _devices_of_second(pair: TestHome) -> str:
    with connect(f"{LOOPBACK}:{pair.port('second')}", key=pair.key) as home:
        return " ".join(device.reason for device in home.devices().devices)


def test_app_key_allows_inference_only_until_revoked(pair: TestHome) -> None:
    credential = load_credential(pair.key)
    keys = new_keypair()
    app_key = AppKey(name="lamp", secret=keys.secret, coordinator_public=coordinator_access(credential).server_public)
    with pair.connect() as admin:
        admin.add_app("lamp", keys.public)
        with pytest.raises(errors.BadRequest, match="already"):
            admin.add_app("lamp", new_keypair().public)
        with pair.connect(app_key) as app:
            assert app.ready()
            assert app.hidden_states(TOKENS).shape == (40, 96)
            for forbidden in (app.status, app.devices, app.apps, lambda: app.revoke_app("lamp")):
                with pytest.raises(errors.NotAuthorised):
                    forbidden()
            admin.revoke_app("lamp")
            with pytest.raises(errors.AppRevoked):  # on the open connection
                app.hidden_states(TOKENS)
        with pytest.raises(errors.AppRevoked):  # and on a new one
            connect(key=app_key, interfaces=[LOOPBACK])


def test_admin_key_may_read_but_not_command_agents(pair: TestHome) -> None:
    credential = load_credential(pair.key)
    assert isinstance(credential, HomeKey)
    with pair.connect(admin_key(credential)) as home:
        assert home.status().state.startswith("serving")
    assert isinstance(_ask_agent(pair, admin_key(credential), wire.GetTelemetry()), wire.Telemetry)
    for command in (
        wire.AcquireLease(holder="me", holder_name="me", seconds=5.0),
        wire.Unload(holder="me", epoch=1),
        wire.PutChunk(holder="me", hash="0" * 64),
        wire.Profile(subject=wire.BlocksOf(model=BERT_LARGE, seq_len=8), timeout_seconds=5.0),
    ):
        with pytest.raises(errors.NotAuthorised):
            _ask_agent(pair, admin_key(credential), command)


def test_coordinator_without_the_lease_is_rejected(pair: TestHome) -> None:
    credential = load_credential(pair.key)
    with pytest.raises(errors.AgentBusy):
        _ask_agent(pair, credential, wire.AcquireLease(holder="me", holder_name="me", seconds=5.0))
    for command in (
        wire.Unload(holder="me", epoch=1),
        wire.PutChunk(holder="me", hash="0" * 64),
        wire.Heartbeat(holder="me"),
    ):
        with pytest.raises(errors.LeaseLost):
            _ask_agent(pair, credential, command)


def _ask_agent(pair: TestHome, credential: Credential, message: wire.Message) -> wire.Message:
    """Send one request to the control socket of agent a, with any key."""

    async def ask() -> wire.Message:
        with zmq_context() as context:
            client = RpcClient(context, f"tcp://{LOOPBACK}:{pair.port('a')}", agent_access(credential), "test")
            try:
                return (await client.call(message, timeout_seconds=30.0)).message
            finally:
                await client.close()

    return asyncio.run(ask())


def test_key_of_another_home_is_rejected(pair: TestHome) -> None:
    with pytest.raises(errors.WrongKey):
        connect(f"{LOOPBACK}:{pair.port('coordinator')}", key=new_home_key(), timeout_seconds=30.0)
    with pytest.raises(errors.WrongKey):
        _ask_agent(pair, new_home_key(), wire.GetTelemetry())


def test_hung_worker_is_replaced_and_no_request_is_lost(pair: TestHome) -> None:
    """Its agent and the network are well."""
    with pair.ready() as home:
        before = home.hidden_states(TOKENS, timeout_seconds=60.0)
        victim = pair.worker_pid("b")
        assert victim is not None
        os.kill(victim, signal.SIGSTOP)  # its connections stay open, and its agent goes on
        began = time.monotonic()
        after = home.hidden_states(TOKENS, timeout_seconds=60.0)
        # The agent needs 1.25 s, and a peer of the worker 5 s; the request's own limit would be 45 s.
        assert time.monotonic() - began < 30.0
        assert np.abs(after - before).max() < 1e-4
        assert "no sign of life" in pair.log("b")


def test_state_of_an_earlier_commit_is_served_without_a_command(pair: TestHome) -> None:
    """After an upgrade. Chunks keep their names; `test_sharding` checks their hashes."""
    with pair.ready() as home:
        before = home.hidden_states(TOKENS)
        ids = {device.name: device.device_id for device in home.devices().devices}
    assert pair.stop("coordinator", 60.0) == 0

    saved = json.loads(SERVING_EARLIER.read_text())
    deployment = saved["deployments"]["default"]
    deployment["goal"]["model_dir"] = str(pair.model_dir)
    deployment["plan"]["model"]["name"] = pair.model_dir.name
    for device in deployment["plan"]["devices"]:
        device["device_id"] = ids[device["name"]]
    state = pair.folder / "coordinator" / "serving.json"
    saved["last_epoch"] = json.loads(state.read_text())["last_epoch"]
    state.write_text(json.dumps(saved))

    pair.start_coordinator(model=False)
    with pair.ready() as home:
        after, plan = home.hidden_states(TOKENS), plan_of(home)
    assert "planning" not in pair.log_of_run("coordinator")
    assert isinstance(plan.body, Pipeline)
    assert plan.body.layers == tuple(deployment["plan"]["body"]["layers"])
    assert [device.name for device in plan.devices] == [device["name"] for device in deployment["plan"]["devices"]]
    assert np.abs(after - before).max() < 1e-5


@pytest.mark.thorough
def test_idle_daemon_uses_little_memory(pair: TestHome) -> None:
    """The limit of the systemd unit. CPU time is measured by a benchmark."""
    resident = psutil.Process(pair.pid("a")).memory_info().rss
    assert resident < 60e6


def _has_ready_worker(device: wire.DeviceInfo) -> bool:
    return [worker.state for worker in device.workers] == ["ready"]
