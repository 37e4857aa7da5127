"""Small random ONNX models, random cuts, and all ranks of a graph's plan in one process with in-memory transport."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from support.graph_plans import make_graph_plan
from support.memory_transport import MemoryHub
from support.waiting import PATIENCE

from agent.daemon.store import ShardStore
from agent.worker.graph.engine import GraphEngine
from agent.worker.graph.schedule import routes_for
from agent.worker.graph.sessions import SegmentSession, load_segment
from hearth.plan.common import WireFormat
from hearth.plan.plan import GraphPlan
from hearth.wire.codec import Codec
from hearth.wire.framing import pack_array, unpack_array
from hearth.wire.messages import ArrayChunks, ComputeDevice, Failed, Message, Run, RunDone, SegmentFiles

Array = np.ndarray[Any, Any]

ROWS, WIDTH = 3, 24
TOKEN = bytes(range(16))
WAIT_SECONDS = 60.0 * PATIENCE
_EXTERNAL_ABOVE = 1 << 10  # smaller weights stay in the protobuf
_CHUNK_BYTES = 4 << 10  # larger ones are divided into chunks
_KINDS = ("MatMul", "Add", "Mul", "Relu", "Tanh", "Softmax", "Split", "Greater", "Where", "Cast", "Back")


class _Builder:
    """Adds operators, each of which reads random earlier values of the right type."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.nodes: list[onnx.NodeProto] = []
        self.info: dict[str, onnx.ValueInfoProto] = {}
        self.names: dict[int, list[str]] = {TensorProto.FLOAT: [], TensorProto.INT64: [], TensorProto.BOOL: []}

    def value(self, name: str, dtype: int = TensorProto.FLOAT, width: int = WIDTH) -> str:
        self.info[name] = helper.make_tensor_value_info(name, dtype, [ROWS, width])
        if width == WIDTH:  # halves are only joined again
            self.names[dtype].append(name)
        return name

    def any(self, dtype: int = TensorProto.FLOAT) -> str:
        return self.rng.choice(self.names[dtype])

    def add(self, kind: str, inputs: Sequence[str], dtype: int = TensorProto.FLOAT, **attributes: Any) -> None:
        number = len(self.nodes)
        output = self.value(f"t{number}", dtype)
        self.nodes.append(helper.make_node(kind, inputs, [output], name=f"n{number}", **attributes))

    def add_split(self) -> None:
        number = len(self.nodes)
        halves = [self.value(f"t{number}{half}", width=WIDTH // 2) for half in "ab"]
        self.nodes.append(helper.make_node("Split", [self.any()], halves, name=f"n{number}", axis=1, num_outputs=2))
        self.add("Concat", halves[::-1], axis=1)

    def add_any(self) -> None:
        kind = self.rng.choice(_KINDS)
        if kind == "MatMul":
            self.add(kind, [self.any(), self.rng.choice(["w0", "w1"])])
        elif kind in ("Add", "Mul"):
            self.add(kind, [self.any(), self.any()])
        elif kind == "Split":
            self.add_split()
        elif kind == "Greater":
            self.add(kind, [self.any(), self.any()], TensorProto.BOOL)
        elif kind == "Where" and self.names[TensorProto.BOOL]:
            self.add(kind, [self.any(TensorProto.BOOL), self.any(), self.any()])
        elif kind == "Cast":
            self.add(kind, [self.any()], TensorProto.INT64, to=TensorProto.INT64)
        elif kind == "Back" and self.names[TensorProto.INT64]:
            self.add("Cast", [self.any(TensorProto.INT64)], to=TensorProto.FLOAT)
        else:
            self.add(kind if kind in ("Tanh", "Softmax") else "Relu", [self.any()])


def random_model(rng: random.Random, num_operators: int) -> onnx.ModelProto:
    """A graph with branches, joins, side inputs and shared weights, in floats, integers and booleans; two inputs."""
    builder = _Builder(rng)
    inputs = [builder.value("x"), builder.value("z")]
    builder.add("Add", inputs)  # uses both
    while len(builder.nodes) < num_operators:
        builder.add_any()
    taken = {name for node in builder.nodes for name in node.input}
    outputs = [name for name in builder.info if name not in taken]
    # an output that is also read by an operator
    outputs += [name for name in [builder.any()] if name not in (*outputs, *inputs)]
    weights = [numpy_helper.from_array(random_array(index, (WIDTH, WIDTH)) / 5, f"w{index}") for index in range(2)]
    return make_model(
        helper.make_graph(
            builder.nodes,
            "random",
            [builder.info[name] for name in inputs],
            [builder.info[name] for name in outputs],
            weights,
            value_info=list(builder.info.values()),
        )
    )


def random_array(seed: int, shape: Sequence[int] = (ROWS, WIDTH)) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make_model(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


# ---- cutting --------------------------------------------------------------------------------------------------------


def random_cut(model: onnx.ModelProto, rng: random.Random, num_segments: int, num_ranks: int) -> GraphPlan:
    """Runs of a random topological order, each on a random rank; every rank has at least one."""
    order = _random_order(model, rng)
    places = sorted(rng.sample(range(1, len(order)), min(num_segments, len(order)) - 1))
    stretches = [order[a:b] for a, b in zip([0, *places], [*places, len(order)], strict=True)]
    ranks = [rng.randrange(num_ranks) for _ in stretches]
    for rank, place in enumerate(rng.sample(range(len(ranks)), num_ranks)):
        ranks[place] = rank
    return plan_of(model, list(zip(ranks, stretches, strict=True)))


def _random_order(model: onnx.ModelProto, rng: random.Random) -> list[int]:
    """Operators as indices, in a random topological order."""
    nodes = model.graph.node
    maker = {name: index for index, node in enumerate(nodes) for name in node.output}
    waiting = {index: {maker[name] for name in node.input if name in maker} for index, node in enumerate(nodes)}
    order: list[int] = []
    while waiting:
        chosen = rng.choice([index for index, before in waiting.items() if not before])
        del waiting[chosen]
        order.append(chosen)
        for before in waiting.values():
            before.discard(chosen)
    return order


def plan_of(
    model: onnx.ModelProto, stretches: Sequence[tuple[int, Sequence[int]]], wire: WireFormat | None = None
) -> GraphPlan:
    """A plan of these ranks with their operators, in this order."""
    graph = model.graph
    outputs = [value.name for value in graph.output]
    weights = {tensor.name for tensor in graph.initializer}
    taken = [{name for index in operators for name in graph.node[index].input if name} for _, operators in stretches]
    segments = []
    for place, (rank, operators) in enumerate(stretches):
        made = [name for index in operators for name in graph.node[index].output]
        elsewhere = {name for other, names in enumerate(taken) if other != place for name in names}
        leaving = [name for name in made if name in elsewhere or name in outputs]
        segments.append((rank, sorted(taken[place] - set(made) - weights), leaving))
    plan = make_graph_plan(
        segments, [value.name for value in graph.input], outputs, wire or WireFormat(lz4="off")
    )  # fmt: skip
    numbered = [
        segment.model_copy(update={"operators": tuple(operators)})
        for segment, (_, operators) in zip(plan.body.segments, stretches, strict=True)
    ]
    return plan.model_copy(update={"body": plan.body.model_copy(update={"segments": tuple(numbered)})})


def segment_files(
    model: onnx.ModelProto, plan: GraphPlan, rank: int, put: Callable[[bytes], str]
) -> tuple[SegmentFiles, ...]:
    """The files of one rank, as the coordinator creates them. `put` stores a chunk and returns its hash."""
    graph = model.graph
    values = {value.name: value for value in (*graph.input, *graph.output, *graph.value_info)}
    files = []
    for segment in plan.body.segments_of(rank):
        nodes = [graph.node[index] for index in segment.operators]
        used = {name for node in nodes for name in node.input}
        parts = [_placeholder(tensor, put) for tensor in graph.initializer if tensor.name in used]
        part = helper.make_graph(
            nodes,
            "segment",
            [values[name] for name in segment.inputs],
            [values[name] for name in segment.outputs],
            [tensor for tensor, _ in parts],
        )
        proto = make_model(part)
        del proto.opset_import[:]
        proto.opset_import.extend(model.opset_import)
        weights = tuple(weight for _, weight in parts if weight is not None)
        files.append(SegmentFiles(graph=(put(proto.SerializeToString()),), initializers=weights))
    return tuple(files)


def _placeholder(
    tensor: onnx.TensorProto, put: Callable[[bytes], str]
) -> tuple[onnx.TensorProto, ArrayChunks | None]:  # fmt: skip
    array = numpy_helper.to_array(tensor)
    if array.nbytes <= _EXTERNAL_ABOVE:
        return tensor, None
    empty = onnx.TensorProto(
        name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=TensorProto.EXTERNAL
    )  # fmt: skip
    empty.external_data.add(key="location", value="elsewhere")
    data = array.tobytes()
    hashes = tuple(put(data[start : start + _CHUNK_BYTES]) for start in range(0, len(data), _CHUNK_BYTES))
    return empty, ArrayChunks(name=tensor.name, dtype=array.dtype.name, shape=array.shape, chunks=hashes)


def put_into(store: ShardStore) -> Callable[[bytes], str]:
    def put(data: bytes) -> str:
        name = hashlib.sha256(data).hexdigest()
        store.put(name, data)
        return name

    return put


def reference(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs of one onnxruntime session."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feeds)), strict=True))


# ---- running --------------------------------------------------------------------------------------------------------


class GraphCluster:
    """Context manager: all ranks of a plan. `sessions` by rank replace the model."""

    def __init__(
        self,
        plan: GraphPlan,
        model: onnx.ModelProto | None = None,
        folder: Path | None = None,
        sessions: Sequence[Sequence[Any]] | None = None,
        max_in_flight: int = 16,
        compute_device: ComputeDevice = "cpu",
    ) -> None:
        self.plan = plan
        self._compute_device: ComputeDevice = compute_device
        self.hub = MemoryHub(plan.num_ranks)
        self.routes = [routes_for(plan, rank) for rank in range(plan.num_ranks)]
        self.answers: dict[bytes, tuple[Message, list[bytes]]] = {}
        self._answered = threading.Condition()
        if sessions is None:
            assert model is not None
            assert folder is not None
            sessions = [self._load(model, rank, folder) for rank in range(plan.num_ranks)]
        self.engines = [
            GraphEngine(
                self.routes[rank], TOKEN, sessions[rank], self.hub.transport(rank),
                {peer: Codec(plan.wire, 1e9, time.perf_counter) for peer in range(plan.num_ranks) if peer != rank},
                max_in_flight, self._answer,
            )
            for rank in range(plan.num_ranks)
        ]  # fmt: skip
        self.threads = [threading.Thread(target=engine.compute, daemon=True) for engine in self.engines]

    def __enter__(self) -> GraphCluster:
        for engine, thread in zip(self.engines, self.threads, strict=True):
            engine.start()
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines:
            engine.close()
        self.hub.close()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()

    def start(
        self,
        step: int,
        feeds: Mapping[str, Array],
        ranks: Sequence[int] | None = None,
        timeout: float = 30.0 * PATIENCE,
        **fields: Any,
    ) -> None:
        """Send a request to all ranks, or to the given ones."""
        for rank in range(self.plan.num_ranks) if ranks is None else ranks:
            names = sorted(self.routes[rank].graph_inputs & feeds.keys())
            request = Run(
                holder="test", epoch=self.plan.epoch, step=step, timeout_seconds=timeout, names=tuple(names), **fields
            )  # fmt: skip
            payload = [bytes(frame) for name in names for frame in pack_array(feeds[name])]
            self.engines[rank].run(self.request_id(step, rank), request, payload)

    def answer(self, step: int, rank: int, seconds: float = WAIT_SECONDS) -> tuple[Message, list[bytes]]:
        key = self.request_id(step, rank)
        with self._answered:
            assert self._answered.wait_for(lambda: key in self.answers, seconds), f"step {step}, rank {rank}: no answer"
            return self.answers[key]

    def outputs(self, step: int) -> dict[str, Array]:
        """Every output of a request. Raises the error of a rank, if any."""
        found: dict[str, Array] = {}
        for rank in range(self.plan.num_ranks):
            message, payload = self.answer(step, rank)
            if isinstance(message, Failed):
                raise message.error()
            assert isinstance(message, RunDone)
            found |= {name: unpack_array(payload[2 * i : 2 * i + 2]) for i, name in enumerate(message.names)}
        return found

    @staticmethod
    def request_id(step: int, rank: int) -> bytes:
        return step.to_bytes(4, "little") + rank.to_bytes(4, "little")

    def _answer(self, request_id: bytes, message: Message, payload: Sequence[Any]) -> None:
        with self._answered:
            assert request_id not in self.answers, "answered twice"
            self.answers[request_id] = message, [bytes(frame) for frame in payload]
            self._answered.notify_all()

    def _load(self, model: onnx.ModelProto, rank: int, folder: Path) -> list[SegmentSession]:
        store = ShardStore(folder / f"store{rank}", 1 << 30, f"device{rank}")
        files, device = segment_files(model, self.plan, rank, put_into(store)), self._compute_device
        (scratch := store.path / "scratch").mkdir()
        return [
            load_segment(each, f"segment {segment.number}", segment.inputs, segment.outputs, scratch, 1, device)[0]
            for each, segment in zip(files, self.routes[rank].segments, strict=True)
        ]
