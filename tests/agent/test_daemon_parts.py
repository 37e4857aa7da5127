"""The daemon's parts: store, identity, telemetry, settings, lease, links, profiler."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psutil")

import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st
from support.messages import EXAMPLES
from support.plans import BERT_LARGE

from agent import supervisor
from agent.config import AgentSettings, add_arguments, load_settings
from agent.gpu import GpuReader, tegra_model
from agent.identity import hardware_fingerprint, load_identity
from agent.lease import acquire, require
from agent.links import LinkServer, fetch_chunks, measure_link
from agent.store import ShardStore
from agent.supervisor import WorkerProcess
from agent.telemetry import TelemetryReader, cpu_model, memory, memory_budget, temperature
from hearth.errors import (
    AgentBusy,
    BadSetting,
    ChunkCorrupt,
    ChunkMissing,
    DeadlineExceeded,
    LeaseLost,
    StepFailed,
    StoreFull,
    WorkerDied,
    WrongKey,
)
from hearth.messages import (
    AbortStep,
    Cancel,
    Failed,
    FetchChunks,
    GenerateTokens,
    GenerationEnded,
    MeasureLink,
    Message,
    OpenLinkProbe,
    StartWorker,
    TokensGenerated,
    decode,
    encode,
)
from hearth.profile import BlockProfile
from hearth.security import asyncio_gatekeeper, new_keypair


def chunk(index: int, size: int = 100) -> tuple[str, bytes]:
    data = bytes([index % 256]) * size
    return hashlib.sha256(data).hexdigest(), data


# ---- store ----------------------------------------------------------------------------------------------------------


def test_chunks_survive_a_restart_and_unfinished_ones_do_not(tmp_path: Path) -> None:
    name, data = chunk(1)
    store = ShardStore(tmp_path, 1000, "d")
    assert store.missing([name]) == (name,)
    store.put(name, data)
    (tmp_path / name[:2] / f"{name}.abcd.part").write_bytes(b"half")
    again = ShardStore(tmp_path, 1000, "d")
    assert again.missing([name]) == ()
    again.verify(name)
    assert again.path_of(name).read_bytes() == data
    assert not list(tmp_path.glob("*/*.part"))
    with pytest.raises(ChunkMissing):
        again.path_of("0" * 64)


def test_a_chunk_that_does_not_match_its_hash_is_refused_or_discarded(tmp_path: Path) -> None:
    name, data = chunk(1)
    store = ShardStore(tmp_path, 1000, "d")
    with pytest.raises(ChunkCorrupt):
        store.put(name, data[:-1])
    assert store.missing([name]) == (name,)
    store.put(name, data)
    store.path_of(name).write_bytes(b"x" * len(data))
    again = ShardStore(tmp_path, 1000, "d")
    with pytest.raises(ChunkCorrupt):
        again.verify(name)
    assert again.missing([name]) == (name,)


def test_pinned_chunks_are_never_evicted_and_a_full_store_says_so(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, 250, "kitchen")
    (first, one), (second, two), (third, three) = (chunk(i) for i in range(3))
    store.put(first, one)
    store.put(second, two)
    store.pin([first])
    store.put(third, three)
    assert store.missing([first, second, third]) == (second,)
    store.pin([third])
    with pytest.raises(StoreFull) as error:
        store.put(second, two)
    assert (error.value.device, error.value.needed_bytes, error.value.free_bytes) == ("kitchen", 100, 50)
    store.unpin_all()
    store.put(second, two)


def test_a_full_disk_is_a_typed_error_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        store = ShardStore(disk, 1 << 40, "d")
        (first, one), (second, two) = chunk(1, 10 << 20), chunk(2, 10 << 20)
        store.put(first, one)
        store.pin([first])
        with pytest.raises(StoreFull):
            store.put(second, two)
        assert [path.name for path in disk.glob("*/*")] == [first]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_eviction_takes_the_least_recently_used(operations: list[tuple[bool, int]]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        store, model = ShardStore(Path(folder), 450, "d"), OrderedDict[str, None]()
        for is_put, index in operations:
            name, data = chunk(index)
            if is_put:
                store.put(name, data)
                model[name] = None
                model.move_to_end(name)
                while len(model) > 4:
                    model.popitem(last=False)
            elif name in model:
                store.path_of(name)
                model.move_to_end(name)
        names = [chunk(index)[0] for index in range(10)]
        assert set(names) - set(store.missing(names)) == set(model)
        assert store.total_bytes == 100 * len(model)


# ---- identity -------------------------------------------------------------------------------------------------------


def board(root: Path, serial: str) -> Path:
    (root / "proc/device-tree").mkdir(parents=True)
    (root / "proc/device-tree/serial-number").write_text(serial + "\0")
    return root


def test_an_identity_stays_until_the_card_moves_to_another_board(tmp_path: Path) -> None:
    mine, other = board(tmp_path / "mine", "1000"), board(tmp_path / "other", "2000")
    state = tmp_path / "state"
    with load_identity(state, mine) as first:
        pass
    with load_identity(state, mine) as again:
        assert (again.device_id, again.keypair, again.regenerated) == (first.device_id, first.keypair, False)
    shutil.copytree(state, tmp_path / "clone")
    with load_identity(tmp_path / "clone", other) as cloned:
        assert cloned.regenerated
        assert cloned.device_id != first.device_id
        assert cloned.keypair != first.keypair
    assert hardware_fingerprint(mine) != hardware_fingerprint(other)


def test_two_state_directories_on_one_host_are_two_devices(tmp_path: Path) -> None:
    with load_identity(tmp_path / "a") as a, load_identity(tmp_path / "b") as b:
        assert a.device_id != b.device_id


def test_one_state_directory_takes_one_agent(tmp_path: Path) -> None:
    with (
        load_identity(tmp_path),
        pytest.raises(BadSetting, match=f"pid {os.getpid()}"),
        load_identity(tmp_path),
    ):
        pass


def test_a_damaged_identity_is_kept_aside(tmp_path: Path) -> None:
    (tmp_path / "identity.json").write_text("{")
    with load_identity(tmp_path) as identity:
        assert identity.regenerated
    assert (tmp_path / "identity.unreadable").read_text() == "{"


# ---- telemetry ------------------------------------------------------------------------------------------------------


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_boards_are_named_and_measured_by_their_own_files(tmp_path: Path) -> None:
    jetson = write(
        tmp_path,
        **{
            "proc__cpuinfo": "processor : 0\nBogoMIPS : 62.50\n",
            "proc__device-tree__model": "NVIDIA Jetson Orin Nano\0",
            "proc__device-tree__compatible": "nvidia,p3768\0nvidia,tegra234\0",
            "sys__devices__gpu.0__load": "250\n",
            "sys__class__thermal__thermal_zone0__temp": "48500\n",
            "sys__class__thermal__thermal_zone1__temp": "51250\n",
            "sys__class__thermal__thermal_zone2__temp": "-256000\n",
        },
    )
    assert cpu_model(jetson) == "NVIDIA Jetson Orin Nano"
    assert tegra_model(jetson) == "NVIDIA Jetson Orin Nano"
    assert temperature(jetson) == 51.25
    gpu = GpuReader("cpu", jetson).read()
    assert gpu is not None
    assert (gpu.kind, gpu.load_fraction) == ("tegra", 0.25)
    assert temperature(tmp_path / "nothing") is None


def test_a_pc_is_named_by_its_processor(tmp_path: Path) -> None:
    assert cpu_model(write(tmp_path, proc__cpuinfo="model name\t: Intel(R) N100\n")) == "Intel(R) N100"
    assert tegra_model(tmp_path) is None


V1, V2 = "sys__fs__cgroup__memory__", "sys__fs__cgroup__"


@pytest.mark.parametrize(
    ("limit", "usage", "membership"),
    [
        (f"{V2}memory.max", f"{V2}memory.current", ""),
        (f"{V1}memory.limit_in_bytes", f"{V1}memory.usage_in_bytes", ""),
        (f"{V2}a__b__memory.max", f"{V2}a__b__memory.current", "0::/a/b\n"),
        (f"{V1}x__memory.limit_in_bytes", f"{V1}x__memory.usage_in_bytes", "3:cpu,memory:/x\n"),
    ],
)
def test_a_cgroups_limit_counts_as_all_memory(limit: str, usage: str, membership: str, tmp_path: Path) -> None:
    root = write(tmp_path, **{limit: "536870912\n", usage: "136870912\n", "proc__self__cgroup": membership})
    assert memory(root) == (512 << 20, 400_000_000)


@pytest.mark.parametrize(
    ("limit_bytes", "percent", "expected"),
    [(None, None, 6 << 30), (1 << 30, None, 1 << 30), (None, 50.0, 5 << 30), (1 << 30, 50.0, 1 << 30)],
)
def test_the_budget_is_the_users_limit_or_what_is_free_less_a_reserve(
    limit_bytes: int | None, percent: float | None, expected: int
) -> None:
    assert memory_budget(10 << 30, 7 << 30, limit_bytes, percent) == expected


def test_telemetry_reads_this_machine(tmp_path: Path) -> None:
    settings = AgentSettings(name="x", state_dir=tmp_path, store_dir=tmp_path, key_path=tmp_path / "k", threads=3)
    telemetry = TelemetryReader(settings, GpuReader("cpu")).read(now=5.0)
    assert telemetry.num_threads == 3
    assert 0 < telemetry.memory_available_bytes <= telemetry.memory_total_bytes
    assert telemetry.clock_unix_seconds == 5.0
    assert telemetry.cpu_model


def test_asking_for_cuda_where_there_is_none_is_an_error() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU here")
    with pytest.raises(BadSetting, match="no CUDA device"):
        asyncio.run(GpuReader("cuda").probe())


# ---- settings -------------------------------------------------------------------------------------------------------


def settings_of(flags: list[str], **environ: str) -> AgentSettings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return load_settings(parser.parse_args(flags), {"HOME": "/home/u", **environ})


def test_flags_win_over_variables_and_variables_over_defaults() -> None:
    assert settings_of([]).control_port == 47800
    assert settings_of([], HEARTH_AGENT_CONTROL_PORT="5").control_port == 5
    assert settings_of(["--control-port", "6"], HEARTH_AGENT_CONTROL_PORT="5").control_port == 6
    assert settings_of(["--memory-bytes", "2GiB"]).memory_bytes == 2 << 30
    assert settings_of(["--data-ports", "5000-5010"]).data_ports == (5000, 5010)
    assert settings_of(["--no-advertise"]).advertise is False
    assert settings_of([], STATE_DIRECTORY="/var/lib/x").state_dir == Path("/var/lib/x")
    assert settings_of([]).store_dir == Path("/home/u/.cache/hearth-agent")


@pytest.mark.parametrize(
    "flags",
    [
        ["--control-port", "x"],
        ["--memory-bytes", "much"],
        ["--data-ports", "9-3"],
        ["--memory-percent", "120"],
        ["--compute-device", "tpu"],
        ["--log-level", "loud"],
    ],
)
def test_bad_settings_are_named(flags: list[str]) -> None:
    with pytest.raises(BadSetting, match=flags[0]):
        settings_of(flags)


def test_the_agent_says_what_is_wrong_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agent.main", "--state-dir", str(tmp_path), "--store-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, "--key-path", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("hearth-agent: There is no key at")
    assert "Traceback" not in done.stderr


# ---- lease ----------------------------------------------------------------------------------------------------------


def test_one_coordinator_at_a_time() -> None:
    lease = acquire(None, "d", "one", "One", 5.0, now=100.0)
    with pytest.raises(AgentBusy, match="One"):
        acquire(lease, "d", "two", "Two", 5.0, now=104.9)
    assert acquire(lease, "d", "one", "One", 5.0, now=104.9).expires == 109.9
    assert acquire(lease, "d", "two", "Two", 5.0, now=105.0).holder == "two"
    assert require(lease, "d", "one", now=104.0) is lease
    assert lease.renewed(104.0).expires == 109.0
    for holder, now in (("two", 101.0), ("one", 105.0)):
        with pytest.raises(LeaseLost):
            require(lease, "d", holder, now)


# ---- links ----------------------------------------------------------------------------------------------------------


def test_links_are_measured_by_the_opened_peer_only_and_within_bounds() -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        gatekeeper = asyncio_gatekeeper(context)
        mine, theirs = new_keypair(), new_keypair()
        server = LinkServer(context, gatekeeper, "127.0.0.1", 0, theirs, lambda chunk: b"")
        gatekeeper.start()
        await server.start()
        request = MeasureLink(
            host="127.0.0.1",
            port=server.port,
            peer_public_key=theirs.public,
            max_bytes=8 << 20,
            max_seconds=1.0,
        )
        try:
            with pytest.raises(WrongKey):
                await measure_link(request, mine)
            server.open(OpenLinkProbe(peer_public_key=mine.public, seconds=30.0))
            measured = await asyncio.wait_for(measure_link(request, mine), 20)
            assert measured.bytes_per_second > 1e6
            assert measured.round_trip_seconds > 0
            assert measured.num_bytes <= 8 << 20
            with pytest.raises(WrongKey):
                await measure_link(request, new_keypair())
        finally:
            await server.close()
            gatekeeper.stop()
            context.destroy(linger=0)

    asyncio.run(scenario())


def test_chunks_come_from_a_peer_that_lets_us_in(tmp_path: Path) -> None:
    """What it has not, what is damaged there, and what it does not let us have is told, and comes from elsewhere."""
    contents = [bytes([index]) * 1000 for index in range(10)]
    hashes = [hashlib.sha256(content).hexdigest() for content in contents]
    theirs, ours = ShardStore(tmp_path / "theirs", 1 << 30, "peer"), ShardStore(tmp_path / "ours", 1 << 30, "here")
    for digest, content in zip(hashes[:8], contents, strict=False):
        theirs.put(digest, content)
    theirs.path_of(hashes[3]).write_bytes(b"damaged")

    async def scenario() -> None:
        context = zmq.asyncio.Context()
        gatekeeper = asyncio_gatekeeper(context)
        mine, peer = new_keypair(), new_keypair()
        server = LinkServer(
            context, gatekeeper, "127.0.0.1", 0, peer, lambda chunk: theirs.path_of(chunk).read_bytes()
        )  # fmt: skip
        gatekeeper.start()
        await server.start()
        request = FetchChunks(
            holder="c",
            host="127.0.0.1",
            port=server.port,
            peer_public_key=peer.public,
            hashes=tuple(hashes),
            seconds=10.0,
        )
        try:
            refused = await fetch_chunks(request.model_copy(update={"seconds": 1.0}), mine, ours.put)
            assert sorted(refused) == sorted(hashes)
            server.open(OpenLinkProbe(peer_public_key=mine.public, seconds=30.0))
            missing = await asyncio.wait_for(fetch_chunks(request, mine, ours.put), 20)
        finally:
            await server.close()
            gatekeeper.stop()
            context.destroy(linger=0)
        assert sorted(missing) == sorted([hashes[3], *hashes[8:]])
        assert sorted(ours.missing(tuple(hashes))) == sorted(missing)

    asyncio.run(scenario())


# ---- profiler -------------------------------------------------------------------------------------------------------


def test_the_block_profiler_measures_every_curve_of_a_model() -> None:
    pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    spec = BERT_LARGE.model_copy(
        update={
            "hidden_size": 64,
            "num_heads": 4,
            "num_kv_heads": 4,
            "head_dim": 16,
            "ffn_size": 256,
            "vocab_size": 100,
        }
    )
    request = {"model": spec.model_dump(), "seq_len": 32, "num_threads": 1, "compute_device": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "agent.worker.profiler"],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    blocks = BlockProfile.model_validate_json(done.stdout)
    assert blocks.seq_len == 32
    assert (blocks.qkv.sizes[-1], blocks.up.sizes[-1], blocks.connective.sizes[-1]) == (4, 256, 32)
    curves = (blocks.qkv, blocks.core, blocks.out, blocks.up, blocks.down, blocks.connective, blocks.mlp_rows)
    assert all(seconds > 0 for curve in curves for seconds in curve.seconds)
    assert 0 < blocks.wire.encrypted_seconds_per_byte < 1e-6
    assert set(blocks.wire.convert_seconds_per_value) == {"exact", "bf16", "fp16", "int8"}


# ---- the worker's streams -------------------------------------------------------------------------------------------

REQUEST = GenerateTokens(holder="c", epoch=1, max_tokens=9)
END = GenerationEnded(
    reason="length", num_prompt_tokens=1, num_tokens=2, queued_seconds=0, prefill_seconds=0, decode_seconds=0
)  # fmt: skip


class ScriptedWorker:
    """The other end of a worker's private socket."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket

    async def receive(self) -> tuple[bytes, Message, list[bytes]]:
        request_id, body, *payload = await asyncio.wait_for(self._socket.recv_multipart(), 10)
        return request_id, decode(body), payload

    async def answer(self, request_id: bytes, *messages: Message) -> None:
        for message in messages:
            await self._socket.send_multipart([request_id, encode(message)])


