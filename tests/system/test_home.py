"""A home of real processes: serving, failures, power cuts, keys. All on the loopback interface."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.contexts import zmq_context
from support.home import LOOPBACK, TestHome
from support.models import save_random_model, small_bert
from support.plans import BERT_LARGE
from support.waiting import wait_for

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from support.reference import hidden_states

from hearth.client.sync import Home, connect
from hearth.errors import (
    AgentBusy,
    AppRevoked,
    BadRequest,
    DeviceLost,
    HearthError,
    LeaseLost,
    ModelDoesNotFit,
    NotAuthorised,
    NotServing,
    StepFailed,
    TextTooLong,
    WorkerDied,
    WrongKey,
)
from hearth.platform.security import (
    AppKey,
    Credential,
    HomeKey,
    admin_key,
    agent_access,
    coordinator_access,
    load_credential,
    new_home_key,
    new_keypair,
)
from hearth.platform.units import parse_bytes
from hearth.wire.messages import (
    AcquireLease,
    BlocksOf,
    DeviceInfo,
    GetTelemetry,
    Heartbeat,
    Message,
    Profile,
    PutChunk,
    Telemetry,
    Unload,
)
from hearth.wire.rpc import RpcClient

pytestmark = pytest.mark.processes

TOKENS = list(range(5, 45))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("model"), small_bert())


@pytest.fixture(scope="module")
def slow_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough that a request lasts a good part of a second: time to kill something in its middle."""
    config = small_bert(
        num_hidden_layers=8, hidden_size=512, num_attention_heads=8, intermediate_size=2048, max_position_embeddings=512,
    )  # fmt: skip
    return save_random_model(tmp_path_factory.mktemp("slow"), config)


@contextmanager
def home_of_two(folder: Path, model_dir: Path, known: Path, strategy: str) -> Iterator[TestHome]:
    """Two agents, and a coordinator that serves by `strategy`."""
    with TestHome(folder, model_dir, known) as home:
        home.start_agent("a")
        home.start_agent("b")
        home.start_coordinator("--strategy", strategy, "--min-devices", "2")
        home.ready().close()
        yield home


