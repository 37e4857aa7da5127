"""Overlap of communication and computation: traces over a throttled in-memory transport."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.memory_transport import MemoryHub
from support.models import save_random_model, small_bert
from support.plans import make_plan
from support.waiting import WAIT_LIMIT_SECONDS, wait_for

from coordinator.models.checkpoint.families import read_spec
from hearth.errors import DeadlineExceeded, StepFailed
from hearth.plan.common import WireFormat
from hearth.plan.geometry import Span, spans
from hearth.plan.model_spec import ModelSpec
from hearth.plan.phases import Phase
from hearth.trace import overlap_seconds, transfers
from hearth.wire.codec import Codec
from hearth.wire.framing import TileKey, encode_tile
from hearth.wire.messages import Run

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from support.engines import TOKEN, EngineCluster

from agent.worker.tracing import Recorder
from agent.worker.transformer import blocks
from agent.worker.transformer.comm.communicator import Communicator


@pytest.fixture(scope="module")
def wide_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for a tile's GEMM to take milliseconds."""
    config = small_bert(hidden_size=768, num_attention_heads=12, intermediate_size=3072, max_position_embeddings=512)
    return save_random_model(tmp_path_factory.mktemp("wide"), config)


def cluster_of(model_dir: Path, split: tuple[int, ...]) -> EngineCluster:
    return EngineCluster(model_dir, make_plan(read_spec(model_dir), "hmp", split))


@contextmanager
def step_that_fails(cluster: EngineCluster, num_rows: int, timeout: float) -> Iterator[None]:
    """A step in another thread, which waits in vain for tiles from another rank; at the end it has failed."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(cluster.run, [[3] * num_rows], timeout=timeout)
        yield
        with pytest.raises(StepFailed, match="from rank"):
            running.result(WAIT_LIMIT_SECONDS)


def overlapped_share(model_dir: Path, overlap: bool) -> float:
    """The fraction of transfer time during which the receiver computes: median of three requests of 384 rows."""
    plan = make_plan(read_spec(model_dir), "hmp", (1, 1, 1), overlap=overlap)
    shares = []
    # At this rate a tile's transfer takes about as long as its GEMM.
    with EngineCluster(model_dir, plan, bytes_per_second=150e6) as cluster:
        cluster.run([[3] * 384])
        for _ in range(3):
            _, answers = cluster.run([[3] * 384], trace=True)
            traces = cluster.traces(answers)
            moved = transfers(traces)
            # 2 layers x (2 gathers + 2 reduces) x 3 tiles x 2 hops, and the exchange of embeddings.
            assert len(moved) >= 2 * 4 * 3 * 2
            shares.append(overlap_seconds(traces) / sum(t.end_seconds - t.start_seconds for t in moved))
    return statistics.median(shares)


def test_transfers_overlap_gemms_if_enabled(wide_bert: Path, tmp_path: Path) -> None:
    with_overlap = overlapped_share(wide_bert, True)
    without = overlapped_share(wide_bert, False)
    assert with_overlap > 0.2
    assert with_overlap > 1.5 * without


def test_gathered_tile_is_forwarded_during_the_gemm(wide_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock-step loop would forward a tile only after the receiver's own GEMM.

    Here rank 1's GEMM lasts until rank 2 has the tile of rank 0, which reaches it only through rank 1.
    """
    plan = make_plan(read_spec(wide_bert), "hmp", (1, 1, 1))
    tile_0, tile_1, tile_2 = spans((128, 128, 128))
    own = threading.local()  # each rank computes in its own thread, its own tile first
    forwarded = threading.Event()
    in_time: list[bool] = []
    project_qkv = blocks.project_qkv

    def delayed_project_qkv(
        spec: ModelSpec, layer: Any, target: int, x_xH: Any, rows: Any, span: Span, out: Any
    ) -> None:
        own.tile = getattr(own, "tile", span)
        if own.tile == tile_2 and span == tile_0:
            forwarded.set()
        if own.tile == span == tile_1:
            in_time.append(forwarded.wait(WAIT_LIMIT_SECONDS))
        project_qkv(spec, layer, target, x_xH, rows, span, out)

    monkeypatch.setattr(blocks, "project_qkv", delayed_project_qkv)
    with EngineCluster(wide_bert, plan) as cluster:
        cluster.run([[3] * 384], timeout=2 * WAIT_LIMIT_SECONDS)
    assert in_time
    assert all(in_time)


