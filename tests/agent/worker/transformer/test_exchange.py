"""Exchange of a decoding step's partial sums: in-memory transport and real sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from support.memory_transport import MemoryHub
from support.waiting import wait_for

from hearth.errors import BadMessage, StepFailed
from hearth.plan.common import ValueFormatName, WireFormat
from hearth.plan.geometry import spans
from hearth.plan.phases import Phase
from hearth.platform.curve import new_keypair
from hearth.transport.base import Transport
from hearth.transport.sockets import SocketTransport
from hearth.wire.codec import NUMPY_CASTS, Array, Codec
from hearth.wire.framing import TileKey, encode_tile
from hearth.wire.messages import Peer

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from agent.worker.tracing import Recorder  # noqa: E402 (needs torch)
from agent.worker.transformer.comm.collectives import Collectives  # noqa: E402 (needs torch)
from agent.worker.transformer.comm.communicator import Communicator  # noqa: E402 (needs torch)
from agent.worker.transformer.comm.staging import CpuStaging, TorchCasts  # noqa: E402 (needs torch)

NUM_RANKS, NUM_LAYERS, HIDDEN = 3, 4, 96


@contextmanager
def memory() -> Iterator[Sequence[Transport]]:
    hub = MemoryHub(NUM_RANKS)
    yield [hub.transport(rank) for rank in range(NUM_RANKS)]
    hub.close()


@contextmanager
def sockets() -> Iterator[Sequence[Transport]]:
    made = [SocketTransport(rank, NUM_RANKS, "127.0.0.1", (0, 0), new_keypair()) for rank in range(NUM_RANKS)]
    peers = [
        Peer(rank=rank, host="127.0.0.1", port=each.port, public_key=each.public_key, bytes_per_second=1e9)
        for rank, each in enumerate(made)
    ]
    for rank, transport in enumerate(made):
        transport.connect([peer for peer in peers if peer.rank != rank])
    yield made
    for transport in made:
        transport.close()
        transport.release()


@contextmanager
def repeating() -> Iterator[Sequence[Transport]]:
    """Each message comes a second time, after its successor."""
    hub = MemoryHub(NUM_RANKS)
    hub.repeats = True
    yield [hub.transport(rank) for rank in range(NUM_RANKS)]
    hub.close()


TRANSPORTS = {"memory": memory, "sockets": sockets, "repeating": repeating}


@contextmanager
def communicators(
    transports: Sequence[Transport], values: ValueFormatName = "exact", inline: bool = True
) -> Iterator[list[Communicator]]:
    wire = WireFormat(values=values)
    made = []
    for rank, transport in enumerate(transports):
        codecs = {peer: Codec(wire, 1e9, time.perf_counter, TorchCasts()) for peer in range(NUM_RANKS) if peer != rank}
        made.append(Communicator(transport, 0, bytes(16), codecs))
        made[-1].start()
        made[-1].begin_step(1, 10.0, Recorder(enabled=False))
        made[-1].set_inline_receiving(inline)
    yield made
    for communicator in made:
        communicator.close()


def sums(communicator: Communicator, batch: int, scale: float = 1.0) -> np.ndarray:
    """One rank's sums of all layers; rank 1 has nothing to add."""
    rank = communicator.rank
    collectives = Collectives(communicator, CpuStaging(), spans([batch] + [0] * (NUM_RANKS - 1)), overlap=True)
    random = torch.Generator().manual_seed(rank)
    like_BH = torch.zeros(batch, HIDDEN)
    found = []
    for layer in range(NUM_LAYERS):
        own_BH = None if rank == 1 else scale * torch.randn(batch, HIDDEN, generator=random)
        found.append(collectives.one_shot_all_reduce(layer, Phase.SUM_MLP, own_BH, (0, 2), like_BH).numpy())
    return np.stack(found)


def on_all_ranks(made: Sequence[Communicator], act: Callable[[Communicator], np.ndarray]) -> list[np.ndarray]:
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(act, made))