@pytest.fixture(scope="module")
def pair(model_dir: Path, known: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    """Two agents that serve by hmp, for tests that break nothing."""
    with home_of_two(tmp_path_factory.mktemp("pair"), model_dir, known, "hmp") as home:
        yield home


def test_hidden_states_equal_transformers_and_repeat(pair: TestHome) -> None:
    with pair.connect(found=True) as home:
        first, second = home.hidden_states(TOKENS), home.hidden_states(TOKENS)
    assert np.abs(first - hidden_states(pair.model_dir, [TOKENS])).max() < 1e-4
    assert np.array_equal(first, second)


def test_bad_requests_get_typed_errors_and_serving_goes_on(pair: TestHome) -> None:
    with pair.connect() as home:
        with pytest.raises(TextTooLong) as too_long:
            home.hidden_states([1] * 65)
        assert (too_long.value.num_tokens, too_long.value.max_tokens) == (65, 64)
        with pytest.raises(BadRequest, match="between 0 and 2999"):
            home.hidden_states([3000])
        with pytest.raises(BadRequest):
            home.hidden_states([])
        with pytest.raises(BadRequest, match="texts"):
            home.embed([])
        with pytest.raises(BadRequest, match="tokenizer"):
            home.embed(["this model has no tokenizer"])
        assert home.hidden_states(TOKENS).shape == (40, 96)


def test_status_and_devices_tell_what_runs(pair: TestHome) -> None:
    with pair.ready() as home:
        wait_for("a heartbeat of both", lambda: all(map(_works, home.devices().devices)))
        status, devices = home.status(), home.devices()
    assert status.plan is not None
    assert status.plan.body.strategy == "hmp"
    assert {device.name for device in devices.devices} == {"a", "b"}
    assert all(map(_works, devices.devices))
    assert {(link.source, link.target) for link in devices.links} == {
        (a.device_id, b.device_id) for a in devices.devices for b in devices.devices if a != b
    }


def test_a_second_coordinator_is_told_that_the_agents_are_busy(pair: TestHome) -> None:
    pair.start_coordinator(name="second")
    wait_for("the second coordinator's complaint", lambda: "already works for" in _devices_of_second(pair))
    os.kill(pair.pid("second"), signal.SIGTERM)
    pair.wait("second")
    with pair.connect() as home:
        assert home.hidden_states(TOKENS).shape == (40, 96)


def _devices_of_second(pair: TestHome) -> str:
    with connect(f"{LOOPBACK}:{pair.port('second')}", key=pair.key) as home:
        return " ".join(device.reason for device in home.devices().devices)


def test_an_app_key_may_ask_for_inference_only_until_it_is_revoked(pair: TestHome) -> None:
    credential = load_credential(pair.key)
    keys = new_keypair()
    app_key = AppKey(name="lamp", secret=keys.secret, coordinator_public=coordinator_access(credential).server_public)
    with pair.connect() as admin:
        admin.add_app("lamp", keys.public)
        with pytest.raises(BadRequest, match="already"):
            admin.add_app("lamp", new_keypair().public)
        with pair.connect(app_key) as app:
            assert app.ready()
            assert app.hidden_states(TOKENS).shape == (40, 96)
            for forbidden in (app.status, app.devices, app.apps, lambda: app.revoke_app("lamp")):
                with pytest.raises(NotAuthorised):
                    forbidden()
            admin.revoke_app("lamp")
            with pytest.raises(AppRevoked):  # on the connection that is open already
                app.hidden_states(TOKENS)
        with pytest.raises(AppRevoked):  # and on a new one
            connect(key=app_key, interfaces=[LOOPBACK])


def test_an_admin_key_looks_but_cannot_command_agents(pair: TestHome) -> None:
    credential = load_credential(pair.key)
    assert isinstance(credential, HomeKey)
    with pair.connect(admin_key(credential)) as home:
        assert home.status().state.startswith("serving")
    assert isinstance(_ask_agent(pair, admin_key(credential), GetTelemetry()), Telemetry)
    for command in (
        AcquireLease(holder="me", holder_name="me", seconds=5.0),
        Unload(holder="me", epoch=1),
        PutChunk(holder="me", hash="0" * 64),
        Profile(subject=BlocksOf(model=BERT_LARGE, seq_len=8), timeout_seconds=5.0),
    ):
        with pytest.raises(NotAuthorised):
            _ask_agent(pair, admin_key(credential), command)


def test_a_coordinator_without_the_lease_changes_nothing(pair: TestHome) -> None:
    credential = load_credential(pair.key)
    with pytest.raises(AgentBusy):
        _ask_agent(pair, credential, AcquireLease(holder="me", holder_name="me", seconds=5.0))
    for command in (Unload(holder="me", epoch=1), PutChunk(holder="me", hash="0" * 64), Heartbeat(holder="me")):
        with pytest.raises(LeaseLost):
            _ask_agent(pair, credential, command)


def _ask_agent(pair: TestHome, credential: Credential, message: Message) -> Message:
    """One request to the control socket of agent a, with any key."""

    async def ask() -> Message:
        with zmq_context() as context:
            client = RpcClient(context, f"tcp://{LOOPBACK}:{pair.port('a')}", agent_access(credential), "test")
            try:
                return (await client.call(message, timeout_seconds=30.0)).message
            finally:
                await client.close()

    return asyncio.run(ask())


def test_another_homes_key_finds_nothing_and_opens_nothing(pair: TestHome) -> None:
    with pytest.raises(WrongKey):
        connect(f"{LOOPBACK}:{pair.port('coordinator')}", key=new_home_key(), timeout_seconds=30.0)
    with pytest.raises(WrongKey):
        _ask_agent(pair, new_home_key(), GetTelemetry())


def test_a_worker_killed_in_mid_request_is_a_typed_error_and_the_next_request_succeeds(
    slow_model_dir: Path, known: Path, tmp_path: Path
) -> None:
    with TestHome(tmp_path, slow_model_dir, known) as house:
        for name in ("a", "b", "c"):
            house.start_agent(name)
        house.start_coordinator("--strategy", "hmp", "--min-devices", "3")
        with house.ready() as home:
            victim = house.worker_pid("b")
            assert victim is not None
            failure = _fail_in_mid_request(home, lambda: os.kill(victim, signal.SIGKILL))
            assert isinstance(failure[0], WorkerDied)
            assert failure[1] < 20.0  # long before the request gives up by itself
            again = home.hidden_states([7] * 64, timeout_seconds=60.0)
            assert again.shape == (64, 512)
            plan = home.status().plan
            assert plan is not None
            assert {device.name for device in plan.devices} == {"a", "c"}
            assert "trying again" not in house.log("coordinator")  # one new plan was enough


def test_a_device_that_vanishes_is_a_typed_error_and_the_rest_goes_on(
    slow_model_dir: Path, known: Path, tmp_path: Path
) -> None:
    with TestHome(tmp_path, slow_model_dir, known) as house:
        for name in ("a", "b"):
            house.start_agent(name)
        house.start_coordinator("--strategy", "hmp", "--min-devices", "2")
        with house.ready() as home:
            # Stopped, not killed: as a device whose cable was pulled, it says nothing at all.
            pids = [house.pid("b"), house.worker_pid("b")]
            assert all(pids)
            try:
                failure = _fail_in_mid_request(home, lambda: [os.kill(pid, signal.SIGSTOP) for pid in pids])
                assert isinstance(failure[0], DeviceLost | StepFailed)
                assert failure[1] < 20.0  # long before the request gives up by itself
                assert home.hidden_states([7] * 64, timeout_seconds=60.0).shape == (64, 512)
                plan = home.status().plan
                assert plan is not None
                assert [device.name for device in plan.devices] == ["a"]
                assert "trying again" not in house.log("coordinator")
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)


