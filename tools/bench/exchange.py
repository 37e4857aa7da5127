"""Time of one exchange of a token's partial sums, against a raw message of the same size.

`python -m tools.bench.exchange`; two processes of this machine, encrypted as the data plane is. Each of three kinds adds to the
one before: bytes over bare ZeroMQ sockets; the same bytes over the data plane's transport, which keeps them for the case of a
break and identifies the sender; sums as in decoding, with codec, header, and addition to the receiver's. The kinds are
interleaved, so that other load on the machine meets all of them.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Annotated, Any

import torch
import typer
import zmq
from zmq.auth import CURVE_ALLOW_ANY
from zmq.auth.thread import ThreadAuthenticator

from agent.worker.tracing import Recorder
from agent.worker.transformer.comm.casts import TorchCasts
from agent.worker.transformer.comm.collectives import Collectives
from agent.worker.transformer.comm.communicator import Communicator
from agent.worker.transformer.comm.staging import CpuStaging
from hearth.plan.geometry import spans
from hearth.plan.parts import WireFormat
from hearth.plan.phases import Phase
from hearth.plan.value_formats import VALUE_FORMAT_NAMES, VALUE_FORMATS
from hearth.platform.curve import harden, new_keypair
from hearth.transport.sockets import SocketTransport
from hearth.wire.codec import Codec
from hearth.wire.messages import Peer

_TIMEOUT_SECONDS = 30.0  # of each wait
_BYTES_PER_SECOND = 1e9  # of loopback, for the codec's choice of lz4
# One way: the ranks take turns, half of a round trip. Both ways: both ranks send at once, then receive.
KINDS = tuple(f"{message}, {way}" for way in ("one way", "both ways") for message in ("socket", "transport", "sums"))


class _RawLink:
    """One end of two bare encrypted sockets."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._gate = ThreadAuthenticator(self._context)
        self._gate.start()
        self._gate.configure_curve(domain="*", location=CURVE_ALLOW_ANY)
        self._keys = new_keypair()
        self._pull = self._context.socket(zmq.PULL)
        harden(self._pull)
        self._pull.curve_server = True
        self._pull.curve_secretkey = self._keys.secret.encode()
        self._pull.rcvtimeo = int(_TIMEOUT_SECONDS * 1000)
        self.address = {"port": self._pull.bind_to_random_port("tcp://127.0.0.1"), "public_key": self._keys.public}

    def connect(self, port: int, public_key: str) -> None:
        self._push = self._context.socket(zmq.PUSH)
        harden(self._push)
        self._push.curve_serverkey = public_key.encode()
        self._push.curve_publickey, self._push.curve_secretkey = (key.encode() for key in self._keys)
        self._push.connect(f"tcp://127.0.0.1:{port}")
        self.send, self.receive = self._push.send, self._pull.recv

    def close(self) -> None:
        self._push.close(linger=0)
        self._pull.close()
        self._gate.stop()
        self._context.term()


class _Sums:
    """One end of the exchange of partial sums of one row."""

    def __init__(self, rank: int, transport: SocketTransport, hidden_size: int, wire: WireFormat) -> None:
        codec = Codec(wire, _BYTES_PER_SECOND, time.perf_counter, TorchCasts())
        self._communicator = Communicator(transport, 0, bytes(16), {1 - rank: codec})
        self._communicator.start()
        self._staging = CpuStaging()
        self._collectives = Collectives(self._communicator, self._staging, spans([1, 0]), overlap=True)
        self._peer = 1 - rank
        self._own_1H = torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(rank))
        self._sum_1H = torch.zeros(1, hidden_size)

    def begin(self, step: int) -> None:
        self._communicator.begin_step(step, _TIMEOUT_SECONDS, Recorder(enabled=False))
        self._communicator.set_inline_receiving(True)

    def send(self, index: int) -> None:
        if not self._communicator.broadcast_inline(index, Phase.SUM_MLP, self._own_1H):
            self._collectives.send_rows(self._peer, index, Phase.SUM_MLP, self._own_1H)

    def receive(self, index: int) -> None:
        # A direct tile carries the number of the rank that gets it.
        key = self._communicator.key(index, Phase.SUM_MLP, self._communicator.rank, self._peer)
        if self._communicator.exchanges_inline(self._sum_1H):
            tile = self._communicator.receive_inline({self._peer: key}, self._sum_1H.shape)[self._peer]
            self._staging.add_from_wire(tile, self._sum_1H)
        else:
            self._collectives.receive_rows(index, Phase.SUM_MLP, self._peer, self._sum_1H, add=True)

    def exchange(self, index: int) -> None:
        self._collectives.one_shot_all_reduce(index, Phase.SUM_ATTENTION, self._own_1H, (0, 1), self._own_1H)

    def close(self) -> None:
        self._communicator.close()