def test_trace_includes_tiles_that_arrived_before_the_step(wide_bert: Path) -> None:
    request = Run(holder="test", epoch=1, step=1, output="hidden", timeout_seconds=30.0, trace=True)
    ids, lengths = np.full(64, 3, np.int32), np.array([0, 64], np.int32)  # an id whose embedding rank 0 holds
    with (
        cluster_of(wide_bert, (1, 1)) as cluster,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(cluster.engines[0].run, request, ids, lengths)
        second = cluster.communicators[1]
        early = second.key(0, Phase.EMBED, tile=1, source=0, step=1)
        wait_for("the embeddings of rank 1's rows", lambda: second.has_arrived([early]))
        done, _ = cluster.engines[1].run(request, ids, lengths)
        sent = [(e.kind, e.layer, e.tile) for e in first.result(30.0)[0].trace if e.lane == "send"]
    assert sent[0] == (Phase.EMBED, 0, 1)
    assert sorted((e.kind, e.layer, e.tile) for e in done.trace if e.lane == "receive") == sorted(sent)


def test_silent_peer_raises_step_failed_after_the_timeout(wide_bert: Path) -> None:
    with cluster_of(wide_bert, (1, 1)) as cluster:
        cluster.hub.cut(0, 1)
        with pytest.raises(StepFailed, match=r"within 0\.3 s"):
            cluster.run([[3] * 8], timeout=0.3)
        cluster.hub.mend()
        rows, _ = cluster.run([[3] * 8])  # tiles left over from the failed step do not disturb the next
        assert rows.shape == (8, 768)


def test_rank_that_waits_long_names_the_one_that_should_have_sent(wide_bert: Path) -> None:
    """Around a ring, that is the previous rank, whatever rows are missing."""
    with cluster_of(wide_bert, (1, 1, 1)) as cluster:
        cluster.run([[3] * 9])
        cluster.hub.cut(1, 2)
        waiting = cluster.communicators[2]
        assert waiting.progress(0.0).late_rank is None
        with step_that_fails(cluster, 9, timeout=2.0):
            wait_for("the report", lambda: waiting.progress(0.0).late_rank == 1, seconds=2)
        cluster.hub.mend()
        cluster.run([[3] * 9])
        assert waiting.progress(0.0).late_rank is None


def test_rank_that_computes_without_progress_is_busy_and_one_that_waits_or_gets_tiles_is_not(wide_bert: Path) -> None:
    """So a rank that computes for ever counts as hung before its peers give up the step."""
    with cluster_of(wide_bert, (1, 1)) as cluster:
        cluster.run([[3] * 8])
        computing = cluster.communicators[0]
        time.sleep(0.3)
        before = computing.progress(0.0)
        assert before.busy_seconds >= 0.3
        assert before.limit_seconds < 30.0  # of a wait
        assert computing.progress(time.monotonic()).busy_seconds < 0.3
        cluster.hub.cut(0, 1)
        waiting = cluster.communicators[1]
        with step_that_fails(cluster, 8, timeout=1.0):
            wait_for("the wait", lambda: waiting.progress(0.0).step_seconds > 0.5, seconds=5)
            assert waiting.progress(0.0).busy_seconds == 0.0


def test_abort_ends_a_wait_immediately(wide_bert: Path) -> None:
    with cluster_of(wide_bert, (1, 1)) as cluster:
        cluster.hub.cut(0, 1)
        cluster.hub.cut(1, 0)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(cluster.run, [[3] * 8], timeout=60.0)
            while not running.done():  # an abort before the step begins has no effect
                for communicator in cluster.communicators:
                    communicator.abort(DeadlineExceeded(action="the test", seconds=1))
                wait([running], 0.05)
        assert isinstance(running.exception(), DeadlineExceeded)


def test_tiles_of_other_epochs_or_steps_are_dropped_and_counted(wide_bert: Path) -> None:
    plan = make_plan(read_spec(wide_bert), "hmp", (1, 1), epoch=5)
    link = Codec(WireFormat(lz4="off"), 1e9, lambda: 0.0)
    with EngineCluster(wide_bert, plan) as cluster:
        sender = cluster.hub.transport(0)
        stray = np.zeros((1, 1), np.float32)
        for epoch, step, source in ((4, 1, 0), (5, 99, 0), (5, 1, 1)):
            key = TileKey(epoch, step, 0, Phase.GATHER_MLP, 0, source)
            sender.send(1, encode_tile(TOKEN if source == 0 else bytes(16), key, stray, link))
        sender.send(1, [b"nonsense"])
        rows, answers = cluster.run([[3] * 8])
        assert rows.shape == (8, 768)
        assert answers[1].dropped_messages == 4


@pytest.fixture
def pair() -> Iterator[list[Communicator]]:
    """Two ranks in their first step, whose tiles are sent as fp16."""
    hub = MemoryHub(2, None)
    communicators = [
        Communicator(hub.transport(rank), 1, TOKEN, {1 - rank: Codec(WireFormat(lz4="off"), 1e9, lambda: 0.0)})
        for rank in range(2)
    ]
    for each in communicators:
        each.start()
        each.begin_step(1, WAIT_LIMIT_SECONDS, Recorder(False), {1 - each.rank: "fp16"})
    yield communicators
    for each in communicators:
        each.close()
    hub.close()


def copied_soon(tile: np.ndarray[Any, Any]) -> Callable[[], np.ndarray[Any, Any]]:
    """The end of a copy from a GPU, some time from now."""
    copied = threading.Event()
    threading.Timer(0.05, copied.set).start()

    def ready() -> np.ndarray[Any, Any]:
        assert copied.wait(WAIT_LIMIT_SECONDS)
        return tile

    return ready


def test_tile_that_waits_for_a_gpu_is_sent_in_the_format_of_its_step(pair: list[Communicator]) -> None:
    """The next step may have another format, and begins before the copy from the GPU has ended."""
    (sender, receiver), tile = pair, np.ones((4, 8), np.float32)
    key = sender.key(0, Phase.STAGE_ROWS, 1, 0)
    sender.when_ready(copied_soon(tile), lambda array: sender.send(1, key, array))
    sender.begin_step(2, WAIT_LIMIT_SECONDS, Recorder(False), {1: "exact"})
    (received,) = receiver.receive([key])
    assert np.array_equal(received, tile)
    assert sender.wire_stats().sent_bytes == tile.nbytes // 2


def test_partial_sum_that_waits_for_a_gpu_is_added_after_the_next_step_has_begun(pair: list[Communicator]) -> None:
    """The step dropped the sum of the rank before, so that the next rank waited for ever."""
    (adder, other), tile = pair, np.ones((4, 8), np.float32)
    key = adder.key(0, Phase.REDUCE_MLP, 1, 1)
    other.send(0, key, tile)
    wait_for("the sum of the rank before", lambda: adder.has_arrived([key]))
    adder.when_ready(copied_soon(tile), lambda array: adder.reduce(key, array))
    adder.begin_step(2, WAIT_LIMIT_SECONDS, Recorder(False), {1: "fp16"})
    other.extend_timeout(5.0 - WAIT_LIMIT_SECONDS)
    (total,) = other.receive([key._replace(source=0)])
    assert np.array_equal(total, 2 * np.ones((4, 8)))


@pytest.mark.parametrize("arrives", [True, False], ids=["tile", "failure"])
def test_partial_sum_is_sent_before_the_next_step_begins(pair: list[Communicator], arrives: bool) -> None:
    """The next rank needs this partial sum, even if this rank needs nothing more of the step itself."""
    (adder, other), tile = pair, np.ones((4, 8), np.float32)
    key = adder.key(0, Phase.REDUCE_MLP, 1, 1)
    adder.reduce(key, np.ones((4, 8), np.float32))
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(adder.begin_step, 2, WAIT_LIMIT_SECONDS, Recorder(False), {1: "fp16"}, clear_failure=False)
        wait_for("the next step, or its wait", lambda: begun.done() or bool(adder._waits))
        other.extend_timeout(5.0 - WAIT_LIMIT_SECONDS)
        if arrives:
            other.send(0, key, tile)
            (total,) = other.receive([key._replace(source=0)])
            assert np.array_equal(total, 2 * tile)
        else:
            adder.abort(StepFailed(device="rank 1", reason="it has ended"))
        begun.result(WAIT_LIMIT_SECONDS)
    assert adder.step == 2
    assert not adder.dropped