@asynccontextmanager
async def scripted_worker() -> AsyncIterator[tuple[WorkerProcess, ScriptedWorker]]:
    context = zmq.asyncio.Context()
    process = WorkerProcess(context, "kitchen")
    process.state = "ready"
    process._tasks = [asyncio.create_task(process._receive())]
    socket = context.socket(zmq.PAIR)
    socket.connect(process._address)
    try:
        yield process, ScriptedWorker(socket)
    finally:
        await process.stop()
        context.destroy(linger=0)


def with_worker(scenario: Callable[[WorkerProcess, ScriptedWorker], Awaitable[None]]) -> None:
    async def main() -> None:
        async with scripted_worker() as (process, worker):
            await asyncio.wait_for(scenario(process, worker), 30)

    asyncio.run(main())


def token(index: int) -> TokensGenerated:
    return TokensGenerated(token_ids=(index,))


async def read(stream: Any) -> list[Message]:
    return [reply.message async for reply in stream]


def test_a_workers_tokens_are_passed_on_up_to_the_end() -> None:
    async def scenario(process: WorkerProcess, worker: ScriptedWorker) -> None:
        one, two = (asyncio.create_task(read(process.stream(REQUEST, [b"ids", name]))) for name in (b"1", b"2"))
        asked = [await worker.receive() for _ in range(2)]
        assert [(message, payload) for _, message, payload in asked] == [
            (REQUEST, [b"ids", b"1"]), (REQUEST, [b"ids", b"2"])
        ]  # fmt: skip
        for index in range(3):
            for request_id, _, [_, name] in asked:
                await worker.answer(request_id, token(10 * int(name) + index))
        await worker.answer(asked[0][0], END)
        await worker.answer(asked[1][0], Failed.of(StepFailed(device="rank 0", reason="aborted")))
        assert await one == [token(10), token(11), token(12), END]
        with pytest.raises(StepFailed):
            await two
        assert not process._pending

    with_worker(scenario)