def _fail_in_mid_request(home: Home, harm: object) -> tuple[HearthError, float]:
    """Send requests without pause, do harm in the middle of one, return its error and how long it took to come."""
    caught: list[tuple[HearthError, float]] = []
    busy = threading.Event()
    harmed: list[float] = []

    def ask() -> None:
        while not caught:
            try:
                busy.set()
                home.hidden_states([7] * 512, timeout_seconds=60.0)
            except HearthError as error:
                caught.append((error, time.monotonic() - harmed[0]))

    asking = threading.Thread(target=ask)
    asking.start()
    busy.wait(60)
    served = home.status().served_requests
    wait_for("a request to be served", lambda: home.status().served_requests > served)
    harmed.append(time.monotonic())
    harm()  # type: ignore[operator]
    asking.join(90)
    assert caught, "the request went on without the device"
    return caught[0]


@pytest.fixture(scope="module")
def twins(model_dir: Path, known: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    """Two agents that both hold all weights."""
    with home_of_two(tmp_path_factory.mktemp("twins"), model_dir, known, "sp") as home:
        yield home


def test_what_two_devices_need_leaves_the_coordinator_once(twins: TestHome) -> None:
    said = re.search(r"sent ([\d.]+ \w+) of weights; devices forwarded ([\d.]+ \w+)", twins.log("coordinator"))
    assert said is not None
    pushed, passed = map(parse_bytes, said.groups())
    assert 0.1 * pushed < passed < pushed  # all but the vocabulary, which is split


def test_after_a_power_cut_the_model_serves_again_with_no_command(twins: TestHome) -> None:
    names = ["a", "b", "coordinator"]
    with twins.connect() as home:
        before = home.hidden_states(TOKENS)
        epoch = home.status().plan.epoch  # type: ignore[union-attr]
    chunks = _stored_chunks(twins.folder)
    workers = [twins.worker_pid("a"), twins.worker_pid("b")]
    for name in names:
        twins.kill(name)
    for pid in workers:
        assert pid is not None
        wait_for("the workers to die with their daemons", lambda pid=pid: not psutil.pid_exists(pid))
    lost = sorted(chunks)[::10]  # as if the cut had come in the middle of a push
    for path in lost:
        path.unlink()
    random.shuffle(names)
    for name in names:
        if name == "coordinator":
            twins.start_coordinator(model=False)
        else:
            twins.start_agent(name)
    with twins.ready() as home:
        assert np.array_equal(home.hidden_states(TOKENS), before)
        plan = home.status().plan
        assert plan is not None
        assert plan.epoch > epoch
    stored = _stored_chunks(twins.folder)
    assert set(stored) == set(chunks)
    assert {path for path in stored if stored[path] != chunks[path]} == set(lost)  # only those were sent again


def _stored_chunks(folder: Path) -> dict[Path, int]:
    """Every chunk in the agents' stores, and when it was written."""
    return {path: path.stat().st_mtime_ns for path in folder.glob("*/store/??/*")}


def test_a_model_that_does_not_fit_says_how_many_bytes_are_missing(
    model_dir: Path, known: Path, tmp_path: Path
) -> None:
    with TestHome(tmp_path, model_dir, known) as house:
        house.start_agent("a", "--memory-bytes", "100MiB")
        house.start_coordinator()
        with house.connect() as home:
            state = wait_for(
                "the complaint",
                lambda: "bytes are missing" in home.readiness().state and home.readiness(),
            )
            assert not state.ready
            with pytest.raises(NotServing, match="bytes are missing"):
                home.hidden_states(TOKENS, timeout_seconds=1.0)
    assert ModelDoesNotFit(model="m", missing_bytes=5).details()["missing_bytes"] == 5


def test_a_full_store_is_told_and_the_agent_lives_on(model_dir: Path, known: Path, tmp_path: Path) -> None:
    with TestHome(tmp_path, model_dir, known) as house:
        house.start_agent("a", "--store-bytes", "1MiB")
        house.start_coordinator()
        with house.connect() as home:
            wait_for("the complaint", lambda: "has no room" in home.readiness().state)
            assert [device.state for device in home.devices().devices] == ["alive"]


def test_a_corrupt_chunk_is_found_discarded_and_sent_again(model_dir: Path, known: Path, tmp_path: Path) -> None:
    with TestHome(tmp_path, model_dir, known) as house:
        house.start_agent("a")
        house.start_coordinator()
        with house.ready() as home:
            before = home.hidden_states(TOKENS)
        house.kill("a")
        chunk = max((tmp_path / "a" / "store").glob("??/*"), key=lambda path: path.stat().st_size)
        damaged = bytearray(chunk.read_bytes())
        damaged[-1] ^= 1
        chunk.write_bytes(damaged)
        house.start_agent("a")
        with house.connect() as home:
            wait_for(
                "serving to begin anew",
                lambda: "restarted" in home.status().last_error or not home.ready(),
            )
            home.wait_ready(60.0)
            assert np.array_equal(home.hidden_states(TOKENS), before)


def test_without_multicast_agents_and_coordinator_are_found_by_address(
    model_dir: Path, known: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEARTH_COORDINATOR_ADVERTISE", "false")
    with TestHome(tmp_path, model_dir, known) as house:
        house.start_agent("a", "--no-advertise")
        house.start_coordinator("--devices", f"{LOOPBACK}:{house.port('a')}")
        with connect(f"{LOOPBACK}:{house.port('coordinator')}", key=house.key, timeout_seconds=20.0) as home:
            home.wait_ready(60.0)
            assert home.hidden_states(TOKENS).shape == (40, 96)


def test_an_idle_daemon_is_small(pair: TestHome) -> None:
    """The bound of issue and unit; the benchmark of time is in the README, not here."""
    resident = psutil.Process(pair.pid("a")).memory_info().rss
    assert resident < 60e6


def test_agents_answer_reads_without_a_coordinator_and_busy_is_an_error_of_its_own() -> None:
    assert "coordinator" in str(AgentBusy(device="a", holder="other"))


def _works(device: DeviceInfo) -> bool:
    return [worker.state for worker in device.workers] == ["ready"]