@pytest.mark.parametrize("values", ["exact", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("batch", [1, 3])
def test_sums_do_not_depend_on_the_thread_that_receives(values: ValueFormatName, batch: int) -> None:
    results = []
    for transport in TRANSPORTS.values():
        for inline in (False, True):
            with transport() as transports, communicators(transports, values, inline) as made:
                results.append(on_all_ranks(made, lambda each: sums(each, batch)))
                assert [each.dropped for each in made] == [0] * NUM_RANKS
    for ranks in results:
        for found, expected in zip(ranks, results[0], strict=True):
            assert found.tobytes() == expected.tobytes()


def test_sums_out_of_range_of_fp16_are_exchanged_exactly() -> None:
    results = []
    for values in ("exact", "fp16"):
        with memory() as transports, communicators(transports, values) as made:
            results.append(on_all_ranks(made, lambda each: sums(each, 1, scale=1e9)))
    np.testing.assert_array_equal(*results)


def test_sums_are_exchanged_in_and_out_of_inference_mode() -> None:
    with memory() as transports, communicators(transports, "bf16") as made:
        for step, mode in enumerate((True, False), 2):
            for each in made:
                each.begin_step(step, 10.0, Recorder(enabled=False))

            def sums_in_mode(each: Communicator, mode: bool = mode) -> np.ndarray:
                with torch.inference_mode(mode):
                    return sums(each, 1)

            assert all(found.shape == (NUM_LAYERS, 1, HIDDEN) for found in on_all_ranks(made, sums_in_mode))


def test_one_rank_alone_sums_without_a_copy() -> None:
    hub = MemoryHub(1)
    communicator = Communicator(hub.transport(0), 0, bytes(16), {})
    communicator.start()
    communicator.begin_step(1, 5.0, Recorder(False))
    communicator.set_inline_receiving(True)
    own_BH = torch.randn(1, HIDDEN)
    alone = Collectives(communicator, CpuStaging(), spans((1,)), overlap=True)
    assert alone.one_shot_all_reduce(0, Phase.SUM_MLP, own_BH, [0], own_BH) is own_BH
    communicator.close()
    hub.close()


def test_sent_tiles_are_counted_alike_on_both_paths() -> None:
    counts = []
    for inline in (False, True):
        with memory() as transports, communicators(transports, "bf16", inline) as made:
            on_all_ranks(made, lambda each: sums(each, 1))
            counts.append([each.wire_stats() for each in made])
    assert counts[0] == counts[1]


def test_messages_other_than_the_expected_one_are_processed_as_ever() -> None:
    """A later sum is kept; one of another plan, and one under another rank's name, are dropped."""
    with memory() as transports, communicators(transports) as made:
        transports[0].interrupt()
        wait_for("the end of the communication thread's last receive", made[0]._acquire_receiver)
        codec = Codec(WireFormat(), 1e9, time.perf_counter)
        keys = [made[2].key(layer, Phase.SUM_MLP, 0, 2) for layer in range(2)]
        for source, token, key, value in (
            (2, bytes(range(16)), keys[0], 1.0),
            (1, bytes(16), keys[0], 2.0),
            (2, bytes(16), keys[1], 3.0),
            (2, bytes(16), keys[0], 4.0),
        ):
            row = np.full((1, HIDDEN), value, np.float32)
            transports[source].send(0, encode_tile(token, key, row, codec))
        found = [made[0].receive_inline({2: key}, (1, HIDDEN))[2][0, 0] for key in keys]
        assert found == [4.0, 3.0]
        assert made[0].dropped == 2


def test_sums_of_another_shape_are_refused() -> None:
    with memory() as transports, communicators(transports) as made:
        transports[0].interrupt()
        wait_for("the end of the communication thread's last receive", made[0]._acquire_receiver)
        keys = {0: made[2].key(0, Phase.SUM_MLP, 0, 2)}
        made[2].send_to_all(keys, np.ones((1, 1), np.float32))
        collectives = Collectives(made[0], CpuStaging(), spans([1, 0, 0]), overlap=True)
        with pytest.raises(BadMessage, match="shape"):
            collectives.one_shot_all_reduce(0, Phase.SUM_MLP, torch.ones(1, HIDDEN), (0, 2), torch.ones(1, HIDDEN))


def test_broadcast_rows_are_converted_once_per_format(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[Array] = []

    def to_bf16(casts: TorchCasts, array: Array) -> Array:
        converted.append(array)
        return NUMPY_CASTS.to_bf16(array)

    monkeypatch.setattr(TorchCasts, "to_bf16", to_bf16)
    with memory() as transports, communicators(transports, "bf16") as made:
        collectives = Collectives(made[0], CpuStaging(), spans([1, 0, 0]), overlap=True)
        collectives.broadcast(0, Phase.SUM_MLP, torch.ones(1, HIDDEN))
        assert len(converted) == 1
        assert made[0].wire_stats().num_tiles == NUM_RANKS - 1


@pytest.mark.parametrize(
    "wait",
    [lambda each, key: each.receive([key]), lambda each, key: each.receive_inline({key.source: key}, (1, HIDDEN))],
    ids=["any tile", "sums"],
)
@pytest.mark.parametrize("transport", ["memory", "sockets"])
def test_missing_sums_are_reported_at_the_deadline(
    transport: str, wait: Callable[[Communicator, TileKey], object]
) -> None:
    with TRANSPORTS[transport]() as transports, communicators(transports) as made:
        made[0].begin_step(2, 0.2, Recorder(enabled=False))
        key = made[0].key(0, Phase.SUM_MLP, 0, 2)
        transports[0].interrupt()
        wait_for("the end of the communication thread's last receive", made[0]._acquire_receiver)
        began = time.monotonic()
        with pytest.raises(StepFailed, match="did not arrive from rank 2"):
            wait(made[0], key)
        assert 0.2 <= time.monotonic() - began < 5


def test_received_bf16_values_equal_those_of_numpy() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)  # with NaN, infinities and subnormals
    for size in (1 << 10, 1 << 16):  # below and above the size from which torch converts
        parts = every.reshape(-1, size)
        found = np.concatenate([TorchCasts().from_bf16(part) for part in parts])
        np.testing.assert_array_equal(found.view(np.uint32), NUMPY_CASTS.from_bf16(every).view(np.uint32))