def _run_rank(rank: int, pipe: Connection, hidden_size: int, values: str, rounds: int, count: int) -> Mapping[str, Any]:
    """One rank's part. Returns the seconds of each message or exchange, by kind, the median of each round."""
    torch.set_num_threads(1)
    wire = WireFormat.model_validate({"values": values})
    raw = _RawLink()
    # One for bytes, one for sums: the communicator's thread must not receive bytes.
    transport, sums_transport = (SocketTransport(rank, 2, "127.0.0.1", (0, 0), new_keypair()) for _ in range(2))
    bound = [{"port": each.port, "public_key": each.public_key} for each in (transport, sums_transport)]
    pipe.send((raw.address, *bound))
    raw_peer, *peers = pipe.recv()
    raw.connect(**raw_peer)
    for each, peer in zip((transport, sums_transport), peers, strict=True):
        each.connect([Peer(rank=1 - rank, host="127.0.0.1", bytes_per_second=_BYTES_PER_SECOND, **peer)])
    sums = _Sums(rank, sums_transport, hidden_size, wire)
    message = bytes(VALUE_FORMATS[wire.values].num_bytes(hidden_size, 1))

    def swap(send: Callable[[], object], receive: Callable[[], object]) -> None:
        send()
        receive()

    def turn(send: Callable[[], object], receive: Callable[[], object]) -> None:
        swap(*((send, receive) if rank == 0 else (receive, send)))

    raw_acts = (lambda: raw.send(message), raw.receive)
    transport_acts = (
        lambda: transport.send(1 - rank, [message]),
        lambda: transport.receive(_TIMEOUT_SECONDS),
    )
    acts: tuple[tuple[Callable[[int], object], float], ...] = (
        (lambda index: turn(*raw_acts), 0.5),
        (lambda index: turn(*transport_acts), 0.5),
        (lambda index: turn(lambda: sums.send(index), lambda: sums.receive(index)), 0.5),
        (lambda index: swap(*raw_acts), 1.0),
        (lambda index: swap(*transport_acts), 1.0),
        (sums.exchange, 1.0),
    )
    medians: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):  # the first round warms up
        sums.begin(number + 1)
        for kind, (act, share) in zip(KINDS, acts, strict=True):
            seconds = []
            for index in range(count):
                began = time.perf_counter()
                act(index)
                seconds.append((time.perf_counter() - began) * share)
            if number:
                medians[kind].append(statistics.median(seconds))
    pipe.send(None)
    pipe.recv()  # both are done
    sums.close()
    for each in (transport, sums_transport):
        each.close()
        each.release()
    raw.close()
    return medians


def _run_peer(pipe: Connection, *settings: Any) -> None:
    _run_rank(1, pipe, *settings)


def measure(hidden_size: int, values: str, rounds: int, count: int) -> Mapping[str, list[float]]:
    """Seconds of each kind: the median of each round of `count` messages or exchanges, on rank 0."""
    own, other = multiprocessing.get_context("spawn").Pipe()
    settings = (hidden_size, values, rounds, count)
    peer = multiprocessing.get_context("spawn").Process(target=_run_peer, args=(other, *settings), daemon=True)
    peer.start()
    medians = _run_rank(0, own, *settings)
    peer.join(_TIMEOUT_SECONDS)
    return medians


def main(
    hidden_size: Annotated[int, typer.Option(help="Values of a token's sums.")] = 2048,
    values: Annotated[str, typer.Option(help=f"Format on the wire: {', '.join(VALUE_FORMAT_NAMES)}.")] = "bf16",
    rounds: Annotated[int, typer.Option(help="Rounds of all kinds in turn.")] = 30,
    count: Annotated[int, typer.Option(help="Messages or exchanges of each kind per round.")] = 100,
) -> None:
    """Print the time of an exchange of partial sums and of a raw message of that size."""
    medians = measure(hidden_size, values, rounds, count)
    for kind in KINDS:
        seconds, raw = medians[kind], medians[kind.replace("sums", "socket").replace("transport", "socket")]
        ratio = statistics.median(each / base for each, base in zip(seconds, raw, strict=True))
        microseconds = f"{1e6 * statistics.median(seconds):6.1f} us, quietest round {1e6 * min(seconds):6.1f} us"
        print(f"{kind:20s} {microseconds}, {ratio:.2f} x a bare socket")


if __name__ == "__main__":
    typer.run(main)