def test_a_stream_that_is_closed_early_is_cancelled_at_the_worker() -> None:
    async def scenario(process: WorkerProcess, worker: ScriptedWorker) -> None:
        stream = process.stream(REQUEST, ())
        async with aclosing(stream):
            first = asyncio.create_task(anext(stream))
            request_id, _, _ = await worker.receive()
            await worker.answer(request_id, token(1), token(2))
            assert (await first).message == token(1)
        _, message, _ = await worker.receive()
        assert message == Cancel(request=request_id)
        await worker.answer(request_id, token(3))  # was on its way
        again = asyncio.create_task(read(process.stream(REQUEST, ())))
        request_id, _, _ = await worker.receive()
        await worker.answer(request_id, END)
        assert await again == [END]

    with_worker(scenario)


@pytest.mark.parametrize("end", ["death", "stop"])
def test_a_worker_that_ends_ends_its_streams(end: str) -> None:
    async def scenario(process: WorkerProcess, worker: ScriptedWorker) -> None:
        reading = asyncio.create_task(read(process.stream(REQUEST, ())))
        request_id, _, _ = await worker.receive()
        await worker.answer(request_id, token(1))
        if end == "death":
            process._fail(WorkerDied(device="kitchen", reason="killed by SIGSEGV"))
        else:
            await process.stop()
        with pytest.raises(WorkerDied):
            await reading
        if end == "death":  # whoever gives up a step learns why
            with pytest.raises(WorkerDied, match="SIGSEGV"):
                await process.abort(AbortStep(holder="c", epoch=1, reason="rank 0 waits"))

    with_worker(scenario)


def test_only_between_two_tokens_a_worker_may_not_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_TOKEN_SECONDS", 0.2)

    async def scenario(process: WorkerProcess, worker: ScriptedWorker) -> None:
        reading = asyncio.create_task(read(process.stream(REQUEST, ())))
        request_id, _, _ = await worker.receive()
        await asyncio.sleep(0.5)  # others come first
        await worker.answer(request_id, token(1))
        with pytest.raises(DeadlineExceeded):
            await reading
        _, message, _ = await worker.receive()
        assert message == Cancel(request=request_id)

    with_worker(scenario)


def test_a_worker_that_cannot_even_start_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies before it reads anything: nobody waits until its time to load is over."""
    monkeypatch.setattr(supervisor.sys, "executable", shutil.which("false"))
    start = next(message for message in EXAMPLES if isinstance(message, StartWorker))

    async def main() -> None:
        context = zmq.asyncio.Context()
        process = WorkerProcess(context, "kitchen")
        with pytest.raises(WorkerDied, match="exited with code 1"):
            await asyncio.wait_for(process.start(start), 20)
        await process.stop()
        context.destroy(linger=0)

    asyncio.run(main())
